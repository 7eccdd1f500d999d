"""A launch: hops of any runs that train as one stack of rows."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.engines.base import Job
from fedcat.engines.batch_order import BatchOrder, augment_numbers, drawn_by, learning_rate
from fedcat.engines.gradients.trials import StackSize
from fedcat.engines.rule_rows import RuleRows
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import LARGEST, Reply

THREADS = min(16, os.cpu_count() or 1)
"""Threads that draw random numbers for a GPU."""
AUGMENT = "(augment)"
"""The name of the random numbers that augment inputs, among those that a rule draws."""


class Launch:
    """The rows of a launch, sorted by rule, with their batches and random numbers.

    Parameters
    ----------
    jobs : list of Job
        Hops that share a net, a loss and a local optimizer, given longest first.
    rules : sequence of LocalRule
        Their rules, in an order that is the same in every round.
    size : StackSize
        Bounds on the rows of a stack.
    batch : int
        The length to which batches are padded.
    """

    def __init__(self, jobs: list[Job], rules: Sequence[LocalRule], size: StackSize, batch: int) -> None:
        by_rule: dict[LocalRule, list[int]] = {rule: [] for rule in rules}
        for place, (task, _) in enumerate(jobs):
            by_rule[task.rule].append(place)
        self.places = [place for mine in by_rule.values() for place in mine]
        self.jobs = [jobs[place] for place in self.places]
        self.size, self.batch = size, batch
        self.task, self.device = self.jobs[0][0], self.jobs[0][1].start.device
        self.layout, self.begin = self.task.layout, _now(self.device)
        self.orders = [BatchOrder(task, hop) for task, hop in self.jobs]
        self.counts = np.array([order.steps for order in self.orders])
        self.starts = torch.stack([hop.start for _, hop in self.jobs])
        self.rule_rows = self._divide(by_rule)
        self.clips = any(task.clip is not None for task, _ in self.jobs)
        self.lr_decays = any(task.lr_decay for task, _ in self.jobs)
        self._written = [0] * len(self.jobs)

    def _divide(self, by_rule: dict[LocalRule, list[int]]) -> list[RuleRows]:
        found, first = [], 0
        for rule, mine in by_rule.items():
            if mine:
                rows = slice(first, first + len(mine))
                steps = self.counts[rows].tolist()
                found.append(RuleRows(rule, first, self.jobs[rows], self.starts[rows], steps, self.size))
                first += len(mine)
        return found

    def columns(self) -> dict[str, list[float]]:
        """Return the settings of each row: lr, lr_decay, momentum, decay, clip."""
        rates = [learning_rate(*job, steps) for job, steps in zip(self.jobs, self.counts.tolist(), strict=True)]
        return {
            "lr": [first for first, _ in rates],
            "lr_decay": [decay for _, decay in rates],
            "momentum": [task.momentum for task, _ in self.jobs],
            "decay": [task.weight_decay for task, _ in self.jobs],
            "clip": [float("inf") if task.clip is None else task.clip for task, _ in self.jobs],
        }

    def write(self, index: NDArray[np.integer[Any]], steps: int) -> bool:
        """Write the positions of the first `steps` steps, up to the end of an epoch; return whether any were new.

        `index` is [R, S, B]; what follows a row's last step stays as it is.
        """
        new = False
        for row, order in enumerate(self.orders):
            until = min(steps, order.steps)
            while self._written[row] < until:
                self._written[row] += order.write(index[row, self._written[row] :])
                new = True
        return new

    def lengths(self) -> NDArray[np.int64]:
        """Return the number of samples in each row's batches, [R, S]; 0 after its last step."""
        found = np.zeros((len(self.jobs), int(self.counts.max())), np.int64)
        for row, order in enumerate(self.orders):
            found[row, : order.steps] = np.tile(order.lengths, order.steps // len(order.lengths))
        return found

    @cached_property
    def drawn(self) -> list[dict[str, Tensor]]:
        """The random numbers of each row, [its steps, ...]: the rule's by name, and those that augment inputs.

        Several threads draw: NumPy's generators let go of the interpreter's lock.
        """
        if not self.task.rule.own_loss and not self.task.augment:
            return [{} for _ in self.jobs]
        if self.device.type == "cpu":
            return [self._drawn(job, count) for job, count in zip(self.jobs, self.counts.tolist(), strict=True)]
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(self._drawn, self.jobs, self.counts.tolist()))

    def _drawn(self, job: Job, count: int) -> dict[str, Tensor]:
        drawn = drawn_by(job, count) if self.task.rule.own_loss else {}
        drawn = {name: values.cpu() for name, values in drawn.items()}  # this thread has another stream than training
        numbers = augment_numbers(job, count, self.batch)
        return drawn if numbers is None else {**drawn, AUGMENT: numbers}


class Trained:
    """A launch that is trained, or will be when the device gets there; `replies` waits for that.

    Parameters
    ----------
    launch : Launch
        The launch.
    ends, losses : Tensor
        Its final rows, [R, D], and the sums of its losses, [R].
    """

    def __init__(self, launch: Launch, ends: Tensor, losses: Tensor) -> None:
        self.launch, self.ends = launch, ends
        self.finished = [rows.finish(ends) for rows in launch.rule_rows]
        largest = torch.cat([part.largest for part in self.finished])
        numbers = torch.stack([losses.double(), largest])
        here = torch.empty(numbers.shape, dtype=torch.float64, pin_memory=ends.device.type == "cuda")
        self._numbers = here.copy_(numbers, non_blocking=True)
        self.end = _now(ends.device)

    def replies(self) -> list[Reply]:
        """Return the replies in the order in which the jobs were given."""
        launch = self.launch
        step = _seconds(launch.begin, self.end) / int(launch.counts.sum())
        losses, largest = self._numbers.tolist()
        given = (losses, [value <= LARGEST for value in largest], step)
        pairs = zip(launch.rule_rows, self.finished, strict=True)
        found = [reply for rows, finished in pairs for reply in rows.replies(self.ends, finished, *given)]
        return [found[place] for place in np.argsort(launch.places)]


def _now(device: torch.device) -> Any:
    """Return the time, or a GPU's event: when it gets here."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    """Return the seconds between two times; wait for a GPU's event."""
    if isinstance(begin, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def padded(rows: list[dict[str, Tensor]], count: int, steps: int) -> dict[str, Tensor]:
    """Return the numbers that rows have drawn, see `Launch.drawn`, as [count, steps, ...], padded with zeros."""
    found = {}
    for name, first in rows[0].items():
        found[name] = torch.zeros(count, steps, *first.shape[1:], dtype=first.dtype)
    fill(found, rows)
    return found


def fill(to: dict[str, Tensor], rows: list[dict[str, Tensor]]) -> None:
    """Write the numbers of rows into such tensors."""
    if any(row.keys() != to.keys() for row in rows):
        raise SettingError(f"a rule must draw the same names for all clients, got {sorted({*map(tuple, rows)})}")
    for name, memory in to.items():
        shapes = {tuple(drawn[name].shape[1:]) for drawn in rows}
        if shapes != {tuple(memory.shape[2:])}:
            raise SettingError(f"a rule must draw {name!r} in the same shape for all clients, got {sorted(shapes)}")
        for row, drawn in zip(memory, rows, strict=False):  # there may be more memory than rows
            row[: len(drawn[name])] = drawn[name]
