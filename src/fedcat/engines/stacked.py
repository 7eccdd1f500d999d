"""The stacked engine: all rows of a launch train together, one step of each at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap

from fedcat.core.precision import bf16_autocast_vmap, plain_attention, precision_context
from fedcat.engines.base import Engine, Job, timed
from fedcat.engines.batch_order import augment_numbers, batches, drawn_by, steps_of
from fedcat.engines.chained import Chained, chained_of
from fedcat.engines.loss_trial import check_loss
from fedcat.engines.replayed import Replayed
from fedcat.engines.slab import Slab, no_loss_inputs, norms, replies_of, take, taken
from fedcat.engines.width import Width, width_of
from fedcat.models.layout import Tensors
from fedcat.models.traits import traits
from fedcat.protocol.local_rule import Batch, LossInputs, unchanged
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task, stack


class StackedEngine(Engine):
    """Trains hops that share a net as one matrix of rows.

    Rows may differ in their number of steps, batch lengths, learning rates, momenta and rules. A row that has taken
    its last step is dropped from the launch. On a GPU, steps are captured once and replayed, and fused kernels train
    nets that are chains of known layers.

    In exact mode, batches are always padded to one length, and stacks have a width at which a row's bits do not depend
    on the other rows (see `width_of`).
    """

    name = "stacked"

    def __init__(self, exact: bool = False, precision: str = "fp32", memory: float | None = None) -> None:
        super().__init__(exact, precision, memory)
        self._gpu = Replayed(exact, precision, memory)
        self._tried: set[object] = set()

    def train(self, jobs: Sequence[Job]) -> list[Reply]:
        """Train the hops; those that can share a launch train together."""
        launches: dict[object, list[int]] = {}
        for position, (task, hop) in enumerate(jobs):
            key = (
                id(task.layout),
                id(task.pool),
                *(task.loss_key, task.optimizer, task.augment),
                (*hop.sent, *hop.memory) if task.rule.own_loss else None,
                task.padding if self.exact else task.padding.bit_length(),
            )
            launches.setdefault(key, []).append(position)
        replies: dict[int, Reply] = {}
        with precision_context(self.precision):
            for positions in launches.values():
                rules = list(dict.fromkeys(jobs[p][0].rule for p in positions))
                positions.sort(key=lambda p: -steps_of(*jobs[p]))
                some = [jobs[p] for p in positions]
                self._try_loss(some[0])
                replays = self._gpu.takes(some[0][0])
                launch = partial(self._gpu.train, some, rules) if replays else partial(self._launch, some)
                replies.update(zip(positions, timed(launch), strict=True))
        return [replies[p] for p in range(len(jobs))]

    def _try_loss(self, job: Job) -> None:
        """Test a loss before its first use with a net, unless the net's batches are never padded."""
        task, hop = job
        key = (task.loss_key, id(task.layout), *hop.sent)
        if not task.plain_loss and key not in self._tried and not traits(task.layout, task.pool).mixes_samples:
            check_loss(job)
            self._tried.add(key)

    def _launch(self, jobs: list[Job]) -> list[Reply]:
        """Train hops, given longest first, in stacks of at most the allowed width."""
        task = jobs[0][0]
        chained = self._chained(task)
        gradients = None if chained is None else chained.of_samples
        width = width_of(task.layout, task.pool, task.padding, self.exact, gradients, task.loss)
        most = width.most or len(jobs)
        parts = [jobs[begin : begin + most] for begin in range(0, len(jobs), most)]
        return [reply for part in parts for reply in _Launch(part, self.exact, width, self.precision, chained).run()]

    def _chained(self, task: Task) -> Chained | None:
        """Return a task's hand-written gradients, or None if they do not apply or are slower."""
        if self.precision != "fp32" or not task.plain_loss:
            return None
        return chained_of(task.layout, task.pool, task.padding)

    def kernels(self, task: Task) -> str:
        """Return a description of what computes a task's steps."""
        if self._gpu.takes(task):
            return self._gpu.kernels(task)
        return "torch.vmap" if self._chained(task) is None else "hand-written gradients"

    def release(self) -> None:
        """Free memory that was kept for the next call."""
        self._gpu.release()


class _Launch:
    """One matrix of rows from its first step to its last."""

    def __init__(self, jobs: list[Job], exact: bool, width: Width, precision: str, chained: Chained | None) -> None:
        self.exact, self.width, self.precision, self.chained = exact, width, precision, chained
        plans = [batches(task, hop) for task, hop in jobs]
        rules = list(dict.fromkeys(task.rule for task, _ in jobs))
        order = sorted(range(len(jobs)), key=lambda i: (rules.index(jobs[i][0].rule), -len(plans[i][0])))
        self.order = order
        self.jobs = [jobs[i] for i in order]
        self.plans = [plans[i] for i in order]
        self.counts = np.array([len(index) for index, _ in self.plans])
        task = self.jobs[0][0]
        self.layout, self.pool, self.user_loss = task.layout, task.pool, task.loss
        self.optimizer, self.augment = task.optimizer, task.augment
        self.device = self.jobs[0][1].start.device
        self.slabs = []
        for rule in rules:
            mine = [i for i, (t, _) in enumerate(self.jobs) if t.rule == rule]
            steps = self.counts[mine].tolist()
            own = [self.jobs[i] for i in mine]
            self.slabs.append(Slab(rule, mine[0], own, steps, self.layout.parameter_size, width))
        self.rule = rules[0]
        self.by_length = traits(self.layout, self.pool).mixes_samples
        self._place_batches()
        self._place_rows()

    def _place_batches(self) -> None:
        """Copy all batches of the launch to the device: positions [R, S, B], padded with -1."""
        length = max(index.shape[1] for index, _ in self.plans)
        if self.exact:
            length = max(length, self.jobs[0][0].padding)
        steps = int(self.counts.max())
        index = np.full((len(self.jobs), steps, length), -1, np.int64)
        self.lengths = np.zeros((len(self.jobs), steps), np.int64)
        for row, (plan, lengths) in enumerate(self.plans):
            index[row, : len(plan), : plan.shape[1]] = plan
            self.lengths[row, : len(plan)] = lengths
        self.index = torch.from_numpy(index).to(self.device)
        self.drawn: dict[str, Tensor] = {}
        if self.rule.own_loss:
            self.drawn = self._draw(steps)
        counts = self.counts.tolist()
        found = [augment_numbers(job, count, length) for job, count in zip(self.jobs, counts, strict=True)]
        numbers = [_longer(part, steps) for part in found if part is not None]
        self.numbers = torch.stack(numbers).to(self.device) if numbers else None

    def _draw(self, steps: int) -> dict[str, Tensor]:
        """Return the rule's random draws for every row, [R, S, ...]; rows with fewer steps are padded with zeros."""
        rows = []
        for job, count in zip(self.jobs, self.counts.tolist(), strict=True):
            rows.append({n: _longer(t, steps).to(self.device) for n, t in drawn_by(job, count).items()})
        return stack(rows)

    def _place_rows(self) -> None:
        size = self.layout.parameter_size
        starts = torch.stack([hop.start for _, hop in self.jobs])
        self.ends = starts.clone()
        self.p = starts[:, :size].clone()
        self.buffers = starts[:, size:].clone()
        self.state = [torch.zeros_like(self.p) for _ in range(self.optimizer.slots)]
        new = self.p.new_tensor
        self.lr = new([[hop.lr] for _, hop in self.jobs])
        self.momentum = new([[task.momentum] for task, _ in self.jobs])
        self.decay = new([[task.weight_decay] for task, _ in self.jobs])
        clips = [task.clip for task, _ in self.jobs]
        self.clip = new([[float("inf") if c is None else c] for c in clips])
        self.clips = any(c is not None for c in clips)
        self.decays = any(task.weight_decay for task, _ in self.jobs)
        self.loss = torch.zeros(len(self.jobs), dtype=self.p.dtype, device=self.device)
        self.loss_inputs = self.slabs[0].loss_inputs() if self.rule.own_loss else no_loss_inputs(self.p)
        self.rows = np.arange(len(self.jobs))
        self._keep(self.rows)

    def run(self) -> list[Reply]:
        """Take all steps and return the replies in the order of the jobs."""
        self.layout.net.train()
        for step in range(int(self.counts.max())):
            self._drop_finished(step)
            self._descend(self._gradients(step), step)
        self._drop_finished(int(self.counts.max()))
        return self._replies()

    def _drop_finished(self, step: int) -> None:
        """Write out the rows that have taken their last step and keep the others."""
        unfinished = self.counts[self.rows] > step
        if unfinished.all():
            return
        done = np.flatnonzero(~unfinished)
        self.ends[self.rows[done]] = torch.cat([self.p, self.buffers], 1)[done]
        distinct = np.unique(self.rows[unfinished], return_index=True)[1]
        self._keep(np.flatnonzero(unfinished)[distinct])

    def _keep(self, which: NDArray[np.int64]) -> None:
        """Keep only some of the rows; a stack that becomes too narrow is padded with copies of the last row."""
        if 0 < len(which) < self.width.least:
            which = np.concatenate([which, which[-1:].repeat(self.width.least - len(which))])
        if len(which) == len(self.rows) and (which == np.arange(len(which))).all():
            return
        self.rows = self.rows[which]
        for slab in self.slabs:
            slab.keep(self.rows)
        for name in ("p", "buffers", "lr", "momentum", "decay", "clip"):
            setattr(self, name, getattr(self, name)[which])
        self.state = [slot[which] for slot in self.state]

    def _gradients(self, step: int) -> Tensor:
        """Return the gradients [rows, P] of this step's losses; record the losses and the new buffers."""
        lengths = self.lengths[self.rows, step]
        if not self.by_length:
            length = self.index.shape[2] if self.exact else int(lengths.max())
            padded = self.exact or int(lengths.min()) < length
            g, self.buffers = self._gradients_of(self.rows, self.p, self.buffers, step, length, padded)
            return g
        g, buffers = torch.empty_like(self.p), torch.empty_like(self.buffers)
        for length in np.unique(lengths).tolist():
            which = np.flatnonzero(lengths == length)
            g[which], buffers[which] = self._gradients_of(
                self.rows[which], self.p[which], self.buffers[which], step, length, False
            )
        self.buffers = buffers
        return g

    def _gradients_of(
        self, rows: NDArray[np.int64], p: Tensor, buffers: Tensor, step: int, length: int, padded: bool
    ) -> tuple[Tensor, Tensor]:
        """Return gradients and new buffers of some rows, whose batches in this step have at most `length` samples."""
        index = self.index[rows, step, :length]
        mask = (index >= 0).to(p.dtype) if padded else None
        index = index.clamp(min=0)
        x, y = self.pool.inputs(index, self.layout.dtype), self.pool.targets(index, self.layout.dtype)
        if self.numbers is not None:
            x = self.augment(x, self.numbers[rows, step, :length])
        if self.chained is not None:
            losses, g = self.chained.gradients(p, x, y, mask)
            self.loss[rows] += losses
            return g, buffers
        leaves = {n: v.detach().requires_grad_() for n, v in self.layout.parameter_views(p).items()}
        loss_inputs: dict[str, Any] = {
            "start": take(self.loss_inputs["start"], rows),
            **{name: taken(self.loss_inputs[name], rows) for name in ("sent", "memory", "local")},
            "drawn": {n: t[rows, step] for n, t in self.drawn.items()},
        }
        with (
            bf16_autocast_vmap(self.precision),
            plain_attention(),
            unchanged(self.rule, "loss", *loss_inputs.values()),
        ):
            losses, after = vmap(self._loss, in_dims=(0, 0, 0, 0, 0 if padded else None, 0))(
                leaves, self.layout.buffer_views(buffers), x, y, mask, loss_inputs
            )
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        self.loss[rows] += losses.detach()
        if after:
            buffers = _flat([after[slot.name].detach() for slot in self.layout.buffers])
        return _flat(grads), buffers

    def _loss(
        self,
        parameters: Tensors,
        buffers: Tensors,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        loss_inputs: dict[str, Any],
    ) -> tuple[Tensor, dict[str, Tensor]]:
        net = self.layout.bind(parameters, buffers)
        return self.rule.loss(net, Batch(x, y, mask, self.user_loss), LossInputs(**loss_inputs)), net.buffers

    def _descend(self, g: Tensor, step: int) -> None:
        """Take one step of the optimizer with every rule's corrections."""
        g = self._by_slab(g, "gradient")
        if self.clips:
            g = g * (self.clip / (norms(g, self.width) + 1e-6)).clamp(max=1.0)
        number, decay = torch.tensor(step + 1, device=self.device), self.decay if self.decays else None
        self.p = self.optimizer.step(self.p, g, self.state, number, self.lr, self.momentum, decay)
        self.p = self._by_slab(self.p, "after")

    def _by_slab(self, rows: Tensor, hook: str) -> Tensor:
        """Run a hook on the rows of each slab that overrides it."""
        overridden = "changes_gradient" if hook == "gradient" else "changes_step"
        if not any(getattr(slab, overridden) for slab in self.slabs):
            return rows
        parts, begin = [], 0
        for slab in self.slabs:
            stop = begin + slab.count
            part, p = rows[begin:stop], self.p[begin:stop]
            if stop > begin and getattr(slab, overridden):
                part = slab.gradient(part, p) if hook == "gradient" else slab.after(p)
            parts.append(part)
            begin = stop
        return torch.cat(parts)

    def _replies(self) -> list[Reply]:
        losses = (self.loss.cpu().numpy() / self.counts).tolist()
        found = replies_of(self.jobs, self.slabs, self.ends, self.counts, losses)
        return [reply for _, reply in sorted(zip(self.order, found, strict=True), key=lambda pair: pair[0])]


def _longer(values: Tensor, steps: int) -> Tensor:
    missing = steps - len(values)
    return torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) if missing else values


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate stacked tensors [R, ...] into rows [R, sum of sizes]."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)
