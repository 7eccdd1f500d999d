"""Messages and progress on standard error while data is downloaded and decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


def _console() -> Console:
    return Console(stderr=True, highlight=False)


def notify(text: str) -> None:
    """Print a line on standard error."""
    console = _console()
    console.print(text, markup=False, soft_wrap=not console.is_terminal)


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """Show a status line on a terminal while the block runs."""
    console = _console()
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


@contextmanager
def show_download(name: str, done: int, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show the progress of a download: a bar on a terminal, otherwise one line.

    Parameters
    ----------
    name : str
        The file's name.
    done : int
        Bytes already downloaded.
    total : int or None
        Total bytes, if known.

    Yields
    ------
    callable
        Call it with the number of bytes of each chunk.
    """
    console = _console()
    if not console.is_terminal:
        size = "" if total is None else f", {total / 1e6:.1f} MB"
        notify(f"downloading {name}{size}{f' ({done / 1e6:.1f} MB already downloaded)' if done else ''}")
        yield lambda count: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(name, total=total, completed=done)
        yield lambda count: progress.advance(task, count)
