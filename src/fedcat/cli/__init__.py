"""The command line: what a user types and what a terminal shows."""

from fedcat.cli.app import main

__all__ = ["main"]
