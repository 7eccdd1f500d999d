"""Messages and progress on standard error while data is downloaded and decoded."""

from __future__ import annotations

from collections.abc import Iterator
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


class DownloadBar:
    """A bar on a terminal, otherwise one line. pooch sets `total` when the server answers, then calls the methods."""

    def __init__(self, progress: Progress, name: str) -> None:
        self._progress, self._name = progress, name

    @property
    def total(self) -> int:
        """The number of bytes, 0 if the server does not tell it."""
        return self._total

    @total.setter
    def total(self, count: int) -> None:
        self._total = count
        self._task = self._progress.add_task(self._name, total=count or None)
        if self._progress.disable:
            notify(f"downloading {self._name}{f', {count / 1e6:.1f} MB' if count else ''}")

    def update(self, count: int) -> None:
        """Move the bar by `count` bytes, at most to its end: pooch counts a last short chunk as a whole one."""
        done = self._progress.tasks[self._task].completed + count
        self._progress.update(self._task, completed=min(done, self.total or done))

    def reset(self) -> None:
        """Do nothing; pooch calls it before it fills the bar."""

    def close(self) -> None:
        """Do nothing; the context ends the bar, also after an error."""


@contextmanager
def show_download(name: str) -> Iterator[DownloadBar]:
    """Show the progress of the download of the file `name`."""
    console = _console()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as progress:
        yield DownloadBar(progress, name)
