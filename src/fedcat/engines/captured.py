"""Launches on a GPU: step graphs that are kept for the next round, and launches that are split to fit into memory."""

from __future__ import annotations

import gc
import math
import warnings
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch

from fedcat.core.device import current_device, stream_for
from fedcat.engines.base import Job
from fedcat.engines.gradients.base import Gradients
from fedcat.engines.gradients.choose import captured_gradients
from fedcat.engines.gradients.trials import stack_size
from fedcat.engines.launch import Launch, Trained
from fedcat.engines.step_graphs import StepGraphs, room
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import Task

KEPT = 8
"""Number of step graphs to keep for the next round: runs of several nets need up to two for each net."""
SHARE = 0.9
"""Fraction of the memory to plan with; the rest is a reserve."""
OUTSIDE = 3
"""Copies of all hops' rows that a memory limit must leave room for: their starts, their ends and the averaging."""
LIMIT = 65_535
"""Maximum number of rows of a kernel launch."""


class CapturedLaunches:
    """Trains launches on a GPU by replaying captured steps.

    Parameters
    ----------
    exact, precision, memory
        See `Engine`.
    """

    def __init__(self, exact: bool, precision: str, memory: float | None) -> None:
        self.exact, self.precision, self.memory = exact, precision, memory
        self._graphs: OrderedDict[Hashable, StepGraphs] = OrderedDict()
        self._row_bytes: dict[Hashable, float] = {}
        self._most: dict[Hashable, int] = {}
        self._names: dict[Hashable, str] = {}
        self._devices: set[torch.device] = set()

    def takes(self, task: Task) -> bool:
        """Return whether steps of a task are captured: on a GPU."""
        return task.layout.device.type == "cuda"

    def start(self, jobs: list[Job], rules: Sequence[LocalRule]) -> list[Trained]:
        """Start to train hops that can share a launch, given longest first; return them as one or more launches.

        `rules` are those of the hops, in an order that is the same in every round: memory and graphs depend on it.
        """
        device = jobs[0][1].start.device
        self._devices.add(device)
        with training_stream(device):
            return self._start(jobs, rules)

    def wait(self) -> None:
        """Wait until all launches are trained."""
        for device in self._devices:
            if device.type == "cuda":
                stream_for("training", device).synchronize()

    def _start(self, jobs: list[Job], rules: Sequence[LocalRule]) -> list[Trained]:
        task = jobs[0][0]
        batch = max(task.padding for task in {task for task, _ in jobs})
        brings = jobs[0][1].brings if task.rule.own_loss else ()
        kind = (task.layout.id, task.pool.id, task.loss, task.optimizer, task.augment, batch, brings, *rules)
        gradients, why = captured_gradients(jobs[0], batch, self.precision)
        self._names[task.layout.id, task.loss_key] = f"{gradients.name}, captured: {why}" if why else gradients.name
        size = stack_size(gradients, batch, self.exact)
        waiting: list[list[Job]] = [jobs]
        done: list[Trained] = []
        while waiting:
            part = waiting.pop()
            most = min(self._most.get(kind, LIMIT), size.most or LIMIT)
            if len(part) > most:
                each = -(-len(part) // -(-len(part) // most))
                waiting += [part[begin : begin + each] for begin in reversed(range(0, len(part), each))]
                continue
            launch = Launch(part, rules, size, batch)
            key = StepGraphs.key(launch)
            if key not in self._graphs and not self._fits(kind, launch, gradients, len(jobs)):
                waiting.append(part)
                continue
            try:
                done.append(Trained(launch, *self._step_graphs(key, launch, gradients).run(launch)))
            except torch.OutOfMemoryError:
                alone = not any(kept != key for kept in self._graphs)
                self._forget()
                if alone and (len(part) == 1 or size.most is not None):
                    raise
                if alone:
                    self._most[kind] = len(part) // 2
                waiting.append(part)
        return done

    def kernels(self, task: Task) -> str:
        """Return a description of what computes a task's steps."""
        return self._names.get((task.layout.id, task.loss_key), "nothing has been trained yet")

    def release(self) -> None:
        """Free the memory that is kept for the next launches."""
        self._row_bytes.clear()
        self._most.clear()
        if torch.cuda.is_available():  # on a CPU, where little is at stake, a search takes longer than a short run
            gc.unfreeze()  # also what the driver let the collector leave out
            gc.collect()
        self._forget()

    def _forget(self) -> None:
        self._graphs.clear()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _step_graphs(self, key: Hashable, launch: Launch, gradients: Gradients) -> StepGraphs:
        """Return the graphs of a launch; drop the least recently used ones if there are too many."""
        if key not in self._graphs:
            while len(self._graphs) >= KEPT:
                self._graphs.popitem(last=False)
            self._graphs[key] = StepGraphs(launch, gradients, launch.size.least)
        self._graphs.move_to_end(key)
        return self._graphs[key]

    def _fits(self, kind: Hashable, launch: Launch, gradients: Gradients, hops: int) -> bool:
        """Make room for the memory of a launch; if it does not fit, remember how many rows do, and return False.

        Free memory is measured each time: other processes may use the card as well.
        """
        steps = room(launch) if launch.drawn[0] else 0  # random numbers take memory for every step
        if (kind, steps) not in self._row_bytes:
            try:
                self._row_bytes[kind, steps] = self._measure(launch, gradients)
            except torch.OutOfMemoryError:
                self._forget()
                self._row_bytes[kind, steps] = self._measure(launch, gradients)
        row, rows = self._row_bytes[kind, steps], max(len(launch.jobs), launch.size.least)
        while (fitting := int(min(LIMIT, SHARE * self._free(launch, hops) / row))) < rows and self._graphs:
            self._graphs.popitem(last=False)
        if fitting >= rows:
            return True
        if len(launch.jobs) == 1 or launch.size.most is not None:  # the minimum: try it
            self._warn(launch, row, rows, hops)
            return True
        self._most[kind] = max(1, fitting)
        return False

    def _measure(self, launch: Launch, gradients: Gradients) -> float:
        """Return the bytes that a row takes, measured on one row per rule, which takes no step."""
        if launch.device.type != "cuda":
            return 1.0
        few = [rows.jobs[0] for rows in launch.rule_rows]
        small = Launch(few, [rows.rule for rows in launch.rule_rows], launch.size, launch.batch)
        StepGraphs(small, gradients, launch.size.least).rest()  # allocates what does not grow with the rows
        before = torch.cuda.memory_allocated(launch.device)
        torch.cuda.reset_peak_memory_stats(launch.device)
        graphs = StepGraphs(small, gradients, launch.size.least)
        graphs.rest()
        return (torch.cuda.max_memory_allocated(launch.device) - before) / graphs.count

    def _free(self, launch: Launch, hops: int) -> float:
        """Return the bytes that a launch may take."""
        if launch.device.type != "cuda":
            return math.inf
        allocated, reserved = (
            count(launch.device) for count in (torch.cuda.memory_allocated, torch.cuda.memory_reserved)
        )
        free = float(torch.cuda.mem_get_info(launch.device)[0] + reserved - allocated)
        return free if self.memory is None else min(free, self.memory - allocated - self._outside(launch, hops))

    def _outside(self, launch: Launch, hops: int) -> float:
        return float(OUTSIDE * hops * launch.starts.shape[1] * launch.starts.element_size())

    def _warn(self, launch: Launch, row: float, rows: int, hops: int) -> None:
        if self.memory is not None:
            used = torch.cuda.memory_allocated(launch.device) + self._outside(launch, hops)
            warnings.warn(
                f"memory {self.memory / 1e9:.3g} GB is too small: the data and {rows} rows of this net, the minimum "
                f"that can be trained at a time, take about {(used + rows * row / SHARE) / 1e9:.3g} GB",
                stacklevel=2,
            )


@contextmanager
def training_stream(device: torch.device) -> Iterator[None]:
    """Work on the stream of training, after all that was started before: the server's work goes on beside it.

    Memory of the two streams needs no other care. What training reads is kept by its `Launch` until the host has waited
    for the end, or for all of training (`wait`). What training made is overwritten only by training that starts later,
    hence after those who read it.
    """
    if device.type != "cuda":
        yield
        return
    with current_device(device):
        stream = stream_for("training", device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
