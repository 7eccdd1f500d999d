"""Readings: what is said of a run, of a cell over its seeds, and of two cells paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from scipy.stats import t as student

from fedcat.paper.archive import Archive, StoredRun
from fedcat.paper.case import Case
from fedcat.runs.variant_result import mean_std

LAST = 5
"""Evaluations that `last_five` is the mean of."""
CONFIDENCE = 0.95
"""One-sided: with three seeds a difference counts from 2.9 standard errors on."""
LARGEST_CLASS = {"mnist": 11.35, "cifar10": 10.0, "cifar100": 5.0}
"""The share of the largest class in the test data, in %, where it is known: the accuracy of a constant answer."""

Reading = Callable[[StoredRun], float]
"""Reads a number off a run: an accuracy in %."""


def best(run: StoredRun) -> float:
    """Return the largest of the test accuracies, as such tables are usually read."""
    return _largest(run.accuracy)


def last_five(run: StoredRun) -> float:
    """Return the mean of the last five test accuracies."""
    return _mean(run.accuracy[-LAST:])


def chosen(run: StoredRun) -> float:
    """Return the test accuracy at the first of the best validation accuracies."""
    return _at(run.accuracy, _chosen(run))


def average_chosen(run: StoredRun) -> float:
    """Return the test accuracy of the average over rounds when the model has the best validation accuracy."""
    return _at(run.average, _chosen(run))


def at_round(number: int) -> Reading:
    """Return a reading: the test accuracy at the last evaluation up to a round; NaN of a run that ended before it."""

    def read(run: StoredRun) -> float:
        before = [place for place, evaluated in enumerate(run.rounds) if evaluated <= number <= run.rounds[-1]]
        return _at(run.accuracy, before[-1] if before else None)

    return read


def average_best(run: StoredRun) -> float:
    """Return the largest test accuracy of the average over rounds."""
    return _largest(run.average)


def average_last_five(run: StoredRun) -> float:
    """Return the mean of the last five test accuracies of the average over rounds."""
    return _mean(run.average[-LAST:])


def validation_last_five(run: StoredRun) -> float:
    """Return the mean of the last five validation accuracies."""
    return _mean(run.validation[-LAST:])


def collapsed(run: StoredRun) -> bool:
    """Tell whether a run lost what it had learned: its last five are all below half of its best."""
    return _largest(run.accuracy[-LAST:]) < best(run) / 2


def stuck(run: StoredRun) -> bool:
    """Tell whether a run learned nothing: its accuracy never changed, or a constant answer is as good as its best."""
    constant = LARGEST_CLASS.get(run.case.dataset, 0.0) + 1e-9
    return len(run.accuracy) > LAST and (len(set(run.accuracy)) == 1 or best(run) <= constant)


def failed(run: StoredRun) -> bool:
    """Tell whether a run lost what it had learned, or learned nothing."""
    return collapsed(run) or stuck(run)


def within(traffic: float) -> Reading:
    """Return the reading `last_five` of a run that ends when it has moved so many bytes."""
    return lambda run: _mean(
        [a for a, moved in zip(run.accuracy, run.traffic, strict=True) if moved <= traffic][-LAST:]
    )


def _chosen(run: StoredRun) -> int | None:
    """Return the evaluation with the first of the best validation accuracies; None if there is none."""
    known = [(value, -place) for place, value in enumerate(run.validation) if math.isfinite(value)]
    return -max(known)[1] if known else None


def _at(values: Sequence[float], place: int | None) -> float:
    return 100 * values[place] if values and place is not None else math.nan


def _mean(values: Sequence[float]) -> float:
    return 100 * statistics.fmean(values) if values else math.nan


def _largest(values: Sequence[float]) -> float:
    return 100 * max((value for value in values if math.isfinite(value)), default=math.nan)


@dataclass(frozen=True)
class Cell:
    """The runs of a case that are there, by seed."""

    case: Case
    runs: list[StoredRun]

    def common(self, other: Cell) -> Cell:
        """Return the runs whose seeds another cell has as well."""
        seeds = {run.seed for run in other.runs}
        return Cell(self.case, [run for run in self.runs if run.seed in seeds])

    def values(self, reading: Reading) -> list[float]:
        """Return a reading of each run."""
        return [reading(run) for run in self.runs]

    def mean_std(self, reading: Reading) -> tuple[float, float | None]:
        """Return mean and standard deviation of a reading over the seeds."""
        return mean_std(self.values(reading)) if self.runs else (math.nan, None)

    def text(self, reading: Reading) -> str:
        """Return a reading as text, empty if it is not known."""
        return spread_text(*self.mean_std(reading))


def cell(archive: Archive, case: Case, seeds: Sequence[int]) -> Cell:
    """Return what an archive holds of a case."""
    return Cell(case, archive.runs(case, seeds))


def spread_text(mean: float, deviation: float | None, sign: str = "") -> str:
    """Return a mean and its deviation as text, empty if there is none."""
    if not math.isfinite(mean):
        return ""
    return f"{mean:{sign}.2f}" + ("" if deviation is None else f" ± {deviation:.2f}")


@dataclass(frozen=True)
class Paired:
    """The differences of two cells, seed by seed."""

    differences: list[float]

    @classmethod
    def of(cls, one: Cell, other: Cell, reading: Reading, theirs: Reading | None = None) -> Paired:
        """Return by how much a reading of one cell exceeds that of another, or another reading of it."""
        a = {run.seed: reading(run) for run in one.runs}
        b = {run.seed: (theirs or reading)(run) for run in other.runs}
        return cls([a[seed] - b[seed] for seed in a if seed in b and math.isfinite(a[seed] - b[seed])])

    @property
    def mean(self) -> float:
        """The mean difference."""
        return statistics.fmean(self.differences) if self.differences else math.nan

    @property
    def error(self) -> float:
        """The standard error of the mean difference; NaN of fewer than two seeds."""
        count = len(self.differences)
        return statistics.stdev(self.differences) / math.sqrt(count) if count > 1 else math.nan

    @property
    def needed(self) -> float:
        """How large a difference must be to count."""
        return float(student.ppf(CONFIDENCE, len(self.differences) - 1)) * self.error

    @property
    def verdict(self) -> str:
        """Who is ahead: ``ahead``, ``behind``, or ``open`` if the difference does not count."""
        if not math.isfinite(self.needed):
            return "open"
        return "ahead" if self.mean > self.needed else "behind" if self.mean < -self.needed else "open"

    @property
    def text(self) -> str:
        """The mean and standard error; bold if it counts."""
        if not self.differences:
            return ""
        shown = f"{self.mean:+.2f}" + (f" ± {self.error:.2f}" if math.isfinite(self.error) else "")
        return shown if self.verdict == "open" else f"**{shown}**"


def reached(run: StoredRun, target: float) -> int | None:
    """Return the evaluation at which the mean of the last five test accuracies first reaches a target, or None."""
    for place in range(LAST - 1, len(run.accuracy)):
        if _mean(run.accuracy[place + 1 - LAST : place + 1]) >= target - 1e-9:
            return place
    return None
