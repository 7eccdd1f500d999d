"""Gradients of any net that can be stacked: one vmapped loss, and autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from fedcat.core.precision import plain_attention
from fedcat.engines.gradients.base import Found, Gradients, Inputs, Step, no_inputs
from fedcat.models.batch_norm import masked_batch_norm
from fedcat.models.layout import Tensors
from fedcat.models.recurrent import unrolled_recurrence
from fedcat.models.traits import Traits, traits
from fedcat.protocol.local_rule import Batch, LossInputs, unchanged


class VmapGradients(Gradients):
    """The loss of all rows under `torch.vmap`.

    Batch normalization leaves out padded samples, and recurrent layers are computed step by step.
    """

    name = "torch.vmap"

    def of(self, step: Step) -> Found:
        """Return losses, gradients and new buffers."""
        layout, rule, mask = self.layout, self.rule, step.mask()
        x, y = step.samples(self.pool, layout.dtype)
        leaves = {n: v.detach().requires_grad_() for n, v in layout.parameter_views(step.p).items()}
        inputs = step.inputs or no_inputs(step.p)
        with (
            torch.enable_grad(),
            plain_attention(),
            unchanged(rule, "loss", *inputs.values()),
        ):
            loss = partial(self._loss, traits(layout, self.pool))
            losses, after = vmap(loss, in_dims=(0, 0, 0, 0, None if mask is None else 0, 0))(
                leaves, layout.buffer_views(step.buffers), x, y, mask, inputs
            )
        grads = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        buffers = _flat([after[slot.name].detach() for slot in layout.buffers]) if after else step.buffers
        return losses.detach(), _flat(grads), buffers

    def _loss(
        self,
        found: Traits,
        parameters: Tensors,
        buffers: Tensors,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        inputs: Inputs,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return one row's loss and buffers, in contexts that its net needs: each makes every operation slower."""
        net = self.layout.bind(parameters, buffers)
        with masked_batch_norm(mask if found.batch_norm else None), self._kernels(found):
            return self.rule.loss(net, Batch(x, y, mask, self.loss), LossInputs(**inputs)), net.buffers

    def _kernels(self, found: Traits) -> AbstractContextManager[Any]:
        """Return a context in which layers are computed: by PyTorch alone."""
        return unrolled_recurrence() if found.recurrent else nullcontext()


class VmapTritonGradients(VmapGradients):
    """The same with 2D convolutions and LSTMs in Triton kernels."""

    name = "torch.vmap with Triton kernels"

    @contextmanager
    def _kernels(self, found: Traits) -> Iterator[None]:
        from fedcat.engines.gradients.triton.conv2d import fast_conv2d
        from fedcat.engines.gradients.triton.lstm import fast_lstm

        with fast_conv2d(self.precision), fast_lstm(self.precision):
            yield


def _flat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate stacked tensors [R, ...] into rows [R, sum of sizes]."""
    return torch.cat([part.reshape(len(part), -1) for part in parts], 1)
