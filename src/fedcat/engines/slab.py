"""The rows of a launch that have one rule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.engines.engine import Job
from fedcat.engines.width import Width
from fedcat.local import LocalRule, stack


class Slab:
    """The rows of a launch that have one rule: its row algebra runs on all of them at once.

    In exact mode no bit may depend on how many rows there are: where stacks of two or more rows are alike, a lone row
    is doubled; where a stack's width is fixed, the algebra runs row by row, since there sums over a row can depend even
    on where in memory it begins.
    """

    def __init__(self, rule: LocalRule, first: int, jobs: list[Job], steps: list[int], size: int, width: Width) -> None:
        self.rule, self.first, self.stop, self.width = rule, first, first + len(jobs), width
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
        if self.changes_gradient or self.changes_step:
            self._start, self._lr = take(self.start, mine), take(self.lr, mine)
            self._sent, self._memory = taken(self.sent, mine), taken(self.memory, mine)

    def gradient(self, g: Tensor, p: Tensor) -> Tensor:
        """Return the rule's gradient for the rows that it works on."""
        parts = groups(len(p), self.width)
        if parts is None:
            return self.rule.gradient(g, p, self._start, self._sent, self._memory)
        found = [
            self.rule.gradient(g[i], p[i], take(self._start, i), taken(self._sent, i), taken(self._memory, i))
            for i in parts
        ]
        return torch.cat(found)[: len(p)]

    def after(self, p: Tensor) -> Tensor:
        """Return the rule's parameters after a step for the rows that it works on."""
        parts = groups(len(p), self.width)
        if parts is None:
            return self.rule.after(p, self._lr, self._sent, self._memory)
        found = [self.rule.after(p[i], take(self._lr, i), taken(self._sent, i), taken(self._memory, i)) for i in parts]
        return torch.cat(found)[: len(p)]

    def finish(self, end: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what all rows upload and keep; in exact mode row by row, since it is only once."""
        if type(self.rule).finish is LocalRule.finish:
            return {}, {}
        found = []
        exact = self.width.least > 1
        for i in [np.array([row]) for row in range(len(end))] if exact else [np.arange(len(end))]:
            steps, lr, momentum = (take(column, i) for column in (self.steps, self.lr, self.momentum))
            sent, memory = taken(self.sent, i), taken(self.memory, i)
            found.append(self.rule.finish(take(self.start, i), end[i], steps, lr, momentum, sent, memory))
        uploads, kept = (
            {n: torch.cat([part[n] for part in parts]) for n in parts[0]} for parts in zip(*found, strict=True)
        )
        return uploads, kept


def groups(count: int, width: Width) -> list[NDArray[np.int64]] | None:
    """Return which rows row algebra is to see together, or None for all of them as they lie."""
    if width.most is not None:
        return [np.array([row]) for row in range(count)]
    if count < width.least:
        return [np.minimum(np.arange(width.least), count - 1)]
    return None


def norms(rows: Tensor, width: Width) -> Tensor:
    """Return the norm of each row, as a column."""
    parts = groups(len(rows), width)
    seen = [rows] if parts is None else [rows[i] for i in parts]
    return torch.cat([torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in seen])[: len(rows)]


def taken(stacked: Mapping[str, Tensor], rows: NDArray[np.int64]) -> dict[str, Tensor]:
    """Return some rows of stacked tensors."""
    return {name: take(tensor, rows) for name, tensor in stacked.items()}


def take(stacked: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Return some rows of a stacked tensor; one that all rows share stays shared."""
    shared = stacked.stride(0) == 0 and len(stacked) > 1
    return stacked[:1].expand(len(rows), *stacked.shape[1:]) if shared else stacked[torch.from_numpy(rows)]
