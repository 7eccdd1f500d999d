"""What a user is told while data is fetched and prepared, on the standard error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def _console() -> Console:
    return Console(stderr=True, highlight=False)


def notify(text: str) -> None:
    """Print a line."""
    console = _console()
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """Show on a terminal, while the block runs, what is being done."""
    console = _console()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextmanager
def show_download(name: str, done: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show how a download gets on: a bar on a terminal, else one line.

    Parameters
    ----------
    name : str
        What is fetched.
    done : int
        Bytes that are there already.
    total : int or None
        Bytes in all, where they are known.

    Yields
    ------
    callable
        To be called with the number of bytes of each piece.
    """
    console = _console()
    if not console.is_terminal:
        size = "" if total is None else f", {total / 1e6:.1f} MB"
        notify(f"downloading {name}{size}{f' ({done / 1e6:.1f} MB are there)' if done else ''}")
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(name, total=total, completed=done)
        yield lambda count: progress.advance(task, count)
