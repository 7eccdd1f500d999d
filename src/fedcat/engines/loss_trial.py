"""Whether a rule's own loss can be trained in a stack, tested once on a client's first batch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import vmap

from fedcat.core.errors import SettingError
from fedcat.core.precision import plain_attention, precision_context
from fedcat.engines.base import Job
from fedcat.engines.batch_order import batches, drawn_by
from fedcat.models.layout import Tensors
from fedcat.protocol.local_rule import Batch, LossInputs

EXTRA = 3
"""Padded places in the trial."""
LIMIT = 1e-3
"""Largest difference of the padded batch's loss and gradient, relative to their norms. Without a mask it is about the
fraction of padded places."""


def check_loss(job: Job) -> None:
    """Raise an error if `torch.vmap` cannot run the loss of a job's rule, or if padding changes it.

    The loss of samples of the client's first batch, and its gradient, must be the same if they are padded with others.
    Nets that mix samples are not tested: their batches are never padded.
    """
    task, hop = job
    name, layout, pool = type(task.rule).__name__, task.layout, task.pool
    index, lengths = batches(task, hop)
    extra = min(EXTRA, task.padding - 1)
    real = torch.from_numpy(index[0, : min(lengths[0], task.padding - extra)]).to(pool.y.device)
    others = torch.linspace(0, len(pool) - 1, extra, device=real.device).long()
    mask = torch.cat([torch.ones(len(real)), torch.zeros(extra)]).to(hop.start)
    row, size = hop.start, layout.parameter_size
    drawn = {n: t[0].to(row.device) for n, t in drawn_by(job, len(index)).items()}
    inputs = {"sent": hop.sent, "memory": hop.memory, "local": local_of(job), "drawn": drawn}

    def loss(parameters: Tensor, buffers: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, rest: object) -> Tensor:
        net = layout.bind(layout.parameter_views(parameters), layout.buffer_views(buffers))
        found = task.rule.loss(net, Batch(x, y, mask), LossInputs(row[:size], **rest))  # type: ignore[arg-type]
        if found.shape != ():
            raise SettingError(
                f"{name}.loss must return a scalar, got shape {tuple(found.shape)}: average one loss per sample with "
                "batch.mean"
            )
        return found

    found = []
    layout.net.train()
    with precision_context(), plain_attention(layout.device):
        for where, known in ((real, None), (torch.cat([real, others]), mask)):
            leaf = row[:size].clone()[None].requires_grad_()
            batch = pool.inputs(where, layout.dtype)[None], pool.y[where][None]
            rest = {n: {k: t[None] for k, t in one.items()} for n, one in inputs.items()}
            dims = (0, 0, 0, 0, None if known is None else 0, 0)
            try:
                losses = vmap(loss, in_dims=dims)(
                    leaf, row[None, size:], *batch, None if known is None else known[None], rest
                )
            except SettingError:
                raise
            except Exception as error:  # any error from the user's loss is the reason
                reason = str(error).strip().splitlines()[0]
                raise SettingError(
                    f"{name}.loss cannot run for several clients at once under torch.vmap: {reason}; "
                    'avoid branches on values and random numbers, or set engine="sequential"'
                ) from error
            (slope,) = torch.autograd.grad(losses.sum(), leaf, allow_unused=True, materialize_grads=True)
            found.append((losses.detach(), slope))
    for plain, padded in zip(*found, strict=True):
        distance = torch.linalg.vector_norm(padded - plain)
        if distance > LIMIT * torch.linalg.vector_norm(plain):
            raise SettingError(
                f"{name}.loss changes if its batch is padded: batches of several clients are padded to one length, and "
                "padded places must not count; average one loss per sample with batch.mean(losses), which leaves them "
                'out, or set engine="sequential"'
            )


def local_of(job: Job) -> Tensors:
    """Return what a job's rule needs to know about the client's own data."""
    task, hop = job
    return {n: t.to(hop.start.device) for n, t in task.rule.local(task, hop.client).items()}
