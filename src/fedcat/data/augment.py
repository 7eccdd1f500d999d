"""Augmentation: random changes of the inputs of a training batch, the same in every engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry, accepts_call, label_of

NUMBERS = 4
"""Random numbers that an augmentation gets for each sample, unless it asks for more."""

SHIFT = 8
"""A crop shifts an image by up to its side divided by this: 4 pixels of 32."""

AugmentFunction = Callable[[Tensor, Tensor], Tensor]
"""(inputs [n, ...], uniform random numbers in 0 .. 1 [n, NUMBERS]) -> inputs of the same shape and type."""


@dataclass(frozen=True)
class Augmentation:
    """One random change.

    Attributes
    ----------
    function : callable
        (inputs [n, ...], uniform random numbers [n, numbers]) -> inputs of the same shape and type. The samples may
        come from several clients, so each must be changed for itself, by PyTorch's operations and by its own random
        numbers alone.
    numbers : int
        Random numbers per sample.
    """

    function: AugmentFunction
    numbers: int = NUMBERS

    @property
    def name(self) -> str:
        """The function's name."""
        return label_of(self.function)


AUGMENTATIONS: Registry[AugmentFunction] = Registry("augment")


@AUGMENTATIONS.register("flip", "mirror images left to right, each with probability 1/2")
def flip(x: Tensor, u: Tensor) -> Tensor:
    """Mirror images with probability 1/2."""
    _check_images("flip", x)
    return torch.where(u[:, 0].view(-1, 1, 1, 1) < 0.5, x.flip(-1), x)


@AUGMENTATIONS.register("crop", f"shift images by up to 1/{SHIFT} of their side; the border is mirrored")
def crop(x: Tensor, u: Tensor) -> Tensor:
    """Shift images by a random whole number of pixels in both directions."""
    _check_images("crop", x)
    for axis in (2, 3):
        side = x.shape[axis]
        most = side // SHIFT
        shift = (u[:, axis - 2] * (2 * most + 1)).long() - most
        place = torch.arange(side, device=x.device) + shift[:, None]
        place = (side - 1) - ((side - 1) - place.abs()).abs()  # mirrored at both ends
        shape = [len(x), 1, 1, 1]
        shape[axis] = side
        x = x.gather(axis, place.view(shape).expand(x.shape))
    return x


def _check_images(name: str, x: Tensor) -> None:
    if x.dim() != 4:
        raise SettingError(f"augment {name!r} needs images [channels, height, width], got shape {tuple(x.shape[1:])}")


@dataclass(frozen=True)
class Augment:
    """Several augmentations, one after another; none leaves inputs as they are."""

    parts: tuple[Augmentation, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.parts)

    @property
    def numbers(self) -> int:
        """Random numbers per sample."""
        return sum(part.numbers for part in self.parts)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        """Return inputs [..., *shape] changed by random numbers [..., numbers]."""
        lead = u.dim() - 1
        flat, numbers = x.flatten(0, lead - 1), u.flatten(0, lead - 1)
        begin = 0
        for part in self.parts:
            flat = part.function(flat, numbers[:, begin : begin + part.numbers])
            begin += part.numbers
        return flat.view(x.shape)


def make_augment(parts: Sequence[Any], sample: Tensor) -> Augment:
    """Return the augmentations of a run, tried on a few inputs."""
    found = tuple(part if isinstance(part, Augmentation) else Augmentation(part) for part in parts)
    for part in found:
        name = label_of(part.function)
        if not callable(part.function) or not accepts_call(part.function, sample, sample):
            raise SettingError(f"augment {name!r} must be a function of (inputs, random numbers)")
        u = torch.linspace(0.1, 0.9, len(sample), device=sample.device)[:, None].expand(-1, part.numbers)
        try:
            changed = part.function(sample, u)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SettingError(
                f"augment {name!r} fails on inputs of shape {tuple(sample.shape)} and random numbers of shape "
                f"{tuple(u.shape)}: {first}; fedcat.Augmentation(function, numbers=N) asks for N numbers per sample"
            ) from error
        if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (sample.shape, sample.dtype):
            got = f"{changed.dtype} of shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
            raise SettingError(
                f"augment {name!r} must return inputs of {sample.dtype} of shape {tuple(sample.shape)}, got {got}"
            )
    return Augment(found)
