"""Properties of a net, found by running it on a few samples."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from fedcat.core.precision import plain_attention, precision_context
from fedcat.data.pool import Pool
from fedcat.models.batch_norm import masked_batch_norm
from fedcat.models.layout import Layout, Tensors
from fedcat.models.recurrent import RECURRENT, unrolled_recurrence


@dataclass(frozen=True)
class Traits:
    """Properties of a net.

    Attributes
    ----------
    unstackable : str
        Why several copies of the net cannot train as one stack; empty if they can.
    mixes_samples : bool
        Whether one sample of a batch affects what the net computes for the others, as in batch normalization.
    refuses_one : bool
        Whether the net cannot train on a batch of one sample.
    flops : float
        Floating-point operations of a forward pass, per sample.
    channels_last : bool
        Whether the net gives the same results if images and convolution weights are channels last in memory.
    batch_norm, recurrent : bool
        Whether the net calls `functional.batch_norm`, and whether it calls any of `RECURRENT`.
    """

    unstackable: str
    mixes_samples: bool
    refuses_one: bool
    flops: float
    channels_last: bool
    batch_norm: bool
    recurrent: bool


EXTRA = 2
"""Padded places in the trial of a stack."""


def traits(layout: Layout, pool: Pool) -> Traits:
    """Return a net's traits, found once per layout and kind of samples on the first ones of `pool`."""
    return layout.once(("traits", pool.shape, pool.x.dtype), lambda: _examine(layout, pool))


def _examine(layout: Layout, pool: Pool) -> Traits:
    """Test a copy of the net, if possible in float64, where rounding cannot be mistaken for a difference."""
    few = torch.arange(min(4, len(pool)), device=pool.x.device)
    try:
        wide = Layout(deepcopy(layout.net).to(torch.float64))
        return _tried(wide, pool.inputs(few, wide.dtype))
    except Exception:  # the net may require its own precision; a real error is raised again below
        return _tried(Layout(deepcopy(layout.net)), pool.inputs(few, layout.dtype))


def _tried(layout: Layout, x: Tensor) -> Traits:
    row = layout.pack(layout.net)
    gpus = [row.device] if row.device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.no_grad(), precision_context():
        torch.manual_seed(0)
        mixes = _mixes_samples(layout, row, x)
        refuses = _refuses_one(layout, row, x)
        flops = _flops(layout, row, x)
        last, called = _takes_channels_last(layout, row, x), _called(layout, row, x)
        batch_norm, recurrent = functional.batch_norm in called, not RECURRENT.isdisjoint(called)
        return Traits(_unstackable(layout, row, x), mixes, refuses, flops, last, batch_norm, recurrent)


def _flops(layout: Layout, row: Tensor, x: Tensor) -> float:
    """Return the operations of a forward pass per sample, all as matrix products, which can be counted."""
    layout.net.eval()
    with plain_attention(), unrolled_recurrence(), FlopCounterMode(display=False) as counter:
        _forward(layout, row, x)
    return float(counter.get_total_flops()) / len(x)


def _called(layout: Layout, row: Tensor, x: Tensor) -> set[Any]:
    """Return the functions of PyTorch that the net calls in training."""
    layout.net.train()
    calls = _Calls()
    with calls:
        _forward(layout, row, x)
    return calls.functions


class _Calls(TorchFunctionMode):
    """Records which functions are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[Any] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.functions.add(func)
        return func(*args, **(kwargs or {}))


def _forward(layout: Layout, row: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    size = layout.parameter_size
    net = layout.bind(layout.parameter_views(row[:size]), layout.buffer_views(row[size:]))
    return net.logits(x), net.buffers


def _same(a: Tensor, b: Tensor) -> bool:
    limit = 1e-9 if a.dtype == torch.float64 else 1e-3
    distance = torch.linalg.vector_norm(torch.nan_to_num(a) - torch.nan_to_num(b))
    return bool(distance <= limit * (1 + torch.linalg.vector_norm(torch.nan_to_num(b))))


def _mixes_samples(layout: Layout, row: Tensor, x: Tensor) -> bool:
    """Return whether leaving out samples changes the outputs for the others, or the buffers."""
    if len(x) < 4:
        return bool(layout.buffers)
    layout.net.train()
    torch.manual_seed(0)
    whole, buffers = _forward(layout, row, x)
    torch.manual_seed(0)
    half, half_buffers = _forward(layout, row, x[:2])
    moved = any(not _same(buffers[n], half_buffers[n]) for n in buffers)
    return moved or not _same(whole[:2], half)


def _refuses_one(layout: Layout, row: Tensor, x: Tensor) -> bool:
    layout.net.train()
    try:
        _forward(layout, row, x[:1])
    except (RuntimeError, ValueError):
        return True
    return False


def channels_last(values: Tensor) -> Tensor:
    """Return a tensor of images or convolution weights in channels-last memory format."""
    if values.shape[1] == 1:  # both formats have the same order, but only these strides mark it as channels last
        return values.as_strided(values.shape, (values.stride(0), 1, values.stride(2), values.stride(3)))
    return values.contiguous(memory_format=torch.channels_last)


def convolved(layout: Layout) -> list[str]:
    """Return the names of the weights of the net's 2D convolutions."""
    return [f"{name}.weight".removeprefix(".") for name, m in layout.net.named_modules() if type(m) is nn.Conv2d]


def _takes_channels_last(layout: Layout, row: Tensor, x: Tensor) -> bool:
    """Return whether channels-last inputs and weights give the same results: a net may depend on the memory format."""
    names = set(convolved(layout))
    if x.dim() != 4 or not x.is_floating_point() or not names:
        return False
    layout.net.train()
    found = []
    try:
        for last in (False, True):
            torch.manual_seed(0)
            found.append(_results(layout, row[None], channels_last(x) if last else x, turned=names if last else set()))
    except Exception:  # a net that requires another memory format may raise anything
        return False
    return all(_same(a, b) for a, b in zip(*found, strict=True))


def _unstackable(layout: Layout, row: Tensor, x: Tensor) -> str:
    """Return why two stacked copies fail or give other results or gradients than single copies; empty if not."""
    layout.net.train()
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(2, len(row), generator=generator, dtype=torch.float64).to(row)
    rows = row * (0.9 + 0.2 * noise)
    torch.manual_seed(0)
    alone = [_results(layout, r[None], x) for r in rows]
    again = [_results(layout, r[None], x) for r in rows]
    if any(not _same(a[0], b[0]) for a, b in zip(alone, again, strict=True)):
        return "its forward pass draws random numbers (dropout), which every client must draw for itself"
    try:
        together = _results(layout, rows, x, stacked=True)
    except Exception as error:  # any error from the user's forward pass or vmap is the reason
        return f"torch.vmap cannot run it: {str(error).strip().splitlines()[0]}"
    single = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    if any(not _same(a, b) for a, b in zip(together, single, strict=True)):
        return "stacked copies do not give the same results or gradients as single ones"
    try:
        padded = _results(layout, rows, x, stacked=True, extra=EXTRA)
    except Exception:  # batch normalization of something else than the batch
        padded = []
    if not padded or any(not _same(a, b) for a, b in zip(padded, single, strict=True)):
        return "it mixes the samples of a batch in other ways than batch normalization, so batches cannot be padded"
    return ""


def _results(
    layout: Layout, rows: Tensor, x: Tensor, stacked: bool = False, turned: Collection[str] = (), extra: int = 0
) -> list[Tensor]:
    """Return logits, new buffers and gradients of rows [R, D], each with the leading dimension R.

    A stack's batches are padded with `extra` samples, which must not matter.
    """
    size, real = layout.parameter_size, len(x)
    x = torch.cat([x, x[torch.arange(extra) % real]]) if extra else x
    mask = (torch.arange(len(x), device=x.device) < real).to(layout.dtype) if extra else None
    with torch.enable_grad():
        leaves = {n: v.detach().requires_grad_() for n, v in layout.parameter_views(rows[:, :size]).items()}
        buffers = layout.buffer_views(rows[:, size:])

        def run(parameters: Tensors, buffers: Tensors, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            net = layout.bind(parameters, buffers)
            with masked_batch_norm(mask):
                return net.logits(x)[:real], net.buffers

        if stacked:
            with plain_attention(), unrolled_recurrence():
                logits, after = vmap(run)(leaves, buffers, x.expand(len(rows), *x.shape))
        else:
            single = {n: channels_last(v[0]) if n in turned else v[0] for n, v in leaves.items()}
            one, moved = run(single, {n: b[0] for n, b in buffers.items()}, x)
            logits, after = one[None], {n: b[None] for n, b in moved.items()}
        grads = torch.autograd.grad(logits.square().sum(), list(leaves.values()), materialize_grads=True)
    return [logits.detach(), *(b.detach() for b in after.values()), *grads]
