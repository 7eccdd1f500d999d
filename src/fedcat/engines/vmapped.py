"""Gradients of a replayed step, for any net that can be stacked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedcat.core.precision import bf16_autocast_vmap, plain_attention
from fedcat.data.augment import Augment
from fedcat.data.pool import Pool
from fedcat.engines.rows import Rows
from fedcat.models.layout import Layout, Tensors
from fedcat.models.losses import LossFunction, cross_entropy
from fedcat.protocol.local_rule import Batch, LocalRule, LossInputs, unchanged


class Vmapped:
    """Computes the gradients of the first rows in `order` with one vmapped loss.

    Parameters
    ----------
    layout : Layout
        The net.
    pool : Pool
        The training samples.
    rule : LocalRule
        The rule that defines the loss.
    rows : Rows
        The state of the launch.
    loss_inputs : mapping
        `start`, `sent`, `memory` and `local` of the rows, as passed to the loss.
    drawn : mapping of str to Tensor
        The rule's random draws, [R, S, ...].
    precision : str
        ``fp32``, ``tf32`` or ``bf16``.
    loss : callable
        The loss that the user chose.
    augment, numbers : Augment, Tensor
        Random changes of the inputs, and the random numbers for them, [R, S, B, numbers]; None if there are none.
    """

    def __init__(
        self,
        layout: Layout,
        pool: Pool,
        rule: LocalRule,
        rows: Rows,
        loss_inputs: dict[str, Any],
        drawn: dict[str, Tensor],
        precision: str,
        loss: LossFunction = cross_entropy,
        augment: Augment | None = None,
        numbers: Tensor | None = None,
    ) -> None:
        self.layout, self.pool, self.rule, self.rows = layout, pool, rule, rows
        self.loss_inputs, self.drawn, self.precision, self.loss = loss_inputs, drawn, precision, loss
        self.augment, self.numbers = augment, numbers
        self.losses = torch.zeros(len(rows.p), 1, dtype=rows.p.dtype, device=rows.p.device)

    def gradients(self, ahead: int, width: int) -> None:
        """Compute the gradients of one step for the first `width` rows in `order`."""
        rows = self.rows
        which = rows.order[:width].long()
        steps = rows.pick.shape[1]
        step = (rows.step.long() + ahead).clamp(max=steps - 1)
        index = rows.pick.flatten(0, 1)[which * steps + step].long()
        active = rows.active(ahead)[which]
        mask = (index >= 0).to(rows.p.dtype)
        mask = torch.where(active, mask, 1.0)
        index = index.clamp(min=0)
        x, y = self.pool.inputs(index, self.layout.dtype), self.pool.targets(index, self.layout.dtype)
        if self.augment is not None and self.numbers is not None:
            x = self.augment(x, self.numbers.flatten(0, 1)[which * steps + step])
        leaves = {n: v.detach().requires_grad_() for n, v in self.layout.parameter_views(rows.p[which]).items()}
        buffers = self.layout.buffer_views(rows.buffers[which])
        loss_inputs = {
            "start": self.loss_inputs["start"][which],
            **{name: {n: t[which] for n, t in self.loss_inputs[name].items()} for name in ("sent", "memory", "local")},
            "drawn": {n: t.flatten(0, 1)[which * steps + step] for n, t in self.drawn.items()},
        }
        with (
            torch.enable_grad(),
            bf16_autocast_vmap(self.precision),
            plain_attention(),
            unchanged(self.rule, "loss", *loss_inputs.values()),
        ):
            losses, after = vmap(self._loss)(leaves, buffers, x, y, mask, loss_inputs)
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        rows.g[which] = torch.cat([g.reshape(width, -1).to(rows.g.dtype) for g in grads], 1)
        self.losses[which] += torch.where(active, losses.detach()[:, None].to(self.losses.dtype), 0.0)
        if after:
            new = torch.cat([after[slot.name].detach().reshape(width, -1) for slot in self.layout.buffers], 1)
            rows.buffers[which] = torch.where(active, new, rows.buffers[which])

    def descend(self, ahead: int, width: int) -> None:
        """Take the step."""
        rows = self.rows
        active = rows.active(ahead)
        rows.v.copy_(torch.where(active, rows.v * rows.momentum + (rows.g + rows.decay * rows.p), rows.v))
        rows.p.sub_(torch.where(active, rows.lr * rows.v, 0.0))

    def _loss(
        self, parameters: Tensors, buffers: Tensors, x: Tensor, y: Tensor, mask: Tensor, loss_inputs: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        net = self.layout.bind(parameters, buffers)
        return self.rule.loss(net, Batch(x, y, mask, self.loss), LossInputs(**loss_inputs)), net.buffers
