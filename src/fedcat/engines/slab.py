"""The rows of a launch that have one rule."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.engines.engine import Job
from fedcat.local import LocalRule, stack


class Slab:
    """The rows of a launch that have one rule: its row algebra runs on all of them at once.

    Like a stack, it is filled up to `least` rows with copies of the last one, so that no bit depends on how many rows
    of other rules there are.
    """

    def __init__(self, rule: LocalRule, first: int, jobs: list[Job], steps: list[int], size: int, least: int) -> None:
        self.rule, self.first, self.stop, self.least = rule, first, first + len(jobs), least
        hops = [hop for _, hop in jobs]
        self.start = torch.stack([hop.start[:size] for hop in hops])
        self.sent, self.memory = stack([h.sent for h in hops]), stack([h.memory for h in hops])
        new = self.start.new_tensor
        self.lr = new([[hop.lr] for hop in hops])
        self.momentum = new([[task.momentum] for task, _ in jobs])
        self.steps = new([[s] for s in steps])
        self.changes_gradient = type(rule).gradient is not LocalRule.gradient
        self.changes_step = type(rule).after is not LocalRule.after
        self.keep(np.arange(self.first, self.stop))

    def keep(self, rows: NDArray[np.int64]) -> None:
        """From now on work on these rows of the launch, as far as they are this slab's."""
        mine = rows[(rows >= self.first) & (rows < self.stop)] - self.first
        self.count = len(mine)
        if self.count and (self.changes_gradient or self.changes_step):
            filled = mine[self._filled(self.count)]
            self._start, self._lr = take(self.start, filled), take(self.lr, filled)
            self._sent = {n: take(t, filled) for n, t in self.sent.items()}
            self._memory = {n: take(t, filled) for n, t in self.memory.items()}

    def _filled(self, count: int) -> NDArray[np.int64]:
        """Return positions 0 .. count - 1, the last one repeated until there are enough."""
        return np.minimum(np.arange(max(count, self.least)), count - 1)

    def gradient(self, g: Tensor, p: Tensor) -> Tensor:
        """Return the rule's gradient for the rows that it works on."""
        if len(p) < self.least:
            g, p = g[self._filled(len(p))], p[self._filled(len(p))]
        return self.rule.gradient(g, p, self._start, self._sent, self._memory)[: self.count]

    def after(self, p: Tensor) -> Tensor:
        """Return the rule's parameters after a step for the rows that it works on."""
        if len(p) < self.least:
            p = p[self._filled(len(p))]
        return self.rule.after(p, self._lr, self._sent, self._memory)[: self.count]

    def finish(self, end: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what all rows upload and keep."""
        if type(self.rule).finish is LocalRule.finish:
            return {}, {}
        rows = self._filled(len(end))
        steps, lr, momentum = (take(column, rows) for column in (self.steps, self.lr, self.momentum))
        sent, memory = ({n: take(t, rows) for n, t in named.items()} for named in (self.sent, self.memory))
        return self.rule.finish(take(self.start, rows), end[rows], steps, lr, momentum, sent, memory)


def take(stacked: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return some rows of a stacked tensor; one that all rows share stays shared."""
    shared = stacked.stride(0) == 0 and len(stacked) > 1
    return stacked[:1].expand(len(rows), *stacked.shape[1:]) if shared else stacked[torch.from_numpy(rows)]
