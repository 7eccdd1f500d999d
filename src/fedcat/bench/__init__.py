"""Training speed on this machine: fedcat against a plain PyTorch loop in the same process."""
