"""Launches on a GPU: steps are captured once as CUDA graphs and replayed without the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.engines.base import Job
from fedcat.engines.batch_order import BatchOrder, augment_numbers, drawn_by
from fedcat.engines.fused.chain import Chain
from fedcat.engines.rows import Rows
from fedcat.engines.slab import Slab, no_loss_inputs, norms
from fedcat.engines.vmapped import Vmapped
from fedcat.engines.width import Width
from fedcat.protocol.local_optimizer import Sgd
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import stack

TOGETHER = 4
"""Steps per graph; a row that has taken its last step stays unchanged."""

LEAD = 4 * TOGETHER
"""Steps whose batches are drawn before the device starts; later batches are drawn while it computes."""
AUGMENT = "(augment)"
"""The name of the random numbers that augment inputs, among those that a rule draws."""
SPARE = 8
"""Largest ratio of the steps that an arena has room for to the steps that its launch needs."""


class Launch:
    """The rows of a launch, sorted by rule, with their batches."""

    def __init__(self, jobs: list[Job], width: Width, batch: int, rules: Sequence[LocalRule]) -> None:
        present = {task.rule for task, _ in jobs}
        rules = [rule for rule in rules if rule in present]
        self.place = sorted(range(len(jobs)), key=lambda i: rules.index(jobs[i][0].rule))
        self.jobs = [jobs[i] for i in self.place]
        self.schedules = [BatchOrder(task, hop) for task, hop in self.jobs]
        self.counts = np.array([schedule.steps for schedule in self.schedules])
        self._written = np.zeros(len(self.jobs), np.int64)
        self.batch = batch
        task = self.jobs[0][0]
        self.layout, self.pool, self.rule, self.task = task.layout, task.pool, task.rule, task
        size = self.layout.parameter_size
        self.slabs = []
        for rule in rules:
            mine = [i for i, (task, _) in enumerate(self.jobs) if task.rule == rule]
            own, steps = [self.jobs[i] for i in mine], self.counts[mine].tolist()
            self.slabs.append(Slab(rule, mine[0], own, steps, size, width))
        self.clips = any(task.clip is not None for task, _ in self.jobs)
        self.drawn = self._draw()

    @property
    def room(self) -> int:
        """The number of steps to make room for, a power of two.

        It covers the longest hop that the federation could have, up to `SPARE` times what this launch needs, so that
        all rounds use the same memory and graphs.
        """
        room = _power(int(self.counts.max()))
        if self.rule.own_loss or self.task.augment:  # random numbers take memory for every step
            return room
        longest = max(hop.epochs * -(-task.federation.largest // task.batch_size) for task, hop in self.jobs)
        return max(room, min(_power(longest), SPARE * room))

    def write(self, pick: NDArray[np.int32], steps: int) -> bool:
        """Write the positions of the first `steps` steps, up to the end of an epoch; return whether any were new."""
        before = self._written.sum()
        for row, schedule in enumerate(self.schedules):
            while self._written[row] < min(steps, schedule.steps):
                begin, index = self._written[row], schedule.epoch()
                pick[row, begin : begin + len(index), : index.shape[1]] = index
                pick[row, begin : begin + len(index), index.shape[1] :] = -1
                self._written[row] += len(index)
        return bool(self._written.sum() > before)

    def form(self) -> tuple[object, ...]:
        """Return a key; launches with equal keys can use the same memory and graphs."""
        drawn = tuple((name, t.shape[2:], t.dtype) for name, t in self.drawn.items())
        slabs = tuple(slab.form() for slab in self.slabs)
        kind = (self.task.loss, self.task.optimizer, self.task.augment)
        return self.layout, self.pool, *kind, self.batch, self.room, self.clips, drawn, slabs

    def _draw(self) -> dict[str, Tensor]:
        """Return the random numbers of every row, [R, S, ...]: the rule's by name, and those that augment inputs."""
        rows = []
        for job, count in zip(self.jobs, self.counts.tolist(), strict=True):
            drawn = dict(drawn_by(job, count)) if self.rule.own_loss else {}
            numbers = augment_numbers(job, count, self.batch)
            drawn |= {} if numbers is None else {AUGMENT: numbers}
            rows.append({n: _longer(t, self.room) for n, t in drawn.items()})
        return stack(rows)


def _power(steps: int) -> int:
    return 1 << (steps - 1).bit_length()


def _longer(values: Tensor, steps: int) -> Tensor:
    return torch.cat([values, values.new_zeros(steps - len(values), *values.shape[1:])])


class Arena:
    """Memory for launches of one form, and their steps as CUDA graphs.

    Parameters
    ----------
    launch : Launch
        A launch of the form.
    chain : Chain, optional
        The net, if the fused kernels train it.
    precision : str
        ``fp32``, ``tf32`` or ``bf16``.
    width : Width
        How many rows a stack may have.
    fill : int
        The minimum number of rows.
    """

    def __init__(self, launch: Launch, chain: Chain | None, precision: str, width: Width, fill: int = 1) -> None:
        task, hop = launch.jobs[0]
        layout, self.width, self.clips = task.layout, width, launch.clips
        self.count = max(len(launch.jobs), fill)
        self.device = hop.start.device
        sizes = (layout.parameter_size, layout.size - layout.parameter_size, launch.room, launch.batch)
        self.rows = Rows.make(self.count, *sizes, like=hop.start)
        whole = launch.rule.own_loss
        self.slabs = [slab.copy(self.count if whole else slab.stop - slab.first) for slab in launch.slabs]
        self.program: Any
        if chain is not None:
            from fedcat.engines.fused.program import Program

            self.program = Program(chain, launch.pool, self.rows, precision)
            self.drawn: dict[str, Tensor] = {}
        else:
            self.drawn = {n: self._filled(t.to(self.device)) for n, t in launch.drawn.items()}
            inputs = self.slabs[0].loss_inputs() if whole else no_loss_inputs(self.rows.p)
            by_rule = {n: t for n, t in self.drawn.items() if n != AUGMENT}
            more = (launch.task.loss, launch.task.augment, self.drawn.get(AUGMENT))
            self.program = Vmapped(layout, launch.pool, launch.rule, self.rows, inputs, by_rule, precision, *more)
        self.optimizer = launch.task.optimizer
        self.state = [torch.zeros_like(self.rows.p) for _ in range(0 if self._sgd else self.optimizer.slots)]
        self.levels = _levels(self.count) if fill == 1 else [self.count]
        self.staging = torch.full(self.rows.pick.shape, -1, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        self.graphs: dict[int, Any] = {}
        self._memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._staged: Any = None

    @property
    def _sgd(self) -> bool:
        """Whether the optimizer is SGD, for which there are kernels."""
        return isinstance(self.optimizer, Sgd)

    def _step(self, ahead: int) -> None:
        """Take one step of another optimizer than SGD."""
        rows, active = self.rows, self.rows.active(ahead)
        state = [slot.clone() for slot in self.state]
        given = (rows.step + (ahead + 1), rows.lr, rows.momentum, rows.decay)
        new = self.optimizer.step(rows.p.clone(), rows.g, state, *given)
        for mine, moved in zip((rows.p, *self.state), (new, *state), strict=True):
            mine.copy_(torch.where(active, moved, mine))

    def rest(self) -> None:
        """Run steps that change no row, to compile kernels and allocate workspaces."""
        self._steps(self.count)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _filled(self, values: Tensor) -> Tensor:
        """Return the values of a launch's rows, padded to the size of the arena with copies of the last."""
        missing = self.count - len(values)
        return torch.cat([values, values[-1:].expand(missing, *values.shape[1:])]) if missing else values

    def run(self, launch: Launch) -> tuple[Tensor, Tensor]:
        """Train a launch; return the final rows and the sums of the losses, in the launch's order."""
        self._load(launch)
        counts = -np.sort(-launch.counts)
        step, last = 0, int(counts[0])
        while step < last:
            if step == LEAD:  # meanwhile the device is busy with the first steps
                self._upload(launch, last)
            at_work = int((counts > step).sum())
            self._replay(next(level for level in reversed(self.levels) if level >= at_work))
            step += TOGETHER
        size = len(launch.jobs)
        ends = torch.cat([self.rows.p[:size], self.rows.buffers[:size]], 1)
        return ends, self.program.losses[:size].sum(1)

    def _load(self, launch: Launch) -> None:
        rows, size = self.rows, len(launch.jobs)
        split = launch.layout.parameter_size
        starts = torch.stack([hop.start for _, hop in launch.jobs])
        rows.p[:size].copy_(starts[:, :split])
        rows.buffers[:size].copy_(starts[:, split:])
        for slot in (rows.v, *self.state):
            slot.zero_()
        for name, value in (
            ("lr", [hop.lr for _, hop in launch.jobs]),
            ("momentum", [task.momentum for task, _ in launch.jobs]),
            ("decay", [task.weight_decay for task, _ in launch.jobs]),
            ("clip", [float("inf") if task.clip is None else task.clip for task, _ in launch.jobs]),
        ):
            getattr(rows, name)[:size, 0].copy_(torch.tensor(value, dtype=rows.p.dtype), non_blocking=True)
        counts = np.zeros(self.count, np.int32)
        counts[:size] = launch.counts
        rows.count.copy_(torch.from_numpy(counts))
        rows.order.copy_(torch.from_numpy(np.argsort(-counts, kind="stable").astype(np.int32)))
        if self._staged is not None:
            self._staged.synchronize()
        self._upload(launch, LEAD)
        rows.step.zero_()
        self.program.losses.zero_()
        for mine, new in zip(self.slabs, launch.slabs, strict=True):
            mine.load(new)
        for name, drawn in launch.drawn.items():
            self.drawn[name][:size].copy_(drawn, non_blocking=True)

    def _upload(self, launch: Launch, steps: int) -> None:
        """Copy the positions of the first `steps` steps to the device."""
        if not launch.write(self.staging.numpy(), steps):
            return
        self.rows.pick.copy_(self.staging, non_blocking=True)
        if self.device.type == "cuda":
            self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._staged.record()

    def _replay(self, level: int) -> None:
        """Take `TOGETHER` steps with the first `level` rows in `order`."""
        if self.device.type != "cuda":
            self._steps(level)
            return
        if level not in self.graphs:
            self._capture(level)
        self.graphs[level].replay()

    def _capture(self, level: int) -> None:
        """Capture `TOGETHER` steps, after running them once without changing any row, to compile and allocate."""
        kept = self.rows.count.clone(), self.rows.step.clone()
        self.rows.count.zero_()
        aside = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            self._steps(level)
        torch.cuda.current_stream().wait_stream(aside)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):  # graphs may share it: none reads what another left
            self._steps(level)
        self.graphs[level] = graph
        self.rows.count.copy_(kept[0])
        self.rows.step.copy_(kept[1])

    def _steps(self, level: int) -> None:
        for ahead in range(TOGETHER):
            self.program.gradients(ahead, level)
            self._descend(ahead, level)
        self.rows.step.add_(TOGETHER)

    def _descend(self, ahead: int, level: int) -> None:
        """Take one step of the optimizer with every rule's corrections."""
        rows = self.rows
        for slab in self.slabs:
            if slab.changes_gradient:
                mine = slice(slab.first, slab.stop)
                rows.g[mine] = slab.gradient(rows.g[mine], rows.p[mine])
        if self.clips:
            rows.g.mul_((rows.clip / (norms(rows.g, self.width) + 1e-6)).clamp(max=1.0))
        if self._sgd:
            self.program.descend(ahead, level)
        else:
            self._step(ahead)
        for slab in self.slabs:
            if slab.changes_step:
                mine = slice(slab.first, slab.stop)
                new = slab.after(rows.p[mine])
                rows.p[mine] = torch.where(rows.active(ahead)[mine], new, rows.p[mine])


def _levels(count: int) -> list[int]:
    """Return the stack widths that are captured as graphs: all rows, half of them, and so on."""
    levels = [count]
    while levels[-1] > 1:
        levels.append(-(-levels[-1] // 2))
    return levels
