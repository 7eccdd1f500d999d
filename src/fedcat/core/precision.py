"""How PyTorch computes: in float32, TF32 or bfloat16, and attention as single operations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

PRECISIONS = ("fp32", "tf32", "bf16")
"""How float32 values are multiplied: in full precision, or with 10 (tf32) or 7 (bf16) mantissa bits per factor."""


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


def bf16_autocast_vmap(precision: str) -> AbstractContextManager[Any]:
    """Return the equivalent of `bf16_autocast` under `torch.vmap`, which hides convolutions from autocast."""
    return _Bfloat16() if precision == "bf16" else nullcontext()


_LOWERED = {
    *(getattr(functional, f"conv{kind}{n}d") for kind in ("", "_transpose") for n in (1, 2, 3)),
    *(functional.linear, functional.bilinear, functional.scaled_dot_product_attention),
    *(torch.matmul, torch.mm, torch.bmm, torch.mv, torch.addmm, torch.baddbmm, torch.einsum),
    *(torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.bmm, torch.Tensor.mv, torch.Tensor.__matmul__),
}
_RAISED = {
    *(functional.cross_entropy, functional.nll_loss, functional.mse_loss, functional.kl_div),
    *(functional.softmax, functional.log_softmax, torch.softmax, torch.log_softmax, torch.logsumexp),
    *(functional.batch_norm, functional.layer_norm, functional.group_norm, functional.instance_norm),
    *(functional.local_response_norm, functional.normalize),
    *(getattr(of, name) for of in (torch, torch.Tensor) for name in ("exp", "log", "pow", "sum", "mean", "norm")),
    *(getattr(torch.Tensor, name) for name in ("softmax", "log_softmax", "logsumexp", "__pow__", "__rpow__")),
}


class _Bfloat16(TorchFunctionMode):
    """Runs products in bfloat16; runs reductions, powers, normalizations and losses in float32.

    Any other operation on inputs of both types runs in float32, unless it writes in place.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (args, kwargs or {})
        if func in _LOWERED:
            given = _cast(given, torch.float32, torch.bfloat16)
        elif func in _RAISED or (not _in_place(func) and {_kind(t) for t in tree_leaves(given)} >= _KINDS):
            given = _cast(given, torch.bfloat16, torch.float32)
        args, words = given
        return func(*args, **words)


_KINDS = {torch.float32, torch.bfloat16}


def _kind(value: Any) -> torch.dtype | None:
    return value.dtype if isinstance(value, torch.Tensor) else None


def _in_place(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__set__"


def _cast(given: Any, of: torch.dtype, to: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(to) if t.dtype == of else t, given)
