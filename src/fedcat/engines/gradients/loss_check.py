"""Whether a loss can be trained in a stack, tested once on a client's first samples."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedcat.core.errors import SettingError
from fedcat.core.precision import plain_attention, precision_context
from fedcat.core.registry import label_of
from fedcat.engines.base import Job
from fedcat.engines.batch_order import batches, drawn_by, local_of
from fedcat.models.batch_norm import masked_batch_norm
from fedcat.models.layout import Layout, Tensors
from fedcat.models.recurrent import unrolled_recurrence
from fedcat.models.traits import traits
from fedcat.protocol.local_rule import Batch, LossInputs

EXTRA = 3
"""Padded places in the trial."""
LIMITS = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Largest difference of the padded batch's loss and gradient, relative to their norms. The trial runs in float64, where
rounding cannot be mistaken for padding, unless the net or the loss needs its own precision."""


def check_loss(job: Job) -> None:
    """Raise an error if `torch.vmap` cannot run the loss of a job's rule, or if padding changes it.

    The loss of samples of the client's first batch, and its gradient, must be the same if they are padded with others.
    """
    trial = _Trial(job)
    with precision_context(), plain_attention():
        trial.check_alone()
        try:
            differs = trial.differs(torch.float64)
        except Exception:  # whatever does not work in float64
            differs = trial.differs(job[0].layout.dtype)
        trial.check_stacked()
    if differs:
        raise SettingError(
            f"{trial.name} changes if its batch is padded: batches of several clients are padded to one length, "
            "and padded places must not count; average one loss per sample with batch.mean(losses), which leaves them "
            'out, and do not mix samples; or set engine="sequential"'
        )


class _Trial:
    """A rule's loss on a few samples of a client, plain and padded with samples of others."""

    def __init__(self, job: Job) -> None:
        self.task, self.hop = job
        rule = self.task.rule
        self.name = f"{type(rule).__name__}.loss" if rule.own_loss else f"loss {label_of(self.task.loss)!r}"
        index, lengths = batches(*job)
        least = 2 if self.task.join_lone else 1  # a net with BatchNorm cannot train on one sample
        pool, extra = self.task.pool, min(EXTRA, self.task.padding - least)
        self.real = torch.from_numpy(index[0, : min(lengths[0], self.task.padding - extra)]).to(pool.y.device)
        others = torch.linspace(0, len(pool) - 1, extra, device=self.real.device).long()
        self.padded = torch.cat([self.real, others])
        drawn = {n: t[0].to(self.hop.start.device) for n, t in drawn_by(job, len(index)).items()}
        self.rest = {"sent": self.hop.sent, "memory": self.hop.memory, "local": local_of(job), "drawn": drawn}

    def check_alone(self) -> None:
        """Raise an error unless the loss is a scalar; errors of the loss itself are raised as they are."""
        found = self._loss(self.task.layout, self.hop.start, self.real, self.rest)
        if not isinstance(found, Tensor) or found.shape != ():
            got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise SettingError(
                f"{self.name} must return a scalar, got {got}: average one loss per sample with batch.mean"
            )

    def differs(self, dtype: torch.dtype) -> bool:
        """Return whether the loss or its gradient differs between the plain and the padded samples."""
        own = self.task.layout
        layout = own if dtype == own.dtype else Layout(deepcopy(own.net).to(dtype))
        rest = {name: {n: _as(t, dtype) for n, t in one.items()} for name, one in self.rest.items()}
        found = []
        for where in (self.real, self.padded):
            row = self.hop.start.to(dtype).clone().requires_grad_()
            loss = self._loss(layout, row, where, rest)
            (slope,) = torch.autograd.grad(loss, row, materialize_grads=True)
            found.append((loss.detach(), slope))
        norm = torch.linalg.vector_norm
        return any(bool(norm(b - a) > LIMITS[dtype] * norm(a)) for a, b in zip(*found, strict=True))

    def check_stacked(self) -> None:
        """Raise an error if `torch.vmap` cannot run the loss, or if that has no gradient."""
        layout, row = self.task.layout, self.hop.start[None].clone().requires_grad_()

        def loss(row: Tensor, where: Tensor, rest: dict[str, Tensors]) -> Tensor:
            return self._loss(layout, row, where, rest)

        rest: dict[str, Tensors] = {name: {n: t[None] for n, t in one.items()} for name, one in self.rest.items()}
        try:
            with unrolled_recurrence():
                found = vmap(loss)(row, self.padded[None], rest)
            torch.autograd.grad(found.sum(), row, materialize_grads=True)
        except Exception as error:  # any error from the user's loss is the reason
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SettingError(
                f"{self.name} cannot run for several clients at once under torch.vmap: {reason}; avoid branches "
                'on values and random numbers, or set engine="sequential"'
            ) from error

    def _loss(self, layout: Layout, row: Tensor, where: Tensor, rest: dict[str, Any]) -> Tensor:
        layout.net.train()
        size, pool = layout.parameter_size, self.task.pool
        net = layout.bind(layout.parameter_views(row[:size]), layout.buffer_views(row[size:].detach()))
        mask = (torch.arange(len(where), device=where.device) < len(self.real)).to(layout.dtype)
        x, y = pool.inputs(where, layout.dtype), pool.targets(where, layout.dtype)
        padded = mask if len(where) > len(self.real) else None
        batch = Batch(x, y, padded, self.task.loss)
        with masked_batch_norm(padded if traits(self.task.layout, pool).batch_norm else None):
            return self.task.rule.loss(net, batch, LossInputs(row[:size].detach(), **rest))


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor
