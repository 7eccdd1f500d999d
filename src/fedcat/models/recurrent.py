"""Recurrent layers as single operations, which `torch.vmap` can batch: it has no rule for PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

State = tuple[Tensor, ...]
"""What a layer hands on from step to step: h, and c in an LSTM; [B, H] each."""
Cell = Callable[[Tensor, Tensor, State], State]
"""W x + b and U h + d of all gates, [B, gates * H] each, and the state (h, ...) before a step -> the state after it."""


class unrolled_recurrence(TorchFunctionMode):
    """Computes LSTMs, GRUs and simple recurrent layers step by step; packed sequences are left to PyTorch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in LAYERS and isinstance(args[3], bool):  # `bias`: the lengths of a packed sequence would precede it
            return _layers(LAYERS[func], *args)
        if func in CELLS:
            return _one_step(CELLS[func], *args)
        return func(*args, **(kwargs or {}))


def is_recurrent(net: nn.Module) -> bool:
    """Return whether a net has such layers."""
    return any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in net.modules())


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (x_r, x_z, x_n), (h_r, h_z, h_n) = x.chunk(3, -1), h.chunk(3, -1)
    z = (x_z + h_z).sigmoid()
    n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
    return ((1 - z) * n + z * state[0],)


def _tanh(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).tanh(),)


def _relu(x: Tensor, h: Tensor, state: State) -> State:
    return ((x + h).relu(),)


LAYERS: dict[Any, Cell] = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu}
CELLS: dict[Any, Cell] = {
    torch.lstm_cell: _lstm,
    torch.gru_cell: _gru,
    torch.rnn_tanh_cell: _tanh,
    torch.rnn_relu_cell: _relu,
}


def _layers(
    cell: Cell,
    x: Tensor,
    hx: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return the outputs [T, B, H] of the last layer, and the final state of all layers and directions."""
    x = x.transpose(0, 1) if batch_first else x
    sides = 2 if bidirectional else 1
    each = len(weights) // (layers * sides)
    starts = list(zip(*(part.unbind(0) for part in _state(hx)), strict=True))
    ends: list[State] = []
    for layer in range(layers):
        outputs = []
        for side in range(sides):
            number = layer * sides + side
            mine = weights[number * each : (number + 1) * each]
            out, end = _layer(cell, x, starts[number], mine, bias, backwards=side == 1)
            outputs.append(out)
            ends.append(end)
        x = torch.cat(outputs, -1)
        if dropout and layer < layers - 1:
            x = functional.dropout(x, dropout, training)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(part) for part in zip(*ends, strict=True))


def _layer(
    cell: Cell, x: Tensor, state: State, weights: Sequence[Tensor], bias: bool, backwards: bool
) -> tuple[Tensor, State]:
    """Return the outputs of one layer in one direction, [T, B, H], and its final state.

    The inputs' products are formed for all steps at once, as one matrix: `torch.vmap` would copy the weights per step.
    """
    w, u, *rest = weights
    b, d = rest[:2] if bias else (None, None)
    projection = rest[-1] if len(rest) % 2 else None
    products = functional.linear(x.flatten(0, 1), w, b).reshape(*x.shape[:2], -1).unbind(0)
    outputs = []
    for product in reversed(products) if backwards else products:
        state = cell(product, functional.linear(state[0], u, d), state)
        if projection is not None:
            state = (functional.linear(state[0], projection), *state[1:])
        outputs.append(state[0])
    return torch.stack(outputs[::-1] if backwards else outputs), state


def _one_step(
    cell: Cell,
    x: Tensor,
    hx: Tensor | Sequence[Tensor],
    w: Tensor,
    u: Tensor,
    b: Tensor | None = None,
    d: Tensor | None = None,
) -> Tensor | State:
    state = _state(hx)
    after = cell(functional.linear(x, w, b), functional.linear(state[0], u, d), state)
    return after if len(after) > 1 else after[0]


def _state(hx: Tensor | Sequence[Tensor]) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)
