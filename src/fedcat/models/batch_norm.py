"""Batch normalization of padded batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


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
        rest = [1] * (x.dim() - 2)
        over = [0, *range(2, x.dim())]
        real = self.mask.to(x.dtype).view(-1, 1, *rest)
        count = self.mask.to(x.dtype).sum() * (x[0, 0].numel())
        mean = (x * real).sum(over) / count
        apart = x - mean.view(1, -1, *rest)
        variance = (apart.square() * real).sum(over) / count
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                running_mean.mul_(1 - momentum).add_(momentum * mean.detach())
                running_var.mul_(1 - momentum).add_(momentum * variance.detach() * (count / (count - 1)))
        out = apart * torch.rsqrt(variance + eps).view(1, -1, *rest)
        if weight is not None:
            out = out * weight.view(1, -1, *rest)
        return out if bias is None else out + bias.view(1, -1, *rest)
