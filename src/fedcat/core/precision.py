"""How PyTorch computes: in float32, TF32 or bfloat16, and attention as single operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PRECISIONS = ("fp32", "tf32", "bf16")
"""How float32 values may be multiplied: in full, or with at least 10 (tf32) or 7 (bf16) mantissa bits per factor.

The less precise ones are a permission: what is no faster with fewer bits keeps more.
"""


@contextmanager
def precision_context(precision: str = "fp32") -> Iterator[None]:
    """Set the precision of products on a GPU; turn off cuDNN autotuning and nondeterministic cuDNN kernels."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    wanted: list[tuple[Any, str, Any]] = [(cudnn, "benchmark", False), (cudnn, "deterministic", True)]
    less = precision != "fp32"
    if hasattr(cudnn, "conv"):  # PyTorch >= 2.9, where also using the older flags is an error
        wanted += [(part, "fp32_precision", "tf32" if less else "ieee") for part in (cudnn.conv, cudnn.rnn, matmul)]
    else:
        wanted += [(part, "allow_tf32", less) for part in (cudnn, matmul)]
    before = [getattr(part, name) for part, name, _ in wanted]
    for part, name, value in wanted:
        setattr(part, name, value)
    try:
        yield
    finally:
        for (part, name, _), value in zip(wanted, before, strict=True):
            setattr(part, name, value)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Compute attention as single operations, which can be counted and which `torch.vmap` can batch.

    What PyTorch fuses in evaluation mode has no gradient. Fused scaled dot products are batched slowly on a CPU, and
    their gradient fails on a GPU if the batched memory is not aligned.
    """
    mha = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        mha.set_fastpath_enabled(before)


def bf16_autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Return an autocast context for bfloat16; it has no effect unless `precision` is ``bf16``."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
