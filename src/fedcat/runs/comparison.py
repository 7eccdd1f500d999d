"""Comparisons: several methods, seeds and settings, run side by side."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.config.layers import SettingsFile
from fedcat.config.sweep import variants
from fedcat.core.errors import SettingError
from fedcat.core.text import json_text, plural
from fedcat.runs.build import Builder
from fedcat.runs.callbacks import CallbackPart
from fedcat.runs.folder import COMPARISON, SETTINGS, check_free, claim, unclaim, write_text
from fedcat.runs.result import Result
from fedcat.runs.resume import Resumed, build_again, parts_of, read_plan
from fedcat.runs.run import Run
from fedcat.runs.runner import execute, stored_result

FIGURES = ("best", "last_five", "final")
LONG = 100
"""Characters of a label that go into a folder's name; a longer one gets a number in front."""

SPREAD = {"mean": "mean", "weighted_mean": "weighted", "worst_decile": "worst tenth", "std": "deviation"}
"""How a metric spreads over clients, and the headings in tables."""


@dataclass(frozen=True, eq=False)
class VariantResult:
    """The results of one method with one choice of swept settings, over all seeds."""

    label: str
    results: list[Result]

    def __repr__(self) -> str:
        mean, std = self.mean_std("last_five")
        spread = "" if std is None else f" ± {std:.4f}"
        seeds = plural(len(self.results), "seed")
        return f"<VariantResult: {self.label}, {seeds}, last five {self.monitor} {mean:.4f}{spread}>"

    @property
    def monitor(self) -> str:
        """The metric that the figures are of."""
        return self.results[0].summary.monitor

    def mean_std(self, figure: str, model: str = "global", metric: str = "") -> tuple[float, float | None]:
        """Return mean and standard deviation over seeds of ``best``, ``last_five``, ``final`` or ``chosen``.

        They are those of the global model, or of another one of `others`; of the monitored metric, or of another one.
        ``chosen`` is the test score at the best validation score. One seed has no deviation; a run that was never
        evaluated counts as NaN.
        """
        return mean_std(self._values(figure, model, metric))

    def differences(self, other: VariantResult, figure: str = "last_five") -> list[float]:
        """Return by how much a figure exceeds that of another variant, seed by seed."""
        return [a - b for a, b in zip(self._values(figure), other._values(figure), strict=True)]

    def _values(self, figure: str, model: str = "global", metric: str = "") -> list[float]:
        name = metric or self.monitor
        if figure == "chosen":
            chosen = [result.summary.chosen for result in self.results]
            found = [None if one is None else one.metrics.get(name) for one in chosen]
        else:
            found = [getattr(result.summary.figures(model, name), figure) for result in self.results]
        return [math.nan if value is None else value for value in found]

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures that there are: ``chosen`` only with validation data."""
        return (*FIGURES, "chosen") if all(result.summary.chosen for result in self.results) else FIGURES

    @property
    def others(self) -> list[str]:
        """The models that were evaluated besides the global one in every run."""
        found = [result.summary.others for result in self.results]
        return [name for name in found[0] if all(name in one for one in found)]

    def client_test(self) -> dict[str, float]:
        """Return how the monitored metric spreads over the clients' own test data, averaged over seeds; or nothing."""
        found = [result.summary.client_test.get(self.monitor) for result in self.results]
        spreads = [one for one in found if one is not None]
        if len(spreads) < len(found):
            return {}
        return {name: statistics.fmean(one[name] for one in spreads) for name in spreads[0]}

    @property
    def relative_traffic(self) -> float:
        """Mean traffic over seeds, relative to one model down and one up per hop, which is FedAvg's."""
        found = [result.summary.relative_traffic for result in self.results]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else math.nan

    @property
    def traffic(self) -> float:
        """Mean bytes of a run's training over seeds, in both directions."""
        return statistics.fmean(r.summary.bytes["up"] + r.summary.bytes["down"] for r in self.results)

    @property
    def seconds(self) -> float:
        """Mean seconds of a run over seeds."""
        return statistics.fmean(result.summary.seconds for result in self.results)

    @property
    def seconds_estimated(self) -> bool:
        """Whether the seconds are shares of launches, and so an estimate."""
        return any(result.summary.seconds_estimated for result in self.results)

    def as_dict(self, first: VariantResult) -> dict[str, Any]:
        """Return the figures as plain values, and their differences to those of the first variant, seed by seed."""
        runs = [
            {
                "seed": result.settings.seed,
                "folder": result.folder.name if result.folder else None,
                "status": result.status,
                **asdict(result.summary.figures()),
            }
            for result in self.results
        ]
        metrics = [name for name in self.results[0].summary.metrics["global"] if name != self.monitor]
        return {
            "label": self.label,
            "monitor": self.monitor,
            **self._figures("global"),
            "metrics": {name: self._figures("global", name) for name in metrics},
            "client_test": self.client_test(),
            "others": {name: self._figures(name) for name in self.others},
            "bytes": self.traffic,
            "relative_traffic": _number(self.relative_traffic),
            "seconds": self.seconds,
            "seconds_estimated": self.seconds_estimated,
            "differences": {
                "to": first.label,
                **{figure: [_number(value) for value in self.differences(first, figure)] for figure in FIGURES},
            },
            "runs": runs,
        }

    def _figures(self, model: str, metric: str = "") -> dict[str, dict[str, float | None]]:
        figures = self.figures if model == "global" else FIGURES
        found = {figure: self.mean_std(figure, model, metric) for figure in figures}
        return {figure: {"mean": _number(mean), "std": _number(std)} for figure, (mean, std) in found.items()}


def _number(value: float | None) -> float | None:
    """Return a number for JSON, which knows no NaN."""
    return None if value is None or not math.isfinite(value) else value


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of values; a single one has no deviation, and NaN gives NaN."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan if len(values) > 1 else None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


class Comparison:
    """A comparison that is ready to run.

    Attributes
    ----------
    labels, seeds : list
        The labels of its variants, and the seeds of each.
    runs : list of Run
        The runs, variant by variant.
    out : Path or None
        Where it is written.
    unwritten : str
        Why the table of a comparison that has run could not be written; empty if it was.

    Parameters
    ----------
    methods : sequence
        Names of methods, or classes.
    seeds : int or sequence of int
        How many seeds, counted from `seed`, or which.
    sweep : mapping, optional
        Settings, or options of methods or of the dataset, and the values to try; all combinations are run.
    out : path, optional
        A directory to write the runs to, each in its own folder.
    settings : path, optional
        A settings file, which lies below what is given.
    trust : bool
        Whether to import what the settings file names as ``module:attribute``, which runs its code.
    **given
        Settings of all runs.
    """

    unwritten: str = ""

    def __init__(
        self,
        methods: Sequence[Any],
        seeds: int | Sequence[int] = 3,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        out: str | Path | None = None,
        settings: str | Path | None = None,
        trust: bool = False,
        **given: Any,
    ) -> None:
        if isinstance(methods, str):
            methods = [name.strip() for name in methods.split(",")]
        if not methods:
            raise SettingError("methods must name at least one method, got none")
        file = SettingsFile.read(settings, trust, {**given, "method": list(methods)})
        self.seeds = _seeds(seeds, given.get("seed", file.layer.get("seed", 0)))
        self.out = None if out is None else Path(out)
        if self.out is not None:
            check_free(self.out)
        found, below, self._notes = variants(methods, sweep or {}, given, file)
        builder = Builder()
        self.labels: list[str] = []
        self.runs: list[Run] = []
        self.resumed: list[Resumed] = []
        for label, _ in found:
            again = sum(label == known.rpartition(" #")[0] or label == known for known in self.labels)
            self.labels.append(f"{label} #{again + 1}" if again else label)
        for stem, (_, chosen) in zip(_file_names(self.labels), found, strict=True):
            given_seeds = [({**chosen, "seed": seed}, f"{stem}-seed{seed}") for seed in self.seeds]
            self.runs += [builder.build(settings, below, name) for settings, name in given_seeds]

    @classmethod
    def resume(cls, out: str | Path, trust: bool = False, **given: Any) -> Comparison:
        """Return the comparison of a directory, ready to go on; hold the directory meanwhile, see `holding`.

        Runs that are complete are not run again. See `fedcat.resume` for the parameters.
        """
        comparison = cls.__new__(cls)
        path, builder = Path(out), Builder()
        plan = read_plan(path)
        comparison.out, comparison._notes = path, []
        comparison.labels = [label for label, _ in plan]
        comparison.seeds = [seed for seed, _ in plan[0][1]]
        folders = [folder for _, runs in plan for _, folder in runs]
        theirs = [parts_of(folder, given) for folder in folders]
        for name in given:
            if not any(name in one for one in theirs):
                raise SettingError(
                    f"{name} cannot change when a comparison is resumed, and none of its runs has this one"
                )
        pairs = zip(folders, theirs, strict=True)
        comparison.resumed = [build_again(builder, folder, one, trust) for folder, one in pairs]
        comparison.runs = [one.run for one in comparison.resumed]
        return comparison

    @property
    def pending(self) -> list[Run]:
        """The runs that are not complete."""
        return [one.run for one in self.resumed if not one.complete] if self.resumed else self.runs

    def label_of(self, run: Run) -> str:
        """Return the label of a run's variant."""
        return self.labels[self.runs.index(run) // len(self.seeds)]

    @property
    def notes(self) -> list[str]:
        """Lines that the user should read first."""
        return [*self._notes, *self.named_notes([run.early_notes for run in self.runs])]

    @property
    def late_notes(self) -> list[str]:
        """What the user should read after the runs."""
        return [*self.named_notes([run.late_notes for run in self.runs]), *filter(None, [self.unwritten])]

    @property
    def begins(self) -> list[str]:
        """Where runs go on that are resumed, as lines."""
        found = [[] if one.complete else [one.begins] for one in self.resumed]
        return self.named_notes(found) if found else []

    def named_notes(self, notes: Sequence[Iterable[str]]) -> list[str]:
        """Return the notes of the runs, each once; one that does not hold for all runs begins with theirs."""
        runs = [(label, seed) for label in self.labels for seed in self.seeds]
        found: dict[str, list[tuple[str, int]]] = {}
        for run, lines in zip(runs, notes, strict=True):
            for line in dict.fromkeys(lines):
                found.setdefault(line, []).append(run)
        return [line if len(which) == len(runs) else f"{self._named(which)}: {line}" for line, which in found.items()]

    def _named(self, runs: Sequence[tuple[str, int]]) -> str:
        names = []
        for label in dict.fromkeys(label for label, _ in runs):
            seeds = [seed for one, seed in runs if one == label]
            names.append(label if seeds == self.seeds else f"{label} seed {', '.join(map(str, seeds))}")
        return ", ".join(names)

    def run(self, callbacks: Sequence[CallbackPart] = ()) -> list[VariantResult]:
        """Run everything side by side and return the results of each variant.

        A callback that is an object is told of all runs; a class or function makes one for each run.
        """
        if self.out is None:
            return self._variants(execute(self.runs, None, callbacks))
        found = self._variants(self._resume(callbacks) if self.resumed else self._begin(self.out, callbacks))
        lines = json_text([one.as_dict(found[0]) for one in found], indent=2)
        try:
            write_text(self.out / COMPARISON, lines + "\n")
        except OSError as error:
            self.unwritten = f"the table is not written: {str(self.out)!r} cannot be written: {error.strerror}"
        return found

    def _begin(self, out: Path, callbacks: Sequence[CallbackPart]) -> list[Result]:
        """Execute the runs in directories of their own; until they are finished, the table lists only them."""
        folders = iter(self.runs)
        plan = [
            {"label": label, "runs": [{"seed": seed, "folder": next(folders).name} for seed in self.seeds]}
            for label in self.labels
        ]
        made = claim(out, COMPARISON, json_text(plan, indent=2) + "\n")
        try:
            return execute(self.runs, [out / run.name for run in self.runs], callbacks, hold=out)
        except BaseException:
            unclaim(made, *([] if any(out.glob(f"*/{SETTINGS}")) else [out / COMPARISON]))
            raise

    def _resume(self, callbacks: Sequence[CallbackPart]) -> list[Result]:
        """Execute the runs that are not complete, and read the others."""
        left = [one for one in self.resumed if not one.complete]
        found = iter(execute([one.run for one in left], left, callbacks))
        return [stored_result(one) if one.complete else next(found) for one in self.resumed]

    def _variants(self, results: Sequence[Result]) -> list[VariantResult]:
        size = len(self.seeds)
        return [VariantResult(label, list(results[i * size : (i + 1) * size])) for i, label in enumerate(self.labels)]


def _seeds(seeds: int | Sequence[int], first: Any) -> list[int]:
    """Return the seeds as a list: so many from the first on, or those that were named."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise SettingError(f"seeds must be at least 1, got {seeds}")
        if not isinstance(first, (int, np.integer)):
            raise SettingError(f"seed must be an integer, got {first!r}")
        return list(range(int(first), int(first) + seeds))
    named = [int(seed) for seed in seeds]
    if not named or len(set(named)) < len(named):
        raise SettingError(f"seeds must name at least one seed and each once, got {named}")
    return named


def _file_names(labels: Sequence[str]) -> list[str]:
    """Return a folder's name for each label; where it would be long or another's, its number stands before it."""
    plain = [re.sub(r"[^\w.=-]+", "-", label) for label in labels]
    return [
        stem if len(stem) <= LONG and plain.count(stem) == 1 else f"{number}-{stem[:LONG]}"
        for number, stem in enumerate(plain, start=1)
    ]
