"""Losses per sample."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> one loss per sample."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each sample."""
    return functional.cross_entropy(outputs, targets, reduction="none")
