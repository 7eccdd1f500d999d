"""Accuracy and loss of many rows in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from fedcat.core.precision import plain_attention, precision_context
from fedcat.data.pool import Pool
from fedcat.models.layout import Layout, Tensors

SAMPLES = 20_000
"""Samples per forward pass, counted once per row."""
ROWS = 40
"""Maximum number of rows per forward pass."""


def evaluate_stacked(
    layout: Layout, rows: Sequence[Tensor], pool: Pool, index: Tensor | None = None
) -> list[tuple[float, float]]:
    """Return accuracy and mean loss of each row on a pool, or on its samples at `index`."""
    if len(rows) > ROWS:
        return [
            score
            for begin in range(0, len(rows), ROWS)
            for score in evaluate_stacked(layout, rows[begin : begin + ROWS], pool, index)
        ]
    where = torch.arange(len(pool), device=pool.x.device) if index is None else index
    layout.net.eval()
    size, stacked = layout.parameter_size, torch.stack(list(rows))
    parameters, buffers = layout.parameter_views(stacked[:, :size]), layout.buffer_views(stacked[:, size:])

    def logits(parameters: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        return layout.bind(parameters, buffers).logits(x)

    right = torch.zeros(len(rows), dtype=torch.int64, device=stacked.device)
    loss = torch.zeros(len(rows), dtype=torch.float64, device=stacked.device)
    with torch.no_grad(), precision_context(), plain_attention():
        for part in torch.split(where, max(100, SAMPLES // len(rows))):
            y = pool.y[part].expand(len(rows), -1)
            out = vmap(logits, in_dims=(0, 0, None))(parameters, buffers, pool.inputs(part, layout.dtype))
            right += (out.argmax(-1) == y).sum(1)
            losses = functional.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none")
            loss += losses.view(len(rows), -1).to(torch.float64).sum(1)
    return [(r / len(where), s / len(where)) for r, s in zip(right.tolist(), loss.tolist(), strict=True)]
