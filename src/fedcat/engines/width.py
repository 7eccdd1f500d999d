"""How many rows a stack may have so that a row's bits do not depend on the other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import vmap

from fedcat.core.precision import plain_attention
from fedcat.data.pool import Pool
from fedcat.models.layout import Layout
from fedcat.models.losses import LossFunction, cross_entropy

FIXED = 16
TRIED = (2, 3, 5, 9, 17)


@dataclass(frozen=True)
class Width:
    """Bounds on the width of a stack: narrower stacks are padded with copies of a row, wider ones are split."""

    least: int = 1
    most: int | None = None


_found: WeakKeyDictionary[Layout, dict[tuple[int, int, bool, LossFunction], bool]] = WeakKeyDictionary()


Gradients = Callable[[Layout, Pool, Tensor, Tensor], Sequence[Tensor]]
"""Returns the gradients of rows on the samples at an index, in one or more tensors."""


def width_of(
    layout: Layout,
    pool: Pool,
    batch_size: int,
    exact: bool,
    gradients: Gradients | None = None,
    loss: LossFunction = cross_entropy,
) -> Width:
    """Return the widths at which a net may be stacked.

    The order in which kernels sum values can depend on the size of the whole stack. On a CPU with few threads, stacks
    of two or more rows usually give the same bits at every width, which is tested here on the net itself. If they do
    not, and on a GPU, exact mode stacks a fixed number of rows. `gradients` computes the gradients, by default with
    `torch.vmap`.
    """
    if not exact:
        return Width()
    if layout.device.type == "cpu":
        key = (batch_size, torch.get_num_threads(), gradients is None, loss)
        known = _found.setdefault(layout, {})
        if key not in known:
            known[key] = _matters(layout, pool, batch_size, gradients or partial(vmapped_gradients, loss=loss))
        if not known[key]:
            return Width(least=2)
    return Width(FIXED, FIXED)


def _matters(layout: Layout, pool: Pool, batch_size: int, gradients: Gradients) -> bool:
    """Return whether the bits of a row's gradient depend on the width of the stack."""
    rows, index = trial_rows(layout, pool, max(TRIED), batch_size)
    whole = gradients(layout, pool, rows, index)
    for width in TRIED[:-1]:
        part = gradients(layout, pool, rows[:width], index[:width])
        if any(not torch.equal(a, b[:width]) for a, b in zip(part, whole, strict=True)):
            return True
    return False


def trial_rows(layout: Layout, pool: Pool, count: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return rows similar to the net's own, and a batch of positions for each."""
    generator = torch.Generator().manual_seed(0)
    row = layout.pack(layout.net)
    noise = torch.rand(count, len(row), generator=generator, dtype=torch.float64).to(row)
    index = torch.randint(len(pool), (count, batch_size), generator=generator).to(pool.x.device)
    return row * (0.9 + 0.2 * noise), index


def vmapped_gradients(
    layout: Layout, pool: Pool, rows: Tensor, index: Tensor, loss: LossFunction = cross_entropy
) -> tuple[Tensor, ...]:
    """Return the gradients of the rows' mean loss in training mode, one tensor per parameter."""
    layout.net.train()
    size = layout.parameter_size
    leaves = {n: v.detach().requires_grad_() for n, v in layout.parameter_views(rows[:, :size]).items()}
    x, y = pool.inputs(index, layout.dtype), pool.targets(index, layout.dtype)

    def mean(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return loss(layout.bind(parameters, buffers).logits(x), y).mean()

    with plain_attention():
        losses = vmap(mean)(leaves, layout.buffer_views(rows[:, size:]), x, y)
    return torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
