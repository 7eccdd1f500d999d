"""Losses: functions of a net's outputs and the targets that return one loss per sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry, label_of

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(outputs [n, ...], targets [n, ...]) -> one loss per sample, [n]."""

LOSSES: Registry[LossFunction] = Registry("loss")

SMOOTHING = 0.1
"""The probability that label smoothing spreads over all classes."""


@LOSSES.register("cross-entropy", "for class labels, the default; for sequences of tokens the mean over their places")
def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each sample."""
    if targets.dim() == 1 and outputs.dim() == 2:  # PyTorch's bits, with half the kernels under vmap
        return -functional.log_softmax(outputs, 1).gather(1, targets[:, None])[:, 0]
    return _cross_entropy(outputs, targets)


@LOSSES.register("label-smoothing", f"cross entropy with {SMOOTHING:g} of the probability spread over all classes")
def label_smoothing(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each sample with smoothed labels."""
    return _cross_entropy(outputs, targets, label_smoothing=SMOOTHING)


@LOSSES.register("mse", "for values: the mean squared error over the outputs of a sample")
def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of each sample."""
    return _by_sample(functional.mse_loss, outputs, targets)


@LOSSES.register("huber", "for values with outliers: squared below an error of 1, linear above")
def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the Huber loss of each sample."""
    return _by_sample(functional.huber_loss, outputs, targets)


@LOSSES.register("bce", "for several labels per sample: the binary cross entropy of logits and values in 0 .. 1")
def bce(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean binary cross entropy of each sample."""
    return _by_sample(functional.binary_cross_entropy_with_logits, outputs, targets)


def _cross_entropy(outputs: Tensor, targets: Tensor, **options: Any) -> Tensor:
    found = functional.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none", **options)
    return found if found.dim() == 1 else found.flatten(1).mean(1)


def _by_sample(function: Callable[..., Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of an elementwise loss for each sample; outputs [n, 1] fit targets [n]."""
    found = function(outputs, targets.to(outputs.dtype).reshape(outputs.shape), reduction="none")
    return found if found.dim() == 1 else found.flatten(1).mean(1)


def check_loss_shape(loss: LossFunction, outputs: Tensor, targets: Tensor) -> None:
    """Raise a `SettingError` unless a loss returns one number for each of a few samples."""
    name, samples = label_of(loss), len(outputs)
    outputs = outputs.detach().requires_grad_()
    try:
        found = loss(outputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        labels = targets.dim() == 1 and not targets.is_floating_point()
        hint = "; they are class labels: values are floating-point numbers, or several per sample" if labels else ""
        raise SettingError(
            f"loss {name!r} does not take outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)} and type {targets.dtype}: {first}{hint}"
        ) from error
    if not isinstance(found, Tensor) or found.shape != (samples,):
        got = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise SettingError(
            f"loss {name!r} must return one loss per sample, shape ({samples},) for {samples} samples, got {got}: "
            f"the outputs have shape {tuple(outputs.shape)}, the targets {tuple(targets.shape)}"
        )
    if not found.requires_grad:
        raise SettingError(f"loss {name!r} has no gradient: compute it from the outputs by PyTorch's operations")
