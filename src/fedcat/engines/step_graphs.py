"""The steps of launches on a GPU: captured once as CUDA graphs, and replayed without the host."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcat.core.cuda_graph import capture
from fedcat.core.device import on_device
from fedcat.engines.gradients.base import Gradients, no_inputs
from fedcat.engines.launch import AUGMENT, Launch, fill, padded
from fedcat.engines.rule_rows import norms
from fedcat.engines.step_buffers import StepBuffers
from fedcat.protocol.local_optimizer import Sgd

TOGETHER = 4
"""Steps per graph; a row that has taken its last step stays unchanged."""
FIRST = 4 * TOGETHER
"""Steps whose batches are drawn before the device starts; later batches are drawn while it computes."""
DRAWN = 2**28
"""Bytes of random numbers up to which there is room for more steps than a launch needs."""
INDEX = "(index)"
"""The name of batches among what is copied to the device."""
SPARE = 8
"""Largest ratio of the steps that there is room for to the steps that a launch needs."""


def room(launch: Launch) -> int:
    """Return the number of steps to make room for, a power of two.

    It covers the longest hop that the federation could have, up to `SPARE` times what this launch needs, so that
    all rounds use the same memory and graphs; unless random numbers take too much memory for that.
    """
    needed = _power(int(launch.counts.max()))
    kinds = {(hop.epochs, task.batch_size, task.federation.largest) for task, hop in launch.jobs}
    longest = max(epochs * -(-largest // size) for epochs, size, largest in kinds)
    wanted = max(needed, min(_power(longest), SPARE * needed))
    of_a_step = sum(values[0].nbytes for values in launch.drawn[0].values())
    return wanted if len(launch.jobs) * wanted * of_a_step <= DRAWN else needed


def _power(steps: int) -> int:
    return 1 << (steps - 1).bit_length()


class StepGraphs:
    """Memory for launches with the same `key`, and their steps as CUDA graphs.

    Parameters
    ----------
    launch : Launch
        One of these launches.
    gradients : Gradients
        What computes the gradients.
    least : int
        The minimum number of rows.
    """

    def __init__(self, launch: Launch, gradients: Gradients, least: int = 1) -> None:
        task, layout, self.size, self.clips = launch.task, launch.layout, launch.size, launch.clips
        self.net = layout.net
        self.count, self.device, self.room = max(len(launch.jobs), least), launch.device, room(launch)
        sizes = (layout.parameter_size, layout.size - layout.parameter_size, self.room, launch.batch)
        self.buffers = StepBuffers.make(self.count, *sizes, like=launch.starts, lr_decays=launch.lr_decays)
        own = task.rule.own_loss
        self.rule_rows = [rows.copy(self.count if own else rows.stop - rows.first) for rows in launch.rule_rows]
        drawn = padded(launch.drawn, self.count, self.room)
        self.drawn = {name: values.to(self.device) for name, values in drawn.items()}
        of_rule = {name: values for name, values in self.drawn.items() if name != AUGMENT}
        inputs = self.rule_rows[0].loss_inputs(of_rule) if own else no_inputs(self.buffers.p)
        self.gradients = gradients.on(self.buffers, inputs, task.augment, self.drawn.get(AUGMENT))
        self.optimizer = task.optimizer
        self.state = [torch.zeros_like(self.buffers.p) for _ in range(0 if self._sgd else self.optimizer.slots)]
        self.widths = widths(self.count) if least == 1 else [self.count]
        self.graphs: dict[int, Any] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._cuda else None
        self._staging = deque(_Staging({INDEX: self.buffers.index, **self.drawn}) for _ in range(2))

    @staticmethod
    def key(launch: Launch) -> tuple[object, ...]:
        """Return what launches have in common that can use the same memory and graphs."""
        rows = tuple(rows.key() for rows in launch.rule_rows)
        task = launch.task
        drawn = tuple((name, values.shape[1:], values.dtype) for name, values in launch.drawn[0].items())
        kind = (task.layout.id, task.pool.id, task.loss, task.optimizer, task.augment, drawn)
        return *kind, launch.batch, room(launch), launch.clips, launch.lr_decays, rows

    @property
    def _cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def _sgd(self) -> bool:
        """Whether the optimizer is SGD, which gradients may have a kernel for."""
        return isinstance(self.optimizer, Sgd)

    def rest(self) -> None:
        """Run steps that change no row, to compile kernels and allocate workspaces."""
        self._steps(self.count)
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def run(self, launch: Launch) -> tuple[Tensor, Tensor]:
        """Train a launch; return the final rows and the sums of the losses, in the launch's order."""
        self._load(launch)
        counts = -np.sort(-launch.counts)
        step, last = 0, int(counts[0])
        while step < last:
            if step == FIRST:  # meanwhile the device is busy with the first steps
                self._upload(launch, last)
            training = int((counts > step).sum())
            self._replay(next(width for width in reversed(self.widths) if width >= training))
            step += TOGETHER
        size = len(launch.jobs)
        ends = torch.cat([self.buffers.p[:size], self.buffers.buffers[:size]], 1)
        return ends, self.gradients.losses[:size].sum(1)

    def _load(self, launch: Launch) -> None:
        at, size = self.buffers, len(launch.jobs)
        split = launch.layout.parameter_size
        self._staging.rotate()
        self._staging[0].wait()
        self._upload(launch, FIRST)
        at.p[:size].copy_(launch.starts[:, :split])
        at.buffers[:size].copy_(launch.starts[:, split:])
        for slot in (at.v, *self.state):
            slot.zero_()
        columns = launch.columns()
        for name, value in zip(columns, on_device(list(columns.values()), at.p), strict=True):
            getattr(at, name)[:size, 0].copy_(value)
        counts = np.zeros(self.count, np.int32)
        counts[:size] = launch.counts
        both = torch.from_numpy(np.stack([counts, np.argsort(-counts, kind="stable").astype(np.int32)]))
        for to, numbers in zip((at.count, at.order), both.to(self.device, non_blocking=True), strict=True):
            to.copy_(numbers)
        at.step.zero_()
        self.gradients.losses.zero_()
        for mine, new in zip(self.rule_rows, launch.rule_rows, strict=True):
            mine.load(new)
        if self.drawn:
            fill({name: self._staging[0].memory[name] for name in self.drawn}, launch.drawn)
            self._staging[0].upload(self.drawn)

    def _upload(self, launch: Launch, steps: int) -> None:
        """Copy the positions of the first `steps` steps to the device."""
        if launch.write(self._staging[0].memory[INDEX].numpy(), steps):
            self._staging[0].upload({INDEX: self.buffers.index})

    def _replay(self, width: int) -> None:
        """Take `TOGETHER` steps with the first `width` rows in `order`."""
        if not self._cuda:
            self._steps(width)
            return
        if width not in self.graphs:
            self.graphs[width] = self._captured(width)
        self.graphs[width].replay()

    def _captured(self, width: int) -> Any:
        """Return `TOGETHER` steps as a graph, after running them once without changing any row."""
        at = self.buffers
        kept = at.count.clone(), at.step.clone()
        at.count.zero_()
        graph = capture(lambda: self._steps(width), self.device, self._pool)  # graphs share it: none reads another's
        at.count.copy_(kept[0])
        at.step.copy_(kept[1])
        return graph

    def _steps(self, width: int) -> None:
        self.net.train()
        for ahead in range(TOGETHER):
            self.gradients.gradients(ahead, width)
            self._descend(ahead, width)
        self.buffers.step.add_(TOGETHER)

    def _descend(self, ahead: int, width: int) -> None:
        """Take one step of the optimizer with every rule's corrections."""
        at = self.buffers
        for rows in self.rule_rows:
            if rows.changes_gradient:
                mine = slice(rows.first, rows.stop)
                at.g[mine] = rows.gradient(at.g[mine], at.p[mine])
        if self.clips:
            at.g.mul_((at.clip / (norms(at.g, self.size) + 1e-6)).clamp(max=1.0))
        if self._sgd:
            self.gradients.descend(ahead, width)
        else:
            self._optimize(ahead)
        for rows in self.rule_rows:
            if rows.changes_step:
                mine = slice(rows.first, rows.stop)
                at.p[mine] = torch.where(
                    at.active(ahead)[mine], rows.after(at.p[mine], at.rate(ahead)[mine]), at.p[mine]
                )

    def _optimize(self, ahead: int) -> None:
        """Take one step of another optimizer than SGD."""
        at, active = self.buffers, self.buffers.active(ahead)
        state = [slot.clone() for slot in self.state]
        given = (at.step + (ahead + 1), at.rate(ahead), at.momentum, at.decay)
        new = self.optimizer.step(at.p.clone(), at.g, state, *given)
        for mine, moved in zip((at.p, *self.state), (new, *state), strict=True):
            mine.copy_(torch.where(active, moved, mine))


class _Staging:
    """Host memory from which batches and random numbers are copied to the device.

    Two take turns, so that one can be filled while the other is copied.
    """

    def __init__(self, like: dict[str, Tensor]) -> None:
        cuda = like[INDEX].device.type == "cuda"
        self.memory = {
            name: torch.full(values.shape, -1 if name == INDEX else 0, dtype=values.dtype, pin_memory=cuda)
            for name, values in like.items()
        }
        self._copied: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the memory may be written."""
        if self._copied is not None:
            self._copied.synchronize()

    def upload(self, to: dict[str, Tensor]) -> None:
        """Start to copy memory to the device."""
        for name, values in to.items():
            values.copy_(self.memory[name], non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def widths(count: int) -> list[int]:
    """Return the numbers of rows for which there are graphs: all rows, half of them, and so on."""
    found = [count]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found
