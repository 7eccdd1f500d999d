"""``python -m fedcat``."""

from fedcat.cli import main

main()
