"""PyTorch devices: which one to use, and how to make it current."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.text import visible


def find_device(name: str) -> torch.device:
    """Return the device called `name`; ``auto`` is the first GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise SettingError(f"device {name!r} cannot hold data: use auto, cpu, cuda or cuda:0")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SettingError(f"device {name!r} needs CUDA, which is not available here: use cpu or auto")
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        first = visible(str(error).splitlines()[0])
        raise SettingError(f"device {name!r} cannot be used ({first}): use auto, cpu, cuda or cuda:0") from error


def current_device(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which a GPU is the current one: streams, graphs and kernels go there."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def stream_for(work: str, device: torch.device) -> Any:
    """Return the stream of a GPU on which one kind of work runs."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def on_device(values: Sequence[Any], like: Tensor) -> Tensor:
    """Return numbers as a tensor with the type and device of `like`, without waiting for a GPU's work."""
    return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)
