"""Several methods, seeds and settings, run side by side."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.config.settings import Settings
from fedcat.core.errors import SettingError, unknown
from fedcat.core.options import options
from fedcat.core.registry import name_of, part_label
from fedcat.data.dataset import DATASETS, dataset_options
from fedcat.methods import METHODS
from fedcat.methods.server_optimizer import SETTINGS as SERVER_SETTINGS
from fedcat.methods.server_optimizer import idle_settings, own_step
from fedcat.runs.build import Prepared, Workshop
from fedcat.runs.folder import COMPARISON, check_free, write_text
from fedcat.runs.runner import Result, Watch, execute

FIGURES = ("best", "last_five", "accuracy")
LONG = 100
"""Characters of a label that go into a folder's name; a longer one has its number before it."""


@dataclass(frozen=True, eq=False)
class Line:
    """One line of a comparison: one method with one choice of swept settings, over all seeds."""

    label: str
    results: list[Result]

    def mean(self, figure: str, model: str = "global") -> tuple[float, float]:
        """Return the mean and the standard deviation over seeds of ``best``, ``last_five`` or ``accuracy``.

        They are the global model's, or those of another one of `others`.
        """
        name = "final" if figure == "accuracy" else figure
        tables = [r.summary["accuracy"] if model == "global" else r.summary["others"][model] for r in self.results]
        values = [table[name] for table in tables]
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0

    @property
    def others(self) -> list[str]:
        """The models that were evaluated beside the global one in every run."""
        found = [result.summary["others"] for result in self.results]
        return [name for name in found[0] if all(name in one for one in found)]

    @property
    def relative_traffic(self) -> float:
        """Traffic over that of one model down and one up for every hop, FedAvg's, in the mean over seeds."""
        return statistics.fmean(result.summary["relative_traffic"] for result in self.results)

    @property
    def traffic(self) -> float:
        """Bytes of a run, in both directions, in the mean over seeds."""
        return statistics.fmean(sum(result.summary["bytes"].values()) for result in self.results)

    @property
    def seconds(self) -> float:
        """Seconds of a run, in the mean over seeds."""
        return statistics.fmean(result.summary["seconds"] for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        """Return the line's figures as plain values."""
        figures = {figure: dict(zip(("mean", "std"), self.mean(figure), strict=True)) for figure in FIGURES}
        runs = [
            {"seed": r.settings.seed, "folder": r.folder.name if r.folder else None, **r.summary["accuracy"]}
            for r in self.results
        ]
        others = {
            name: {figure: dict(zip(("mean", "std"), self.mean(figure, name), strict=True)) for figure in FIGURES}
            for name in self.others
        }
        return {
            "label": self.label,
            **figures,
            "others": others,
            "bytes": self.traffic,
            "relative_traffic": self.relative_traffic,
            "seconds": self.seconds,
            "runs": runs,
        }


class Comparison:
    """A comparison that is ready to run.

    Parameters
    ----------
    methods : sequence
        Names of methods, or a user's own.
    seeds : int or sequence of int
        How many seeds, from the given `seed` on, or which.
    sweep : mapping, optional
        Settings, or options of methods or of the dataset, and the values to go through; all combinations are run.
    out : path, optional
        A folder to write the runs to, each in a folder of its own.
    **given
        Settings of all runs.
    """

    def __init__(
        self,
        methods: Sequence[Any],
        seeds: int | Sequence[int] = 3,
        sweep: Mapping[str, Sequence[Any]] | None = None,
        out: str | Path | None = None,
        **given: Any,
    ) -> None:
        self.seeds = _seeds(seeds, given.get("seed", 0))
        if isinstance(methods, str):
            methods = [name.strip() for name in methods.split(",")]
        if not methods:
            raise SettingError("methods must name at least one method, got none")
        self.out = None if out is None else Path(out)
        if self.out is not None:
            check_free(self.out)
        workshop = Workshop()
        self.labels: list[str] = []
        self.prepared: list[Prepared] = []
        variants, self._notes = _variants(methods, sweep or {}, given)
        for label, chosen in variants:
            again = sum(label == known.rpartition(" #")[0] or label == known for known in self.labels)
            self.labels.append(f"{label} #{again + 1}" if again else label)
            self.prepared += [workshop.prepare({**chosen, "seed": seed}) for seed in self.seeds]

    @property
    def notes(self) -> list[str]:
        """Lines that the user should read first."""
        return list(dict.fromkeys([*self._notes, *(note for ready in self.prepared for note in ready.notes)]))

    def run(self, watch: Watch | None = None) -> list[Line]:
        """Run everything side by side and return a line for each choice of method and swept settings."""
        stems = _file_names(self.labels)
        names = [f"{stem}-seed{seed}" for stem in stems for seed in self.seeds]
        folders = [None if self.out is None else self.out / name for name in names]
        results = execute(self.prepared, folders, watch)
        size = len(self.seeds)
        lines = [Line(label, results[i * size : (i + 1) * size]) for i, label in enumerate(self.labels)]
        if self.out is not None:
            text = json.dumps([line.as_dict() for line in lines], indent=2)
            write_text(self.out / COMPARISON, text + "\n")
        return lines


def _variants(
    methods: Sequence[Any], sweep: Mapping[str, Sequence[Any]], given: Mapping[str, Any]
) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Return a label and the settings for each method and each combination of swept values that it knows.

    Beside them come notes of settings of the server's step that some of the methods do not take.
    """
    known = [options(METHODS.get(method) if isinstance(method, str) else method) for method in methods]
    names = set(Settings.__dataclass_fields__) - {"method", "seed", "options", "dataset_options", "threads"}
    _check_sweep(sweep, given, names, known)
    variants: list[tuple[str, dict[str, Any]]] = []
    used: set[str] = set()
    missed: dict[str, dict[str, None]] = {}
    for method, own in zip(methods, known, strict=True):
        label = method if isinstance(method, str) else part_label(method)
        table = label if isinstance(method, str) else name_of(method) or f"<{label}>"
        step = own_step(METHODS.get(method) if isinstance(method, str) else method)
        seen = set()
        for numbers in itertools.product(*(range(len(values)) for values in sweep.values())):
            chosen = {key: sweep[key][number] for key, number in zip(sweep, numbers, strict=True)}
            theirs = _options_of_data(chosen.get("dataset", given.get("dataset", Settings.dataset)))
            chosen = {key: value for key, value in chosen.items() if key in names or key in own or key in theirs}
            idle = idle_settings(step, {**given, **chosen})
            as_it_is = {"server"} if {**given, **chosen}.get("server") in (step, "", None) else set()
            used |= {*given, *chosen} - idle | as_it_is
            missed.setdefault(label, {}).update(dict.fromkeys(sorted(idle - as_it_is)))
            chosen = {key: value for key, value in chosen.items() if key not in idle}
            which = tuple((key, number) for key, number in zip(sweep, numbers, strict=True) if key in chosen)
            if which in seen:
                continue
            seen.add(which)
            tables = dict(_table(given, "options"))
            swept = {key: value for key, value in chosen.items() if key not in names and key in own}
            if swept:
                tables[table] = {**_table(tables, label), **_table(tables, table), **swept}
            settings = {key: value for key, value in chosen.items() if key in names}
            of_data = {key: value for key, value in chosen.items() if key not in names and key not in own}
            settings["dataset_options"] = {**_table(given, "dataset_options"), **of_data}
            words = "".join(f" {key}={_word(value)}" for key, value in chosen.items())
            below = {key: value for key, value in given.items() if key not in idle}
            variants.append((label + words, {**below, **settings, "method": method, "options": tables}))
    for key in SERVER_SETTINGS:
        if key in {*given, *sweep} - used:
            labels = [method if isinstance(method, str) else part_label(method) for method in methods]
            raise SettingError(f"{key} has no effect on any of the methods {', '.join(labels)}")
    notes = [f"{', '.join(keys)} do not go to {label}, see `fedcat methods`" for label, keys in missed.items() if keys]
    return variants, notes


def _table(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = settings.get(name) or {}
    if not isinstance(found, Mapping):
        raise SettingError(f"{name} must be a table of options, got {found!r}")
    return found


def _check_sweep(
    sweep: Mapping[str, Sequence[Any]], given: Mapping[str, Any], names: set[str], known: Sequence[Mapping[str, Any]]
) -> None:
    if "fraction" in sweep and given.get("per_round") is not None:
        raise SettingError("per_round must not be set where fraction is swept: it would have no effect")
    for key in sweep:
        if isinstance(sweep[key], str) or not hasattr(sweep[key], "__len__"):
            raise SettingError(f"sweep of {key} must be a list of values, got {sweep[key]!r}")
        if not len(sweep[key]):
            raise SettingError(f"sweep of {key} must name at least one value, got none")
    datasets = sweep.get("dataset", [given.get("dataset", Settings.dataset)])
    every = {option for found in (*known, *map(_options_of_data, datasets)) for option in found}
    for key in sweep:
        if key not in names and key not in every:
            raise unknown("sweep", key, names | every)


def _options_of_data(dataset: object) -> dict[str, Any]:
    if isinstance(dataset, str):
        return dataset_options(DATASETS.get(dataset))
    return dataset_options(dataset) if callable(dataset) else {}


def _seeds(seeds: int | Sequence[int], first: Any) -> list[int]:
    """Return the seeds as a list: so many from the first on, or those that were named."""
    if isinstance(seeds, int):
        if seeds < 1:
            raise SettingError(f"seeds must be at least 1, got {seeds}")
        if not isinstance(first, (int, np.integer)):
            raise SettingError(f"seed must be a whole number, got {first!r}")
        return list(range(int(first), int(first) + seeds))
    named = [int(seed) for seed in seeds]
    if not named or len(set(named)) < len(named):
        raise SettingError(f"seeds must name at least one seed and each once, got {named}")
    return named


def _word(value: Any) -> str:
    """Return a swept value as it appears in a label."""
    plain = value is None or isinstance(value, (str, int, float, bool, list, tuple, np.generic))
    return str(value) if plain else part_label(value)


def _file_names(labels: Sequence[str]) -> list[str]:
    """Return a folder's name for each label; where it would be long or another's, its number stands before it."""
    plain = [re.sub(r"[^\w.=-]+", "-", label) for label in labels]
    return [
        stem if len(stem) <= LONG and plain.count(stem) == 1 else f"{number}-{stem[:LONG]}"
        for number, stem in enumerate(plain, start=1)
    ]
