"""Progress of runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fedcat.runs.simulation import Record


class ProgressDisplay:
    """Shows the round, the mean accuracy per label, the speed and the time left of runs side by side.

    Parameters
    ----------
    console : Console
        The console to print to.
    labels : list of str
        The label of each run; accuracies of runs with the same label are averaged.
    rounds : list of int
        The number of rounds of each run. Progress is that of the slowest of the longest runs.
    """

    def __init__(self, console: Console, labels: list[str], rounds: list[int]) -> None:
        self.console, self.labels = console, labels
        self.rounds = max(rounds)
        self._behind = {position: 0 for position, count in enumerate(rounds) if count == self.rounds}
        self.done = 0
        self._bar_width = 24 if console.width >= 100 else 10
        self._scores: list[float | None] = [None] * len(labels)
        self._begin = time.perf_counter()
        self._bar: Progress | None = None

    def __enter__(self) -> ProgressDisplay:
        self._begin = time.perf_counter()
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(bar_width=self._bar_width),
                TextColumn("{task.description}"),
                TextColumn("{task.fields[speed]}"),
                console=self.console,
            )
            self._bar.start()
            self._task = self._bar.add_task("", total=self.rounds, speed="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, position: int, record: Record) -> None:
        """Update the display with a round that run `position` has completed."""
        if record.accuracy is not None:
            self._scores[position] = record.accuracy
        if position in self._behind:
            self._behind[position] = record.round
        if min(self._behind.values()) == self.done:
            return
        self.done = min(self._behind.values())
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self.done, description=self._fitting(self._accuracies()), speed=self._speed()
            )
        elif record.accuracy is not None:
            self.console.print(self._line(), markup=False, soft_wrap=True)

    def _accuracies(self) -> str:
        means = []
        for label in dict.fromkeys(self.labels):
            scores = [s for s, name in zip(self._scores, self.labels, strict=True) if name == label and s is not None]
            if scores:
                means.append(f"{label} {100 * statistics.fmean(scores):.1f} %")
        return "  ".join(means if len(means) <= 6 else [*means[:6], f"and {len(means) - 6} more"])

    def _fitting(self, text: str) -> str:
        """Truncate a text so that the round, the bar, the speed and the time left fit on the line."""
        room = max(8, self.console.width - self._bar_width - 41)
        return text if len(text) <= room else text[: room - 1] + "…"

    def _speed(self) -> str:
        """Return the rounds per second and the time left."""
        elapsed = max(1e-9, time.perf_counter() - self._begin)
        left = timedelta(seconds=round(elapsed / self.done * (self.rounds - self.done)))
        return f"{self.done / elapsed:.1f} rounds/s  {left} left"

    def _line(self) -> str:
        return f"round {self.done}/{self.rounds}  {self._accuracies()}  {self._speed()}"
