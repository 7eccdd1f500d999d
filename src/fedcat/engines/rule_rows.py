"""The rows of a launch that share one rule."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.core.device import on_device
from fedcat.engines.base import Job
from fedcat.engines.batch_order import local_of, mean_learning_rate, reported_by
from fedcat.engines.gradients.base import Inputs
from fedcat.engines.gradients.trials import StackSize
from fedcat.protocol.local_rule import LocalRule, call_hook
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import RowIndex, shared, stack, take, taken


class RuleRows:
    """The rows of a launch that share one rule, whose row algebra runs on all of them at once.

    In exact mode no bit may depend on the number of rows. If all stacks of two or more rows give the same bits, a
    single row is doubled. Elsewhere, as on a GPU, the algebra runs row by row, because sums over a row can then depend
    even on its memory address; unless the rule is `elementwise`, which depends on nothing.

    Parameters
    ----------
    rule : LocalRule
        The rule.
    first : int
        The first of its rows in the launch; they are adjacent.
    jobs : list of Job
        Their hops.
    starts : Tensor
        What they start from, whole rows [R, D].
    steps : list of int
        How many steps they take.
    size : StackSize
        Bounds on the rows of a stack.
    """

    def __init__(
        self, rule: LocalRule, first: int, jobs: list[Job], starts: Tensor, steps: list[int], size: StackSize
    ) -> None:
        self.rule, self.first, self.stop = rule, first, first + len(jobs)
        self.size = StackSize() if rule.elementwise else size
        self.exact = size != StackSize()
        self.jobs, self.steps = jobs, steps
        self.start = starts[:, : jobs[0][0].layout.parameter_size]
        self.sent, self.memory = stack([hop.sent for _, hop in jobs]), stack([hop.memory for _, hop in jobs])
        self.local = stack([local_of(job) for job in jobs]) if rule.own_loss else {}
        self.changes_gradient = type(rule).gradient is not LocalRule.gradient
        self.changes_step = type(rule).after is not LocalRule.after
        self.keep(np.arange(self.first, self.stop))

    def keep(self, rows: NDArray[np.int64]) -> None:
        """From now on, work only on those of the rule's rows that are in `rows`."""
        mine = rows[(rows >= self.first) & (rows < self.stop)] - self.first
        self.count = len(mine)
        if self.changes_gradient or self.changes_step:
            every = self.count == self.stop - self.first
            part = slice(0, self.count) if every and (mine == np.arange(self.count)).all() else mine
            self._start = take(self.start, part)
            self._sent, self._memory = taken(self.sent, part), taken(self.memory, part)

    def copy(self, rows: int) -> RuleRows:
        """Return a copy in separate memory, for `load`, padded to `rows` with copies of the last row."""
        own = copy(self)
        own.jobs = []  # they are a launch's
        used = bool(self._tensors())
        own.start = _owned(self.start, rows) if used else self.start[:0].clone()
        own.sent = {n: _owned(t, rows) for n, t in self.sent.items()} if used else {}
        own.memory = {n: _filled(t, rows) for n, t in self.memory.items()} if used else {}
        own.local = {n: _filled(t, rows) for n, t in self.local.items()}
        own.keep(np.arange(self.first, self.stop))
        return own

    def load(self, other: RuleRows) -> None:
        """Copy other rows with the same key into this memory."""
        for mine, new in zip(self._tensors(), other._tensors(), strict=True):
            count = 1 if shared(mine) else len(new)
            mine[:count].copy_(new[:count])

    def key(self) -> tuple[object, ...]:
        """Return what rows have in common that can be loaded into each other."""
        alike = tuple(shared(t) for t in self.sent.values())
        names = (*self.sent, "|", *self.memory, "|", *self.local)
        return self.rule, self.stop - self.first, names, alike, tuple((t.shape, t.dtype) for t in self._tensors())

    def _tensors(self) -> list[Tensor]:
        if not (self.changes_gradient or self.changes_step or self.rule.own_loss):
            return []
        return [self.start, *self.sent.values(), *self.memory.values(), *self.local.values()]

    def loss_inputs(self, drawn: dict[str, Tensor]) -> Inputs:
        """Return what the rule's own loss gets, with its draws."""
        return {"start": self.start, "sent": self.sent, "memory": self.memory, "local": self.local, "drawn": drawn}

    def gradient(self, g: Tensor, p: Tensor) -> Tensor:
        """Return the rule's gradient for the current rows."""
        return self._hook("gradient", g, p, self._start)

    def after(self, p: Tensor, lr: Tensor) -> Tensor:
        """Return the rule's parameters after a step, whose learning rates are `lr`, for the current rows."""
        return self._hook("after", p, lr)

    def _hook(self, name: str, *rows: Tensor) -> Tensor:
        """Call a hook on the current rows, at once or in groups."""
        parts = groups(len(rows[0]), self.size)
        if parts is None:
            whole: Tensor = call_hook(self.rule, name, *rows, self._sent, self._memory)
            return whole
        found = []
        for i in parts:
            given = (take(values, i) for values in rows)
            found.append(call_hook(self.rule, name, *given, taken(self._sent, i), taken(self._memory, i)))
        return torch.cat(found)[: len(rows[0])]

    def finish(self, ends: Tensor) -> Finished:
        """Return what all rows upload and keep, given the launch's final rows, and their largest magnitudes.

        Exact mode runs the rule row by row, since this happens only once.
        """
        mine, uploads, memory = ends[self.first : self.stop], {}, {}
        if type(self.rule).finish is not LocalRule.finish:
            end, found = mine[:, : self.start.shape[1]], []
            rates = [mean_learning_rate(*job, steps) for job, steps in zip(self.jobs, self.steps, strict=True)]
            momentum = [task.momentum for task, _ in self.jobs]
            columns = [on_device(values, mine)[:, None] for values in (self.steps, rates, momentum)]
            for i in [slice(row, row + 1) for row in range(len(end))] if self.exact else [slice(None)]:
                given = [take(values, i) for values in columns]
                brought = (taken(self.sent, i), taken(self.memory, i))
                found.append(call_hook(self.rule, "finish", take(self.start, i), end[i], *given, *brought))
            uploads, memory = (
                {n: torch.cat([part[n] for part in parts]) for n in parts[0]} for parts in zip(*found, strict=True)
            )
        found = [largest(part).to(mine.device) for part in (mine, *uploads.values(), *memory.values())]
        return Finished(uploads, memory, found[0] if len(found) == 1 else torch.stack(found).amax(0))

    def replies(
        self, ends: Tensor, finished: Finished, losses: list[float], finite: list[bool], seconds: float
    ) -> list[Reply]:
        """Return the replies of the rule's rows, given all of the launch's; `seconds` is the time of a step."""
        reports = type(self.rule).report is not LocalRule.report
        replies = []
        for row, ((task, hop), end) in enumerate(zip(self.jobs, ends[self.first : self.stop], strict=True)):
            sound = finite[self.first + row]
            sent = {name: tensor[row] for name, tensor in finished.uploads.items()}
            if reports:
                reported = reported_by((task, hop))
                sent |= reported
                sound = sound and all(bool(torch.isfinite(tensor).all()) for tensor in reported.values())
            steps = self.steps[row]
            replies.append(
                Reply(
                    hop=hop.id,
                    run=task.run,
                    end=end,
                    samples=task.samples(hop.client),
                    steps=steps,
                    loss=losses[self.first + row] / steps,
                    uploads=sent,
                    memory={name: tensor[row] for name, tensor in finished.memory.items()},
                    seconds=seconds * steps,
                    finite=sound,
                )
            )
        return replies


class Finished(NamedTuple):
    """What a rule's rows upload and keep, and the largest magnitude of all that, [R]: NaN if there is one."""

    uploads: dict[str, Tensor]
    memory: dict[str, Tensor]
    largest: Tensor


def groups(count: int, size: StackSize) -> list[RowIndex] | None:
    """Return which rows the row algebra processes together, or None for all rows at once."""
    if size.row_by_row:
        return [slice(row, row + 1) for row in range(count)]
    if count < size.least:
        return [np.minimum(np.arange(size.least), count - 1)]
    return None


def largest(rows: Tensor) -> Tensor:
    """Return the largest magnitude in each row, [R], NaN if there is one: faster than a test of every number."""
    flat = rows.reshape(len(rows), -1)
    if flat.numel() and (rows.is_floating_point() or rows.is_complex()):
        return flat.abs().amax(1).double()
    return rows.new_zeros(len(rows), dtype=torch.float64)


def norms(rows: Tensor, size: StackSize) -> Tensor:
    """Return the norm of each row, as a column."""
    parts = groups(len(rows), size)
    seen = [rows] if parts is None else [rows[i] for i in parts]
    return torch.cat([torch.linalg.vector_norm(part, dim=1, keepdim=True) for part in seen])[: len(rows)]


def _owned(stacked: Tensor, rows: int) -> Tensor:
    """Return a copy padded to `rows`; a tensor that all rows share stays shared."""
    return stacked[:1].clone().expand(rows, *stacked.shape[1:]) if shared(stacked) else _filled(stacked, rows)


def _filled(stacked: Tensor, rows: int) -> Tensor:
    return stacked[torch.arange(rows, device=stacked.device).clamp(max=len(stacked) - 1)]
