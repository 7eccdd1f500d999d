"""Samples in memory, in their published format, and the conversion of a batch to a net's input."""

from __future__ import annotations

import hashlib
import math
import numbers
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count

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


_ids = count()


class Pool:
    """Inputs and targets of a dataset's training or test set.

    Parameters
    ----------
    x : array_like
        Inputs [samples, ...]. Bytes stay bytes until a batch is taken.
    y : array_like
        The targets. Integers [samples] are class labels, from 0. Anything else are values: floating-point numbers, or
        several numbers per sample [samples, ...].
    normalize : Normalize, optional
        How stored values become inputs. By default bytes are divided by 255, floating-point values are used as they
        are, and other integers (tokens) become int64.

    Attributes
    ----------
    id : int
        Tells pools apart: they are numbered as they are made, so a process that makes the same ones numbers them alike.
    """

    def __init__(self, x: object, y: object, normalize: Normalize | None = None) -> None:
        self.x = _tensor("x", x).contiguous()
        if self.x.is_floating_point() and not torch.isfinite(self.x).all():
            raise SettingError("x must hold finite numbers, got NaN or infinity")
        targets = _tensor("y", y)
        self.y = targets if targets.is_floating_point() else targets.to(torch.int64)
        if self.y.dim() == 0 or len(self.x) != len(self.y):
            raise SettingError(
                f"y must hold one target for each of the {len(self.x)} samples of x, got shape {tuple(self.y.shape)}"
            )
        if len(self.y) == 0:
            raise SettingError("x must hold at least one sample, got none")
        if self.has_labels and int(self.y.min()) < 0:
            raise SettingError(
                f"y must hold class labels >= 0, got {int(self.y.min())}: integers are labels, values are floats"
            )
        if self.y.is_floating_point() and not torch.isfinite(self.y).all():
            raise SettingError("y must hold finite numbers, got NaN or infinity")
        if normalize is None and self.x.dtype == torch.uint8:
            normalize = Normalize()
        if normalize is not None and self.x.dim() > 1:
            normalize.check_channels(self.x.shape[1])
        self.normalize = normalize
        self.id = next(_ids)
        self._moved: dict[torch.device, Pool] = {}

    def __len__(self) -> int:
        return len(self.y)

    @property
    def has_labels(self) -> bool:
        """Whether the targets are class labels: one integer per sample."""
        return self.y.dim() == 1 and not self.y.is_floating_point()

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
            return x.to(dtype) if x.is_floating_point() else x.long()
        lead = x.shape[: x.dim() - len(self.shape)]
        return self.normalize(x.reshape(-1, *self.shape), dtype).view(*lead, *self.shape)

    def targets(self, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Return the targets at `index`; floating-point values as `dtype`."""
        y = self.y[index]
        return y.to(dtype) if y.is_floating_point() else y

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the stored inputs and targets."""
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
