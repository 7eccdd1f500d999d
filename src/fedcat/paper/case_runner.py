"""Runs the cases that are missing, side by side, as many as fit into the time."""

from __future__ import annotations

import hashlib
import itertools
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from fedcat.core.device import find_device
from fedcat.core.text import plural
from fedcat.paper.archive import Archive, Machine, StoredRun
from fedcat.paper.case import Case, has_alpha, label_of
from fedcat.paper.study import ALPHAS, EVERY, FIRST_SEED
from fedcat.runs.build import Builder
from fedcat.runs.progress import ProgressDisplay
from fedcat.runs.result import Result
from fedcat.runs.run import Run
from fedcat.runs.runner import execute

MARGIN = 1.25
"""What a plan adds to the measured time: a short measurement meets the clients with the most data too rarely."""
CYCLES = 3
"""Cycles of K rounds that are run to measure the speed; the first of them is not counted."""


class CaseRunner:
    """Runs cases and keeps them in an archive.

    Parameters
    ----------
    archive : Archive
        What is there already, and where to add.
    machine_settings : mapping
        Settings that do not change what is computed: ``device``, ``data_dir``, ``threads`` and so on.
    minutes : float or None
        The time for everything, from now on; None for no limit, 0 to run nothing.
    console : Console
        Where progress is shown.
    """

    def __init__(
        self, archive: Archive, machine_settings: Mapping[str, Any], minutes: float | None, console: Console
    ) -> None:
        self.archive, self.machine_settings, self.console = archive, dict(machine_settings), console
        self.begin, self.minutes = time.perf_counter(), minutes
        self.builder = Builder()
        self._machines: dict[tuple[object, ...], Machine] = {}

    @property
    def seconds_left(self) -> float:
        """Seconds until the time is over."""
        return float("inf") if self.minutes is None else 60 * self.minutes - (time.perf_counter() - self.begin)

    def run(self, rows: Sequence[Sequence[Case]], seeds: Sequence[int]) -> None:
        """Run what is missing side by side; whole cases that do not fit into the time are left out.

        On a GPU, which trains many runs almost as fast as one, all rows of a dataset run together.
        """
        together: dict[object, list[Case]] = {}
        for number, row in enumerate(rows):
            together.setdefault(row[0].dataset if self._cuda else number, []).extend(row)
        for cases in together.values():
            missing = [case for case in cases if len(self.archive.runs(case, seeds)) < len(seeds)]
            if missing and self.seconds_left > 0:
                for case in missing:
                    self.machine(case)
                fitting = self._fitting(missing, seeds)
                if fitting:
                    self._run(fitting, seeds)

    @property
    def _cuda(self) -> bool:
        return find_device(str(self.machine_settings.get("device", "auto"))).type == "cuda"

    def _run(self, cases: Sequence[Case], seeds: Sequence[int]) -> None:
        wanted = [(case, seed) for case in cases for seed in seeds if self.archive.get(case, seed) is None]
        rows = list(dict.fromkeys(case.row for case in cases))
        self._say(f"{'; '.join(rows)}: {plural(len(wanted), 'run')} side by side, {cases[0].rounds:,} rounds")
        runs = [self._build(case, seed) for case, seed in wanted]
        labels = [case.label if len(rows) == 1 else f"{case.label} {case.alpha}" for case, _ in wanted]
        begin = time.perf_counter()
        results = self._execute(runs, labels, scores=not any(case.choosing for case in cases))
        self._say(f"{plural(len(runs), 'run')} in {time.perf_counter() - begin:.0f} s")
        for (case, seed), result in zip(wanted, results, strict=True):
            if result.status in ("finished", "untrained"):
                self.archive.add([StoredRun.of(case, result, self.machine(case))])
            else:
                why = "; ".join(result.summary.notes)
                self._say(f"not kept: {case.row}, {case.label}, seed {seed}: {result.status}: {why}")

    def _build(self, case: Case, seed: int, **changes: Any) -> Run:
        return self.builder.build({**case.given(), **self.machine_settings, "seed": seed, **changes})

    def _execute(self, runs: Sequence[Run], labels: Sequence[str], scores: bool = False) -> list[Result]:
        """Run runs side by side and show how far they are, with or without their test accuracies."""
        return execute(runs, None, [ProgressDisplay(self.console, runs, labels, scores)])

    # Time

    def _fitting(self, cases: Sequence[Case], seeds: Sequence[int]) -> list[Case]:
        """Return the first of the cases that fit into the time that is left."""
        if self.minutes is None:
            return list(cases)
        pace = self._pace(cases, seeds)
        missing = [len(seeds) - len(self.archive.runs(case, seeds)) for case in cases]
        costs = [MARGIN * pace[case] * case.rounds * count for case, count in zip(cases, missing, strict=True)]
        ends = itertools.accumulate(costs)
        found = [case for case, end in zip(cases, ends, strict=True) if end <= self.seconds_left]
        self._say(
            f"{label_of(cases[0].dataset)}: {len(found)} of {plural(len(cases), 'missing cell')} fit into the "
            f"{max(0.0, self.seconds_left):.0f} s that are left; all need about {sum(costs):.0f} s"
        )
        return found

    def _pace(self, cases: Sequence[Case], seeds: Sequence[int]) -> dict[Case, float]:
        """Return the seconds of a round of each case, measured by short runs of all of them side by side."""
        k = self._build(cases[0], seeds[0]).settings.k
        rounds = min(CYCLES * k, *(case.rounds for case in cases))
        runs = [[self._build(case, seed, rounds=rounds) for seed in seeds] for case in cases]
        every = [run for mine in runs for run in mine]
        self._say(f"measuring the speed: {plural(len(every), 'run')}, {plural(rounds, 'round')}")
        self._execute(every, [case.label for case in cases for _ in seeds])
        first = min(k, rounds // 2)
        return {
            case: statistics.fmean(
                (r.history[-1].seconds - r.history[first - 1].seconds) / (rounds - first) for r in mine
            )
            for case, mine in zip(cases, runs, strict=True)
        }

    # Machine

    def machine(self, case: Case) -> Machine:
        """Return what runs cases like this one; raise a `SettingError` if the archive holds runs with other bits."""
        methods = canary_methods(case.method)
        if (case.kind, methods) not in self._machines:
            found = Machine(
                _device_name(self.machine_settings), torch.__version__, commit(), self._canary(case, methods)
            )
            self.archive.check(found, case, methods)
            self._machines[case.kind, methods] = found
        return self._machines[case.kind, methods]

    def _canary(self, case: Case, methods: Sequence[str]) -> str:
        """Return a hash of the models that some methods reach in two cycles, in exact mode."""
        alpha = ALPHAS[0] if has_alpha(case.dataset, case.preset) else None
        cases = [Case(case.dataset, name, alpha, case.preset, 1, case.precision) for name in methods]
        k = self._build(cases[0], FIRST_SEED).settings.k
        runs = [self._build(one, FIRST_SEED, rounds=2 * k, exact=True) for one in cases]
        name = f"canary of {label_of(case.dataset)}" + (f", {label_of(methods[0])}" if len(methods) == 1 else "")
        self._say(f"{name}: {plural(len(runs), 'method')}, {plural(2 * k, 'round')}, to see what this version computes")
        digest = hashlib.sha256()
        for result in self._execute(runs, [one.label for one in cases]):
            digest.update(_bytes(result))
        found = digest.hexdigest()[:12]
        self._say(f"{name}: {found}")
        return found

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def canary_methods(method: str) -> tuple[str, ...]:
    """Return the methods that a method's canary covers: all of the paper's together, any other by itself."""
    return EVERY if method in EVERY else (method,)


def _bytes(result: Result) -> bytes:
    parameters = torch.cat([p.detach().reshape(-1) for p in result.model().parameters()])
    return parameters.numpy().tobytes()


def _device_name(settings: Mapping[str, Any]) -> str:
    device = find_device(str(settings.get("device", "auto")))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _processor()


def _processor() -> str:
    """Return the model of the processor, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def commit() -> str:
    """Return the commit of the source, with a plus sign if files were changed since; empty outside a repository."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return ""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return found.stdout.strip()
