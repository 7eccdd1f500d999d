"""How fast this machine trains: fedcat beside a plain PyTorch loop, in one process."""
