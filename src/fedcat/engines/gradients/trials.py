"""Trials on a few rows, once per net: whether gradients agree with autograd's, and what a stack's size changes."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch

from fedcat.core.precision import precision_context
from fedcat.engines.gradients.base import Found, Gradients, Inputs, Step
from fedcat.engines.gradients.vmap import VmapGradients
from fedcat.models.layout import Layout

LIMITS = {"fp32": 0.02, "tf32": 0.2, "bf16": 0.4}
"""Largest difference of the loss and of each tensor's gradient from autograd's in float32, relative to its norm. If two
values of a pooling window are almost equal, either may win, so even full precision differs by more than rounding."""
ATTEMPTS = 3
"""Trials, of which one must agree: with few samples, one such window may change a gradient by more than the limit."""
SURELY = 10
"""Multiple of the limit beyond which no window is to blame."""
FIXED = 16
"""The number of rows in a stack if a row's bits depend on it."""
TRIED = (2, 3, 5, 9, 17)
"""Numbers of rows that are tried."""


def trial_step(gradients: Gradients, rows: int, batch: int, inputs: Inputs | None = None, seed: int = 0) -> Step:
    """Return a step of rows similar to the net's own, on random samples; the first row's batch is half empty."""
    layout, pool = gradients.layout, gradients.pool
    generator = torch.Generator().manual_seed(seed)
    row, size = layout.pack(layout.net), layout.parameter_size
    noise = torch.rand(rows, len(row), generator=generator, dtype=torch.float64).to(row)
    index = torch.randint(len(pool), (rows, batch), generator=generator).to(pool.x.device)
    index[0, -(-batch // 2) :] = -1
    near = row * (0.9 + 0.2 * noise)
    return Step(near[:, :size], near[:, size:], index, True, inputs or {})


def disagrees(gradients: Gradients, batch: int, inputs: Inputs | None = None) -> str:
    """Return why gradients cannot be used: they fail, or differ from autograd's; empty if they agree.

    A user is warned, because the net was expected to train with them.
    """
    right = VmapGradients(gradients.layout, gradients.pool, "fp32", gradients.rule, gradients.loss)
    gradients.layout.net.train()
    for seed in range(ATTEMPTS):
        step = trial_step(gradients, 2, batch, inputs, seed)
        with precision_context():
            plain = right.of(step)
        try:
            with precision_context(gradients.precision):
                apart = _apart(gradients.layout, gradients.of(step), plain)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # any error from a compiler or a GPU is the reason
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            break
        limit = LIMITS[gradients.precision]
        if apart <= limit:
            return ""
        reason = f"its gradients differ from autograd's by {apart:.2g}"
        if not apart < SURELY * limit:
            break
    warnings.warn(f"{gradients.name} cannot be used ({reason}): training continues without", stacklevel=2)
    return reason


def _apart(layout: Layout, found: Found, right: Found) -> float:
    """Return the largest relative difference of the losses and of the gradient of any of the net's tensors."""
    mine, plain = ({**layout.parameter_views(g), "loss": losses} for losses, g, _ in (found, right))
    norm = torch.linalg.vector_norm
    least = 1e-3 * norm(torch.cat([g.flatten() for g in plain.values()]))
    apart = [float(norm(mine[n] - g) / torch.maximum(norm(g), least)) for n, g in plain.items()]
    return max(apart) if all(map(math.isfinite, apart)) else math.inf


@dataclass(frozen=True)
class StackSize:
    """Bounds on the rows of a stack: smaller ones are padded with copies of a row, larger ones are split.

    With `row_by_row`, the row algebra of rules and the norms of gradients are computed for one row at a time.
    """

    least: int = 1
    most: int | None = None
    row_by_row: bool = False


def stack_size(gradients: Gradients, batch: int, exact: bool) -> StackSize:
    """Return how many rows a stack may have, so that in exact mode a row's bits do not depend on the others.

    On a CPU that is tried: for most nets, all stacks of two or more rows give the same bits.
    """
    if not exact:
        return StackSize()
    if gradients.independent:
        return StackSize(row_by_row=True)
    if gradients.layout.device.type == "cpu":
        key = ("stack size", gradients.pool.id, gradients.name, gradients.loss, batch, torch.get_num_threads())
        if not gradients.layout.once(key, lambda: _size_matters(gradients, batch)):
            return StackSize(least=2)
    return StackSize(FIXED, FIXED, row_by_row=True)


def _size_matters(gradients: Gradients, batch: int) -> bool:
    """Return whether the bits of a row's gradient depend on the number of rows."""
    vmapped = type(gradients) is VmapGradients  # with a rule's own loss, the net is tried with the user's
    plain = VmapGradients(gradients.layout, gradients.pool, loss=gradients.loss) if vmapped else gradients
    gradients.layout.net.train()
    step = trial_step(gradients, max(TRIED), batch)
    _, whole, _ = plain.of(step)
    for rows in TRIED[:-1]:
        _, part, _ = plain.of(Step(step.p[:rows], step.buffers[:rows], step.index[:rows]))
        if not torch.equal(part, whole[:rows]):
            return True
    return False
