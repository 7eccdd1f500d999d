"""Recurrent layers step by step, for stacks of nets: `torch.vmap` has no rule for PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

State = tuple[Tensor, ...]
"""What a layer hands on from step to step: h, and c in an LSTM; [B, H] each."""
Cell = Callable[[Tensor, Tensor, State], State]
"""W x + b and U h + d of all gates, [B, G] each, and the state before a step -> the state after it."""
Stacked = Callable[..., tuple[Tensor, ...]]
"""A layer of stacked nets: W x + b of all steps [R, T, B, G], U [R, G, H], d [R, G] or None, and the state before the
first step, [R, B, H] each -> h after every step, [R, T, B, H], and the state after the last."""


class unrolled_recurrence(TorchFunctionMode):
    """Computes LSTMs, GRUs and simple recurrent layers step by step.

    Packed sequences and LSTMs with a projection are left to PyTorch.

    Parameters
    ----------
    lstm : callable, optional
        What computes the layers of stacked LSTMs in float32, instead of single operations.
    """

    def __init__(self, lstm: Stacked | None = None) -> None:
        super().__init__()
        self.lstm = lstm

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs:  # PyTorch's modules give none
            return func(*args, **kwargs)
        if func in LAYERS and isinstance(args[3], bool):  # `bias`: the lengths of a packed sequence would precede it
            weights, bias, layers, bidirectional = args[2], args[3], args[4], args[7]
            if len(weights) == layers * (1 + bidirectional) * (4 if bias else 2):
                cell = LAYERS[func]
                fast = self.lstm if cell is _lstm and weights[0].dtype == torch.float32 else None
                return _layers(cell, fast or partial(_StackedRecurrence.apply, cell), *args)
        if func in CELLS:
            return _one_step(CELLS[func], *args)
        if func is Tensor.data_ptr and is_batchedtensor(args[0]):
            return 0  # on a GPU, RNNBase moves its weights together, unless two have the same address
        return func(*args)


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
RECURRENT = frozenset({*LAYERS, *CELLS})
"""The functions that recurrent layers call."""


def _layers(
    cell: Cell,
    stacked: Stacked,
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
            out, end = _layer(cell, stacked, x, starts[number], mine, bias, backwards=side == 1)
            outputs.append(out)
            ends.append(end)
        x = torch.cat(outputs, -1)
        if dropout and layer < layers - 1:
            x = functional.dropout(x, dropout, training)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(part) for part in zip(*ends, strict=True))


def _layer(
    cell: Cell, stacked: Stacked, x: Tensor, state: State, weights: Sequence[Tensor], bias: bool, backwards: bool
) -> tuple[Tensor, State]:
    """Return the outputs of one layer in one direction, [T, B, H], and its final state.

    The inputs' products are formed for all steps at once.
    """
    w, u = weights[:2]
    b: Tensor | None = None
    d: Tensor | None = None
    if bias:  # all cells but the GRU's add the two, which is done once here
        b, d = weights[2:] if cell is _gru else (None, weights[2] + weights[3])
    products = functional.linear(x.flatten(0, 1), w, b).reshape(*x.shape[:2], -1)
    products = products.flip(0) if backwards else products
    given = [None if t is None else t.to(u.dtype) for t in (products, u, d, *state)]
    with torch.autocast(x.device.type, enabled=False):  # a net may use it: the recurrence needs one type
        outputs, *end = _Recurrence.apply(stacked, *given)  # type: ignore[no-untyped-call]
    return outputs.flip(0) if backwards else outputs, tuple(end)


class _Recurrence(Function):
    """The steps of one net's layer, which `torch.vmap` turns into those of a stack."""

    @staticmethod
    def forward(stacked: Stacked, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(t[0] for t in stacked(*(None if t is None else t[None] for t in tensors)))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: alone it has no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, stacked: Stacked, *tensors: Tensor | None) -> tuple[Any, int]:
        def stack(value: Tensor | None, dim: int | None) -> Tensor | None:
            if value is None:
                return None
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        return stacked(*(stack(t, dim) for t, dim in zip(tensors, in_dims[1:], strict=True))), 0


class _StackedRecurrence(Function):
    """A layer of stacked nets (`Stacked`) of any cell.

    Each step's cell has a graph of its own. Autograd would form the gradient of U step by step, and add; here it is one
    product of all steps.
    """

    @staticmethod
    def forward(ctx: Any, cell: Cell, x: Tensor, u: Tensor, d: Tensor | None, *state: Tensor) -> tuple[Tensor, ...]:
        turned, ctx.steps = u.transpose(1, 2), []
        for product in x.transpose(0, 1).contiguous():
            hidden = torch.bmm(state[0], turned)
            hidden = hidden if d is None else hidden.add_(d[:, None])
            before = [t.detach().requires_grad_() for t in (product, hidden, *state)]
            with torch.enable_grad():
                after = _step(cell, *before)
            ctx.steps.append((before, after))
            state = tuple(t.detach() for t in after)
        ctx.u, ctx.biased = u, d is not None
        return torch.stack([after[0].detach() for _, after in ctx.steps], 1), *state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outputs: Tensor, *state: Tensor) -> Any:
        u = ctx.u.transpose(1, 2).contiguous().transpose(1, 2)  # cuBLAS multiplies faster by columns
        products, hiddens = [], []
        for (before, after), output in zip(reversed(ctx.steps), reversed(outputs.unbind(1)), strict=True):
            h, *rest = state
            product, hidden, direct, *rest = torch.autograd.grad(after, before, (h + output, *rest), allow_unused=True)
            h = torch.bmm(hidden, u) if direct is None else torch.baddbmm(direct, hidden, u)
            state = (h, *rest)
            products.append(product)
            hiddens.append(hidden)
        d_hidden = torch.stack(hiddens[::-1], 1).flatten(1, 2)
        h_before = torch.stack([before[2].detach() for before, _ in ctx.steps], 1).flatten(1, 2)
        d_u = torch.bmm(d_hidden.transpose(1, 2), h_before)
        return None, torch.stack(products[::-1], 1), d_u, d_hidden.sum(1) if ctx.biased else None, *state


def _step(cell: Cell, x: Tensor, h: Tensor, *state: Tensor) -> State:
    """Return the state after a step; on a GPU, the kernels of PyTorch's own cells compute it where there are such."""
    if cell not in FUSED or not x.is_cuda:
        return cell(x, h, state)
    *after, _ = FUSED[cell](*(t.flatten(0, 1) for t in (x, h, state[-1])))
    return tuple(t.view_as(state[-1]) for t in after)


FUSED: dict[Cell, Any] = {_lstm: torch.ops.aten._thnn_fused_lstm_cell, _gru: torch.ops.aten._thnn_fused_gru_cell}
"""W x + b, U h + d [R * B, G] and c (h in a GRU) [R * B, H] -> the state after a step, and what the kernel keeps."""


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
