"""The archive: what is kept of each run of the paper's experiments, one line of JSON each."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedcat.core.errors import SettingError
from fedcat.core.text import json_text
from fedcat.paper.case import Case
from fedcat.paper.participation import Participation, participation
from fedcat.runs.result import Result

DIGITS = 5
"""Decimal places of accuracies: of 10,000 test images, each counts 0.0001."""


@dataclass(frozen=True)
class Machine:
    """What made a run: equal ones give the same bits in exact mode.

    Attributes
    ----------
    device, torch : str
        The GPU or processor, and PyTorch's version.
    commit : str
        The commit of the source, if it is known.
    canary : str
        A hash of short runs in exact mode: it changes if the numbers that this version computes change.
    """

    device: str
    torch: str
    commit: str
    canary: str


@dataclass(frozen=True)
class StoredRun:
    """What is kept of a run.

    Attributes
    ----------
    case, seed : Case, int
        What was run.
    machine : Machine
        What ran it.
    status : str
        ``finished``, or how else it ended.
    rounds : list of int
        The rounds that were evaluated; the lists below have one entry for each.
    traffic : list of int
        Bytes so far, in both directions.
    accuracy, average : list of float
        Test accuracy of the global model and of its average over rounds; empty if the run serves to choose numbers.
    validation : list of float
        Accuracy on the clients' validation data, weighted by samples; empty if there is none.
    participation : Participation
        Who took part how often.
    clients : mapping of str to float
        How the final accuracy on the clients' own test data spreads; empty if they have none.
    seconds : float
        The run's share of the time.
    settings : mapping
        Every setting of the run, but for the machine's.
    notes : list of str
        What the user should read.
    """

    case: Case
    seed: int
    machine: Machine
    status: str
    rounds: list[int]
    traffic: list[int]
    accuracy: list[float]
    average: list[float]
    validation: list[float]
    participation: Participation
    clients: dict[str, float]
    seconds: float
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """What a page calls the run."""
        exact = "exact" if self.case.exact else ""
        held = "with data held out" if self.case.validation else ""
        words = [self.case.row, self.case.label, self.case.precision, exact, f"seed {self.seed}", held]
        return ", ".join(filter(None, words))

    @classmethod
    def of(cls, case: Case, result: Result, machine: Machine) -> StoredRun:
        """Return what is kept of a result."""
        found = [record for record in result.history if record.evaluated]
        test = [] if case.choosing else found
        summary, settings = result.summary, asdict(result.settings)
        local = ("data_dir", "device", "memory", "threads", "workers", "engine")
        return cls(
            case=case,
            seed=result.settings.seed,
            machine=machine,
            status=result.status,
            rounds=[record.round for record in found],
            traffic=[record.up + record.down for record in found],
            accuracy=[_short(record.metrics["accuracy"]) for record in test],
            average=[_short(one.others["average"]["accuracy"]) for one in test if "average" in one.others],
            validation=[_short(r.validation["accuracy"]["weighted_mean"]) for r in found if "accuracy" in r.validation],
            participation=participation(result.history, result.federation.clients, result.settings.k),
            clients={} if case.choosing else {k: _short(v) for k, v in summary.client_test.get("accuracy", {}).items()},
            seconds=summary.seconds,
            settings={name: value for name, value in settings.items() if name not in local and value not in (None, {})},
            notes=summary.notes,
        )

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> StoredRun:
        """Return the run that `as_dict` wrote."""
        lists = {name: [_number(v) for v in plain[name]] for name in ("accuracy", "average", "validation")}
        parts = {
            "case": Case.from_dict(plain["case"]),
            "machine": Machine(**plain["machine"]),
            "participation": Participation(**plain["participation"]),
        }
        return cls(**{**plain, **lists, **parts})

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "case": self.case.as_dict()}


def _short(value: float) -> float:
    return round(value, DIGITS)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


class Archive:
    """The runs that are kept in a directory, in one file for each preset and dataset.

    Parameters
    ----------
    folder : path
        The directory; it need not exist before a run is added.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs: dict[tuple[Case, int], StoredRun] = {}
        for path in sorted(folder.glob("*.jsonl")):
            complete, _, _ = path.read_text(encoding="utf-8").rpartition(
                "\n"
            )  # another process may add a line just now
            for number, line in enumerate(complete.splitlines(), start=1):
                try:
                    run = StoredRun.from_dict(json.loads(line))
                except (ValueError, KeyError, TypeError) as error:
                    raise SettingError(
                        f"{str(path)!r}, line {number}, is not a run that can be read: {error}"
                    ) from error
                self._runs.setdefault((run.case, run.seed), run)

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Any:
        return iter(self._runs.values())

    def get(self, case: Case, seed: int) -> StoredRun | None:
        """Return a run, or None if it is not there."""
        return self._runs.get((case, seed))

    def runs(self, case: Case, seeds: Sequence[int]) -> list[StoredRun]:
        """Return the runs of a case that are there, in the order of the seeds."""
        return [self._runs[case, seed] for seed in seeds if (case, seed) in self._runs]

    def path(self, case: Case) -> Path:
        """Return the file that holds the runs of a case."""
        return self.folder / f"{case.preset}-{case.dataset}{'-choices' if case.choosing else ''}.jsonl"

    def add(self, runs: Iterable[StoredRun]) -> None:
        """Add runs, also while other processes do; a run that is there already is not replaced."""
        for run in runs:
            if (run.case, run.seed) in self._runs:
                continue
            self._runs[run.case, run.seed] = run
            path = self.path(run.case)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as file:
                    file.write(f"{json_text(run.as_dict())}\n".encode())
            except OSError as error:
                raise SettingError(f"{str(path)!r} cannot be written: {error.strerror}") from error

    def check(self, machine: Machine, case: Case, methods: Sequence[str]) -> None:
        """Raise a `SettingError` if runs of these methods that belong in one table with this case have other bits."""
        for run in self:
            theirs = run.machine
            same = (theirs.device, theirs.torch) == (machine.device, machine.torch) and run.case.method in methods
            if run.case.kind == case.kind and same and theirs.canary != machine.canary:
                raise SettingError(
                    f"{str(self.path(case))!r} holds runs of a version that computes other numbers (commit "
                    f"{theirs.commit or 'unknown'}, canary {theirs.canary}, now {machine.canary}): choose another --out"
                )
