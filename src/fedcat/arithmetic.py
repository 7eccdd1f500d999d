"""Where numbers are computed, and how on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from fedcat.errors import SettingError


@contextmanager
def arithmetic() -> Iterator[None]:
    """Within this float32 is float32 (no TF32), and no kernel is tuned by timing or may vary from run to run."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn = torch.backends.cudnn
    wanted: list[tuple[Any, str, Any]] = [(cudnn, "benchmark", False), (cudnn, "deterministic", True)]
    if hasattr(cudnn, "conv"):  # PyTorch 2.9 and later; mixing it with the older switches is an error there
        wanted += [(part, "fp32_precision", "ieee") for part in (cudnn.conv, torch.backends.cuda.matmul)]
    else:
        wanted += [(part, "allow_tf32", False) for part in (cudnn, torch.backends.cuda.matmul)]
    before = [getattr(part, name) for part, name, _ in wanted]
    for part, name, value in wanted:
        setattr(part, name, value)
    try:
        yield
    finally:
        for (part, name, _), value in zip(wanted, before, strict=True):
            setattr(part, name, value)


def find_device(name: str) -> torch.device:
    """Return the device called `name`; ``auto`` is the first GPU where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise SettingError(f"device {name!r} holds no numbers: use auto, cpu, cuda or cuda:0")
        if device.type == "cuda" and not torch.cuda.is_available():
            raise SettingError(f"device {name!r} needs CUDA, which this machine or this PyTorch lacks: use cpu or auto")
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        first = str(error).splitlines()[0]
        raise SettingError(f"device {name!r} cannot be used ({first}): use auto, cpu, cuda or cuda:0") from error
