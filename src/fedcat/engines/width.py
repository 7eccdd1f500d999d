"""How many rows a stack may have, so that a row's bits do not depend on the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from fedcat.data.pool import Pool
from fedcat.models.layout import Layout

FIXED = 16
TRIED = (2, 3, 5, 9, 17)


@dataclass(frozen=True)
class Width:
    """Bounds of a stack's width: shorter ones are filled up with copies of a row, longer ones are cut."""

    least: int = 1
    most: int | None = None


_found: WeakKeyDictionary[Layout, dict[tuple[int, int, bool], bool]] = WeakKeyDictionary()


Gradients = Callable[[Layout, Pool, Tensor, Tensor], Sequence[Tensor]]
"""Returns gradients of rows on the samples at an index, in one tensor or several."""


def width_of(layout: Layout, pool: Pool, batch_size: int, exact: bool, gradients: Gradients | None = None) -> Width:
    """Return the widths at which a net may be stacked.

    Kernels add numbers up in an order that can depend on the size of the whole stack. On a CPU with few threads a
    stack of at least two usually gives the same bits at every width, which is tried here on the net itself; where
    it does not, and on a GPU, exact mode stacks a fixed number of rows. `gradients` is how they are computed, by
    default with `torch.vmap`.
    """
    if not exact:
        return Width()
    if layout.device.type == "cpu":
        key = (batch_size, torch.get_num_threads(), gradients is None)
        known = _found.setdefault(layout, {})
        if key not in known:
            known[key] = _matters(layout, pool, batch_size, gradients or vmapped_gradients)
        if not known[key]:
            return Width(least=2)
    return Width(FIXED, FIXED)


def _matters(layout: Layout, pool: Pool, batch_size: int, gradients: Gradients) -> bool:
    """Tell whether the bits of a row's gradient change with the width of the stack."""
    rows, index = trial_rows(layout, pool, max(TRIED), batch_size)
    whole = gradients(layout, pool, rows, index)
    for width in TRIED[:-1]:
        part = gradients(layout, pool, rows[:width], index[:width])
        if any(not torch.equal(a, b[:width]) for a, b in zip(part, whole, strict=True)):
            return True
    return False


def trial_rows(layout: Layout, pool: Pool, count: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return rows like the net's own, and a batch of positions for each."""
    generator = torch.Generator().manual_seed(0)
    row = layout.pack(layout.net)
    noise = torch.rand(count, len(row), generator=generator, dtype=torch.float64).to(row)
    index = torch.randint(len(pool), (count, batch_size), generator=generator).to(pool.x.device)
    return row * (0.9 + 0.2 * noise), index


def vmapped_gradients(layout: Layout, pool: Pool, rows: Tensor, index: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of rows' mean cross entropy, parameter by parameter."""
    size = layout.parameter_size
    leaves = {n: v.detach().requires_grad_() for n, v in layout.parameter_views(rows[:, :size]).items()}
    x, y = pool.inputs(index, layout.dtype), pool.y[index]

    def loss(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(layout.bind(parameters, buffers).logits(x), y)

    losses = vmap(loss)(leaves, layout.buffer_views(rows[:, size:]), x, y)
    return torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
