"""Progress of runs: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from fedcat.runs.callbacks import Callback
from fedcat.runs.history import Record
from fedcat.runs.run import Run

SHOWN = 8
"""The most labels whose scores are shown."""


class LastingConsole(Console):
    """A console without which a run goes on: what nobody reads any more is not printed."""

    def on_broken_pipe(self) -> None:
        """Print to nowhere from now on, as after ``| head``."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2 if self.stderr else 1)
        os.close(nowhere)


class ProgressDisplay(Callback):
    """Shows the round, the mean score per label, the speed and the time left of runs side by side.

    Parameters
    ----------
    console : Console
        The console to print to.
    runs : sequence of Run
        The runs. Progress is that of the slowest of the longest ones.
    labels : sequence of str
        The label of each run; scores of runs with the same label are averaged.
    scores : bool
        Whether to show scores: not if the test data must not be looked at.
    """

    def __init__(self, console: Console, runs: Sequence[Run], labels: Sequence[str], scores: bool = True) -> None:
        self.console, self.scores = console, scores
        self.labels = {run.name: label for run, label in zip(runs, labels, strict=True)}
        self.rounds = max(run.rounds for run in runs)
        self._behind = {run.name: 0 for run in runs if run.rounds == self.rounds}
        self._scores: dict[str, float] = {}
        self.done = 0
        self._first = 0
        self._bar_width = 24 if console.width >= 100 else 10
        self._begin = time.perf_counter()
        self._bar: Progress | None = None
        self._running = set(self.labels)

    def on_start(self, run: Run) -> None:
        """Show the bar when the first run starts."""
        self._monitor = run.monitor
        if run.resumed and run.name in self._behind:
            self._behind[run.name] = len(run.history)
            self.done = self._first = min(self._behind.values())
        if self._bar is None and self.console.is_terminal:
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

    def on_end(self, run: Run) -> None:
        """Remove the bar when the last run has ended; a run that ended early holds up nobody."""
        self._running.discard(run.name)
        if len(self._behind) > 1 and len(run.history) < self.rounds:
            self._behind.pop(run.name, None)
        if not self._running and self._bar is not None:
            self._bar.stop()

    def on_round(self, run: Run, record: Record) -> None:
        """Update the display with a round that a run has completed."""
        if record.evaluated:
            self._scores[run.name] = record.metrics[run.monitor.name]
        if run.name in self._behind:
            self._behind[run.name] = record.round
        if min(self._behind.values()) == self.done:
            return
        self.done = min(self._behind.values())
        if self._bar is not None:
            self._bar.update(
                self._task, completed=self.done, description=self._fitting(self._means()), speed=self._speed()
            )
        elif record.evaluated:
            self.console.print(self._line(), markup=False, soft_wrap=True)

    def _means(self) -> str:
        if not self.scores:
            return ""
        means = []
        for label in dict.fromkeys(self.labels.values()):
            scores = [score for name, score in self._scores.items() if self.labels[name] == label]
            if scores:
                mean = statistics.fmean(scores)
                means.append(f"{label} " + (f"{100 * mean:.1f} %" if self._monitor.percent else f"{mean:.4g}"))
        return "  ".join(means if len(means) <= SHOWN else [*means[:SHOWN], f"and {len(means) - SHOWN} more"])

    def _fitting(self, text: str) -> str:
        """Truncate a text so that the round, the bar, the speed and the time left fit on the line."""
        room = max(8, self.console.width - self._bar_width - 41)
        return text if len(text) <= room else text[: room - 1] + "…"

    def _speed(self) -> str:
        """Return the rounds per second, or the seconds of a slow round, and the time left."""
        seconds = max(1e-9, time.perf_counter() - self._begin) / (self.done - self._first)
        left = timedelta(seconds=round(seconds * (self.rounds - self.done)))
        speed = f"{1 / seconds:.1f} rounds/s" if seconds < 10 else f"{seconds:.0f} s/round"
        return f"{speed}  {left} left"

    def _line(self) -> str:
        return f"round {self.done}/{self.rounds}  {self._means()}  {self._speed()}"
