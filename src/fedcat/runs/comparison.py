"""Comparisons: several methods, seeds and settings, run side by side."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.config.layers import SettingsFile
from fedcat.config.sweep import variants
from fedcat.core.errors import SettingError
from fedcat.runs.build import Builder, PreparedRun
from fedcat.runs.folder import COMPARISON, check_free, write_text
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

    def mean_std(self, figure: str, model: str = "global") -> tuple[float, float]:
        """Return mean and standard deviation over seeds of ``best``, ``last_five`` or ``accuracy``.

        They are those of the global model, or of another one of `others`.
        """
        name = "final" if figure == "accuracy" else figure
        tables = [r.summary["accuracy"] if model == "global" else r.summary["others"][model] for r in self.results]
        values = [table[name] for table in tables]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

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

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain values."""
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
            "runs": runs,
        }

    def _figures(self, model: str) -> dict[str, dict[str, float]]:
        return {figure: dict(zip(("mean", "std"), self.mean_std(figure, model), strict=True)) for figure in FIGURES}


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
        **given: Any,
    ) -> None:
        file = SettingsFile.read(settings)
        self.seeds = _seeds(seeds, given.get("seed", file.layer.get("seed", 0)))
        if isinstance(methods, str):
            methods = [name.strip() for name in methods.split(",")]
        if not methods:
            raise SettingError("methods must name at least one method, got none")
        self.out = None if out is None else Path(out)
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
        return list(dict.fromkeys([*self._notes, *(note for run in self.runs for note in run.notes)]))

    def run(self, on_round: OnRound | None = None) -> list[VariantResult]:
        """Run everything side by side and return the results of each variant."""
        stems = _file_names(self.labels)
        names = [f"{stem}-seed{seed}" for stem in stems for seed in self.seeds]
        folders = [None if self.out is None else self.out / name for name in names]
        results = execute(self.runs, folders, on_round)
        size = len(self.seeds)
        found = [VariantResult(label, results[i * size : (i + 1) * size]) for i, label in enumerate(self.labels)]
        if self.out is not None:
            write_text(self.out / COMPARISON, json.dumps([one.as_dict() for one in found], indent=2) + "\n")
        return found


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
