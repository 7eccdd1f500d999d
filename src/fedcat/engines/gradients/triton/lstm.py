"""The layers of stacked LSTMs: a kernel per step, and one product of all steps for the gradient of U."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from fedcat.engines.gradients.triton import lstm_kernels
from fedcat.engines.gradients.triton.layers import MODES, launch, pieces
from fedcat.engines.gradients.triton.tiles import Tile, lstm_tiles
from fedcat.models.recurrent import unrolled_recurrence


def fast_lstm(precision: str) -> unrolled_recurrence:
    """Return a context in which the kernels compute stacked LSTMs, in the given precision."""
    return unrolled_recurrence(partial(_StackedLstm.apply, MODES[precision]))


class _StackedLstm(Function):
    """A layer of stacked LSTMs (`fedcat.models.recurrent.Stacked`), whose state is h and c."""

    @staticmethod
    def forward(ctx: Any, mode: str, x: Tensor, u: Tensor, d: Tensor | None, h: Tensor, c: Tensor) -> Any:
        x, factor = x.contiguous(), _factor(u.transpose(1, 2), mode)
        bias, gates = factor if d is None else d.contiguous(), torch.empty_like(x)
        all_h, all_c = (_with_room(t, x.shape[1]) for t in (h, c))
        tensors, ctx.biased = (x, factor, bias, all_h, all_c, gates), d is not None
        grid, sizes = _sizes(x, factor, mode, lstm_tiles(mode)[0])
        for t in range(x.shape[1]):
            launch(lstm_kernels.lstm_forward, grid, *tensors, t=t, BIAS=ctx.biased, **sizes)
        ctx.mode = mode
        ctx.save_for_backward(u, all_h, all_c, gates)
        return all_h[:, 1:], all_h[:, -1], all_c[:, -1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dh: Tensor, dc: Tensor) -> Any:
        u, h, c, gates = ctx.saved_tensors
        dout, dh, dc = dout.contiguous(), dh.contiguous(), dc.clone(memory_format=torch.contiguous_format)
        factor, dz, last = _factor(u, ctx.mode), torch.empty_like(gates), gates.shape[1] - 1
        grid, sizes = _sizes(gates, factor, ctx.mode, lstm_tiles(ctx.mode)[1])
        for t in range(last, -1, -1):
            launch(lstm_kernels.lstm_backward, grid, dout, dh, dc, factor, c, gates, dz, t=t, LAST=t == last, **sizes)
        flat = dz.flatten(1, 2)
        du = torch.bmm(flat.transpose(1, 2), h[:, :-1].flatten(1, 2))
        return None, dz, du, flat.sum(1) if ctx.biased else None, torch.bmm(dz[:, 0], u), dc


def _with_room(state: Tensor, steps: int) -> Tensor:
    """Return memory for a state [R, B, H] and what it is after each step, [R, 1 + steps, B, H]."""
    found = state.new_empty(len(state), 1 + steps, *state.shape[1:])
    found[:, 0] = state
    return found


def _factor(b: Tensor, mode: str) -> Tensor:
    """Return b [R, K, N] in the order in which its tiles are multiplied fastest: by rows in full precision."""
    return b.contiguous() if mode == "ieee" else b.transpose(1, 2).contiguous().transpose(1, 2)


def _sizes(gates: Tensor, factor: Tensor, mode: str, tile: Tile) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of a step's kernel, and its sizes."""
    rows, steps, batch, columns = gates.shape
    units = columns // 4
    sizes = {"T": steps, "B": batch, "H": units, "U_K": factor.stride(1), "U_N": factor.stride(2), "MODE": mode}
    return (pieces(batch, tile["BM"]) * pieces(units, tile["BU"]), rows), {**sizes, **tile}
