"""The command line. The commands are imported late: PyTorch takes seconds, and Ctrl-C must not end in a traceback."""

import sys

from fedcat.version import __version__


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:
        print(f"fedcat {__version__}")
        return
    try:
        from fedcat.cli.app import main as run
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    run()
