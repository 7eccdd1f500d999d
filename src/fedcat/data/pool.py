"""Samples in memory, in their published format, and the conversion of a batch to a net's input."""

from __future__ import annotations

import hashlib
import math
import numbers
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from torch import Tensor

from fedcat.core.errors import SettingError


@dataclass(frozen=True)
class Normalize:
    """Turns stored values into inputs: (x / scale - mean) / std, per channel if there are several constants."""

    scale: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not _is_number(self.scale) or self.scale == 0:
            raise SettingError(f"scale must be a number other than 0, got {self.scale!r}")
        for name in ("mean", "std"):
            given = getattr(self, name)
            values = np.atleast_1d(np.asarray(given, dtype=object)).tolist()
            if not values or not all(map(_is_number, values)) or (name == "std" and 0 in values):
                right = "numbers, none of them 0" if name == "std" else "numbers"
                raise SettingError(f"{name} must be a list of {right}, got {values}")
            object.__setattr__(self, name, tuple(map(float, values)))

    def check_channels(self, channels: int) -> None:
        """Raise a `SettingError` unless mean and std each have one value, or one value per channel."""
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) not in (1, channels):
                right = "one number" if channels == 1 else f"one number or {channels}"
                raise SettingError(f"{name} must be {right} for inputs of {channels} channels, got {list(values)}")

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the batch `x` [batch, channels, ...] normalized, as `dtype`."""
        mean, std = _constants(self.mean, self.std, x.dim(), dtype, x.device)
        return x.to(dtype, copy=True).div_(self.scale).sub_(mean).div_(std)


@cache
def _constants(
    mean: tuple[float, ...], std: tuple[float, ...], dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the constants on `device`; cached, since a replayed step (CUDA graph) must not copy them."""
    shape = (1, -1, *(1 for _ in range(dim - 2)))
    mean_there, std_there = (torch.tensor(v, dtype=dtype, device=device).view(shape) for v in (mean, std))
    return mean_there, std_there


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


class Pool:
    """Inputs and labels of a dataset's training or test set.

    Parameters
    ----------
    x : array_like
        Inputs [samples, ...]. Bytes stay bytes until a batch is taken.
    y : array_like
        Class labels [samples], integers from 0.
    normalize : Normalize, optional
        How stored values become inputs. By default bytes are divided by 255; floating-point values and other integers
        (tokens) are left unchanged.
    """

    def __init__(self, x: object, y: object, normalize: Normalize | None = None) -> None:
        self.x = _tensor("x", x).contiguous()
        if self.x.is_floating_point() and not torch.isfinite(self.x).all():
            raise SettingError("x must hold finite numbers, got NaN or infinity")
        labels = _tensor("y", y)
        if labels.is_floating_point() and not torch.equal(labels, labels.round()):
            raise SettingError("y must hold integer class labels, got fractions")
        self.y = labels.to(torch.int64)
        if self.y.dim() != 1 or len(self.x) != len(self.y):
            raise SettingError(
                f"y must hold one class label for each of the {len(self.x)} samples of x, "
                f"got shape {tuple(self.y.shape)}"
            )
        if len(self.y) == 0:
            raise SettingError("x must hold at least one sample, got none")
        if int(self.y.min()) < 0:
            raise SettingError(f"y must hold class labels >= 0, got {int(self.y.min())}")
        if normalize is None and self.x.dtype == torch.uint8:
            normalize = Normalize()
        if normalize is not None and self.x.dim() > 1:
            normalize.check_channels(self.x.shape[1])
        self.normalize = normalize
        self._moved: dict[torch.device, Pool] = {}

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def kind(self) -> str:
        """The type of the stored inputs: bytes, floating-point numbers or integers."""
        if self.x.is_floating_point():
            return "floating-point numbers"
        return "bytes" if self.x.dtype == torch.uint8 else "integers"

    def to(self, device: torch.device) -> Pool:
        """Return this pool on `device`; always the same object, so that runs share it."""
        if self.x.device == device:
            return self
        if device not in self._moved:
            self._moved[device] = Pool(self.x.to(device), self.y.to(device), self.normalize)
        return self._moved[device]

    def inputs(self, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Return the net's inputs at `index`: positions in a tensor of any shape, or a slice."""
        x = self.x[index]
        if self.normalize is None:
            return x.to(dtype) if x.is_floating_point() else x
        lead = x.shape[: x.dim() - len(self.shape)]
        return self.normalize(x.reshape(-1, *self.shape), dtype).view(*lead, *self.shape)

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the stored inputs and labels."""
        digest = hashlib.sha256()
        for part in (self.x, self.y):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(np.ascontiguousarray(part.cpu().numpy()).data)
        return digest.hexdigest()


def _tensor(name: str, values: object) -> Tensor:
    if isinstance(values, Tensor):
        return values.detach()
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise SettingError(f"{name} must be one array, got parts of different shapes") from error
    if array.dtype.kind not in "biuf":
        raise SettingError(f"{name} must hold numbers, got an array of {array.dtype}")
    return torch.from_numpy(np.array(array))
