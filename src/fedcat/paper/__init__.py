"""The paper's experiments: its printed numbers, the runs they need, and tables, figures and pages of them."""
