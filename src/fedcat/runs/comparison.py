"""Comparisons: several methods, seeds and settings, run side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.config.layers import SettingsFile
from fedcat.config.sweep import variants
from fedcat.core.errors import SettingError
from fedcat.core.text import json_text
from fedcat.runs.build import Builder
from fedcat.runs.callbacks import CallbackPart
from fedcat.runs.folder import check_free, claim, unclaim, write_text
from fedcat.runs.result import Result
from fedcat.runs.resume import Resumed, build_again, parts_of, read_plan
from fedcat.runs.run import Run
from fedcat.runs.run_files import COMPARISON, SETTINGS
from fedcat.runs.runner import execute, stored_result
from fedcat.runs.variant_result import VariantResult

LONG = 100
"""Characters of a label that go into a folder's name; a longer one gets a number in front."""


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
