"""Batch normalization of padded batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedcat.core.errors import SettingError


def masked_batch_norm(mask: Tensor | None) -> AbstractContextManager[Any]:
    """Leave out padded samples of a batch, where `mask` [B] is 0, in the statistics of `functional.batch_norm`."""
    return nullcontext() if mask is None else _Masked(mask)


class _Masked(TorchFunctionMode):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.batch_norm:
            return self._batch_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _batch_norm(
        self,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Return (x - mean) / sqrt(var + eps) * weight + bias by the statistics of the real samples."""
        if not training:
            return functional.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)
        weight = x.new_ones(x.shape[1]) if weight is None else weight
        bias = x.new_zeros(x.shape[1]) if bias is None else bias
        real = self._real(len(x)).to(x.dtype)
        out, mean, variance = _MaskedBatchNorm.apply(x, weight, bias, real, eps)  # type: ignore[no-untyped-call]
        if running_mean is not None and running_var is not None:
            count = real.sum() * x[0, 0].numel()
            running_mean.mul_(1 - momentum).add_(momentum * mean)
            running_var.mul_(1 - momentum).add_(momentum * variance * (count / (count - 1)))
        found: Tensor = out
        return found

    def _real(self, samples: int) -> Tensor:
        """Return which of a net's inputs are real samples: the batch, or several versions of it one after another."""
        versions, rest = divmod(samples, len(self.mask))
        if rest:
            raise SettingError(
                f"a loss gave {samples} samples to a net with BatchNorm, but a batch has {len(self.mask)}: batches of "
                "several clients are padded to one length, and BatchNorm must leave out padded samples; give the net "
                'the batch, or several versions of it joined by torch.cat, or set engine="sequential"'
            )
        return self.mask if versions == 1 else self.mask.repeat(versions)


class _MaskedBatchNorm(Function):
    """y = z * weight + bias with z = (x - mean) / sqrt(var + eps), mean and variance over the real samples.

    Their share in a gradient is s_b = mask_b / (real values per channel), hence
    dx = weight / sqrt(var + eps) * (dy - s * sum(dy) - s * z * sum(dy * z)).

    A GPU waits for memory here, so values are read and written as few times as possible: dx is a sum of dy, x and a
    constant, with one factor each per sample and channel.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, real: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        inner = _inner(x)
        share = real / (real.sum() * inner.shape[2])
        mean = share @ inner.sum(2)
        apart = inner - mean[:, None]
        variance = share @ torch.linalg.vector_norm(apart, dim=2).square()
        scale = weight * torch.rsqrt(variance + eps)
        return torch.addcmul(bias[:, None], apart, scale[:, None]).view(x.shape), mean, variance

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _, real, eps = inputs
        _, mean, variance = output
        ctx.mark_non_differentiable(mean, variance)
        ctx.save_for_backward(x, weight, real, mean, variance)
        ctx.eps = eps

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *rest: Any) -> Any:
        x, weight, real, mean, variance = ctx.saved_tensors
        shape, x, dy = x.shape, _inner(x), _inner(dy)
        inverse = torch.rsqrt(variance + ctx.eps)
        summed = dy.sum((0, 2))
        along = ((dy * x).sum((0, 2)) - mean * summed) * inverse
        share = (real / (real.sum() * x.shape[2]))[:, None]
        scale, slope = weight * inverse, along * inverse
        constant, by_x = -scale * share * (summed - mean * slope), -scale * share * slope
        dx = torch.addcmul(torch.addcmul(constant[:, :, None], x, by_x[:, :, None]), dy, scale[:, None])
        return dx.view(shape), along, summed, None, None


def _inner(x: Tensor) -> Tensor:
    """Return [B, C, ...] as [B, C, values]."""
    return x[:, :, None] if x.dim() == 2 else x.flatten(2)
