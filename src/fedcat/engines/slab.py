"""The rows of a launch that share one rule."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.engines.base import Job
from fedcat.engines.batch_order import local_of, reported_by
from fedcat.engines.width import Width
from fedcat.protocol.local_rule import LocalRule, call_hook
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import stack


class Slab:
    """The rows of a launch that share one rule, whose row algebra runs on all of them at once.

    In exact mode no bit may depend on the number of rows. If all stacks of two or more rows give the same bits, a
    single row is doubled. If the width of a stack is fixed, the algebra runs row by row, because sums over a row can
    then depend even on its memory address.
    """

    def __init__(self, rule: LocalRule, first: int, jobs: list[Job], steps: list[int], size: int, width: Width) -> None:
        self.rule, self.first, self.stop, self.width = rule, first, first + len(jobs), width
        hops = [hop for _, hop in jobs]
        self.start = torch.stack([hop.start[:size] for hop in hops])
        self.sent, self.memory = stack([h.sent for h in hops]), stack([h.memory for h in hops])
        self.local = stack([local_of(job) for job in jobs]) if rule.own_loss else {}
        new = self.start.new_tensor
        self.lr = new([[hop.lr] for hop in hops])
        self.momentum = new([[task.momentum] for task, _ in jobs])
        self.steps = new([[s] for s in steps])
        self.changes_gradient = type(rule).gradient is not LocalRule.gradient
        self.changes_step = type(rule).after is not LocalRule.after
        self.keep(np.arange(self.first, self.stop))

    def keep(self, rows: NDArray[np.int64]) -> None:
        """From now on, work only on those of the slab's rows that are in `rows`."""
        mine = rows[(rows >= self.first) & (rows < self.stop)] - self.first
        self.count = len(mine)
        if self.changes_gradient or self.changes_step:
            every = self.count == self.stop - self.first
            part = slice(0, self.count) if every and (mine == np.arange(self.count)).all() else mine
            self._start, self._lr = take(self.start, part), take(self.lr, part)
            self._sent, self._memory = taken(self.sent, part), taken(self.memory, part)

    def copy(self, rows: int) -> Slab:
        """Return a copy of this slab in separate memory, for `load`, padded to `rows` with copies of the last row."""
        own = copy(self)
        for name in ("start", "lr"):
            setattr(own, name, _owned(getattr(self, name), rows))
        own.sent = {n: _owned(t, rows) for n, t in self.sent.items()}
        own.memory = {n: _filled(t, rows) for n, t in self.memory.items()}
        own.local = {n: _filled(t, rows) for n, t in self.local.items()}
        own.keep(np.arange(self.first, self.stop))
        return own

    def load(self, other: Slab) -> None:
        """Copy another slab of the same form into this one's memory."""
        for mine, new in zip(self._tensors(), other._tensors(), strict=True):
            count = 1 if shared(mine) else len(new)
            mine[:count].copy_(new[:count])

    def form(self) -> tuple[object, ...]:
        """Return a key; slabs with equal keys can be loaded into each other."""
        alike = tuple(shared(t) for t in self.sent.values())
        names = (*self.sent, "|", *self.memory, "|", *self.local)
        return self.rule, self.stop - self.first, names, alike, tuple((t.shape, t.dtype) for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        if not (self.changes_gradient or self.changes_step or self.rule.own_loss):
            return []
        return [self.start, self.lr, *self.sent.values(), *self.memory.values(), *self.local.values()]

    def loss_inputs(self) -> dict[str, Any]:
        """Return what the rule's own loss gets besides its draws, stacked."""
        return {"start": self.start, "sent": self.sent, "memory": self.memory, "local": self.local}

    def gradient(self, g: Tensor, p: Tensor) -> Tensor:
        """Return the rule's gradient for the current rows."""
        parts = groups(len(p), self.width)
        if parts is None:
            return self._call("gradient", g, p, self._start, self._sent, self._memory)
        found = [
            self._call("gradient", g[i], p[i], take(self._start, i), taken(self._sent, i), taken(self._memory, i))
            for i in parts
        ]
        return torch.cat(found)[: len(p)]

    def _call(self, hook: str, *arguments: Any) -> Tensor:
        found: Tensor = call_hook(self.rule, hook, *arguments)
        return found

    def after(self, p: Tensor) -> Tensor:
        """Return the rule's parameters after a step for the current rows."""
        parts = groups(len(p), self.width)
        if parts is None:
            return self._call("after", p, self._lr, self._sent, self._memory)
        found = [
            self._call("after", p[i], take(self._lr, i), taken(self._sent, i), taken(self._memory, i)) for i in parts
        ]
        return torch.cat(found)[: len(p)]

    def finish(self, end: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what all rows upload and keep; exact mode runs row by row, since this happens only once."""
        if type(self.rule).finish is LocalRule.finish:
            return {}, {}
        found = []
        exact = self.width.least > 1
        rows: list[Some] = [slice(row, row + 1) for row in range(len(end))] if exact else [slice(None)]
        for i in rows:
            steps, lr, momentum = (take(column, i) for column in (self.steps, self.lr, self.momentum))
            sent, memory = taken(self.sent, i), taken(self.memory, i)
            start = take(self.start, i)
            found.append(call_hook(self.rule, "finish", start, end[i], steps, lr, momentum, sent, memory))
        uploads, kept = (
            {n: torch.cat([part[n] for part in parts]) for n in parts[0]} for parts in zip(*found, strict=True)
        )
        return uploads, kept


def no_loss_inputs(rows: Tensor) -> dict[str, Any]:
    """Return the loss inputs of rules that use the cross entropy, which needs none."""
    return {"start": rows.new_empty(len(rows), 0), "sent": {}, "memory": {}, "local": {}}


def replies_of(
    jobs: list[Job], slabs: list[Slab], ends: Tensor, counts: NDArray[np.int64], losses: list[float]
) -> list[Reply]:
    """Return the replies of a launch whose jobs are in the order of its slabs; `ends` are whole rows."""
    replies = []
    for slab in slabs:
        uploads, memory = slab.finish(ends[slab.first : slab.stop, : slab.start.shape[1]])
        for row in range(slab.first, slab.stop):
            task, hop = jobs[row]
            own = row - slab.first
            replies.append(
                Reply(
                    hop=hop.id,
                    run=task.run,
                    end=ends[row],
                    samples=task.samples(hop.client),
                    steps=int(counts[row]),
                    loss=losses[row],
                    uploads={**{n: t[own] for n, t in uploads.items()}, **reported_by(jobs[row])},
                    memory={n: t[own] for n, t in memory.items()},
                )
            )
    return replies


Some = NDArray[np.int64] | slice


def groups(count: int, width: Width) -> list[Some] | None:
    """Return which rows the row algebra processes together, or None for all rows at once."""
    if width.most is not None:
        return [slice(row, row + 1) for row in range(count)]
    if count < width.least:
        return [np.minimum(np.arange(width.least), count - 1)]
    return None


def norms(rows: Tensor, width: Width) -> Tensor:
    """Return the norm of each row, as a column."""
    parts = groups(len(rows), width)
    seen = [rows] if parts is None else [rows[i] for i in parts]
    return torch.cat([torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in seen])[: len(rows)]


def taken(stacked: Mapping[str, Tensor], rows: Some) -> dict[str, Tensor]:
    """Return some rows of each stacked tensor."""
    return {name: take(tensor, rows) for name, tensor in stacked.items()}


def take(stacked: Tensor, rows: Some) -> Tensor:
    """Return some rows of a stacked tensor; a tensor that all rows share stays shared."""
    if isinstance(rows, slice):
        return stacked[rows]
    return stacked[:1].expand(len(rows), *stacked.shape[1:]) if shared(stacked) else stacked[torch.from_numpy(rows)]


def shared(stacked: Tensor) -> bool:
    """Return whether all rows of a stacked tensor share memory."""
    return stacked.stride(0) == 0 and len(stacked) > 1


def _owned(stacked: Tensor, rows: int) -> Tensor:
    """Return a copy padded to `rows`; a tensor that all rows share stays shared."""
    return stacked[:1].clone().expand(rows, *stacked.shape[1:]) if shared(stacked) else _filled(stacked, rows)


def _filled(stacked: Tensor, rows: int) -> Tensor:
    return stacked[torch.arange(rows, device=stacked.device).clamp(max=len(stacked) - 1)]
