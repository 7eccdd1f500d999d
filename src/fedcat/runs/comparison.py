"""Comparisons: several methods, seeds and settings, run side by side."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.config.layers import SettingsFile
from fedcat.config.sweep import variants
from fedcat.core.errors import SettingError
from fedcat.core.text import plural
from fedcat.runs.build import Builder, PreparedRun
from fedcat.runs.folder import COMPARISON, check_free, claim, unclaim, write_text
from fedcat.runs.runner import OnRound, execute
from fedcat.runs.summary import Result

FIGURES = ("best", "last_five", "accuracy")
LONG = 100
"""Characters of a label that go into a folder's name; a longer one gets a number in front."""


@dataclass(frozen=True, eq=False)
class VariantResult:
    """The results of one method with one choice of swept settings, over all seeds."""

    label: str
    results: list[Result]

    def __repr__(self) -> str:
        mean, std = self.mean_std("last_five")
        spread = "" if std is None else f" ± {std:.2%}"
        return f"<VariantResult: {self.label}, {plural(len(self.results), 'seed')}, last five {mean:.2%}{spread}>"

    def mean_std(self, figure: str, model: str = "global") -> tuple[float, float | None]:
        """Return mean and standard deviation over seeds of ``best``, ``last_five`` or ``accuracy``.

        They are those of the global model, or of another one of `others`. One seed has no deviation.
        """
        return mean_std(self._values(figure, model))

    def differences(self, other: VariantResult, figure: str = "last_five") -> list[float]:
        """Return by how much a figure exceeds that of another variant, seed by seed."""
        return [a - b for a, b in zip(self._values(figure), other._values(figure), strict=True)]

    def _values(self, figure: str, model: str = "global") -> list[float]:
        name = "final" if figure == "accuracy" else figure
        tables = [r.summary["accuracy"] if model == "global" else r.summary["others"][model] for r in self.results]
        return [table[name] for table in tables]

    @property
    def others(self) -> list[str]:
        """The models that were evaluated besides the global one in every run."""
        found = [result.summary["others"] for result in self.results]
        return [name for name in found[0] if all(name in one for one in found)]

    @property
    def relative_traffic(self) -> float:
        """Mean traffic over seeds, relative to one model down and one up per hop, which is FedAvg's."""
        return statistics.fmean(result.summary["relative_traffic"] for result in self.results)

    @property
    def traffic(self) -> float:
        """Mean bytes of a run over seeds, in both directions."""
        return statistics.fmean(sum(result.summary["bytes"].values()) for result in self.results)

    @property
    def seconds(self) -> float:
        """Mean seconds of a run over seeds."""
        return statistics.fmean(result.summary["seconds"] for result in self.results)

    @property
    def seconds_estimated(self) -> bool:
        """Whether the seconds are shares of launches, and so an estimate."""
        return any(result.summary["seconds_estimated"] for result in self.results)

    def as_dict(self, first: VariantResult) -> dict[str, Any]:
        """Return the figures as plain values, and their differences to those of the first variant, seed by seed."""
        runs = [
            {"seed": r.settings.seed, "folder": r.folder.name if r.folder else None, **r.summary["accuracy"]}
            for r in self.results
        ]
        return {
            "label": self.label,
            **self._figures("global"),
            "others": {name: self._figures(name) for name in self.others},
            "bytes": self.traffic,
            "relative_traffic": self.relative_traffic,
            "seconds": self.seconds,
            "seconds_estimated": self.seconds_estimated,
            "differences": {"to": first.label, **{f: self.differences(first, f) for f in FIGURES}},
            "runs": runs,
        }

    def _figures(self, model: str) -> dict[str, dict[str, float | None]]:
        return {figure: dict(zip(("mean", "std"), self.mean_std(figure, model), strict=True)) for figure in FIGURES}


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of values; a single one has no deviation."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


class Comparison:
    """A comparison that is ready to run.

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
        self.unwritten = ""
        """Why the table of a comparison that has run could not be written; empty if it was."""
        if self.out is not None:
            check_free(self.out)
        found, below, self._notes = variants(methods, sweep or {}, given, file)
        builder = Builder()
        self.labels: list[str] = []
        self.runs: list[PreparedRun] = []
        for label, chosen in found:
            again = sum(label == known.rpartition(" #")[0] or label == known for known in self.labels)
            self.labels.append(f"{label} #{again + 1}" if again else label)
            self.runs += [builder.build({**chosen, "seed": seed}, below) for seed in self.seeds]

    @property
    def notes(self) -> list[str]:
        """Lines that the user should read first."""
        return [*self._notes, *self.named_notes([run.notes for run in self.runs])]

    def late_notes(self, found: Sequence[VariantResult]) -> list[str]:
        """Return what the user should read after the runs."""
        results = [result for variant in found for result in variant.results]
        late = [result.summary["notes"][len(run.notes) :] for result, run in zip(results, self.runs, strict=True)]
        return [*self.named_notes(late), *([self.unwritten] if self.unwritten else [])]

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

    def run(self, on_round: OnRound | None = None) -> list[VariantResult]:
        """Run everything side by side and return the results of each variant."""
        stems = _file_names(self.labels)
        names = [f"{stem}-seed{seed}" for stem in stems for seed in self.seeds]
        if self.out is None:
            return self._variants(execute(self.runs, [None] * len(names), on_round))
        made = claim(self.out, COMPARISON, "[]\n")
        try:
            found = self._variants(execute(self.runs, [self.out / name for name in names], on_round))
        except BaseException:
            unclaim(made, self.out / COMPARISON)
            raise
        lines = json.dumps([one.as_dict(found[0]) for one in found], indent=2)
        try:
            write_text(self.out / COMPARISON, lines + "\n")
        except OSError as error:
            self.unwritten = f"the table is not written: {str(self.out)!r} cannot be written: {error.strerror}"
        return found

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
