"""Convolutions of stacked nets in nets that are not chains: y[r] = conv2d(x[r], w[r], b[r]) for every row r.

Under `torch.vmap`, PyTorch runs them as one grouped convolution, which cuDNN does slowly. `fast_conv2d` replaces
`functional.conv2d` by the kernels of `conv_kernels` where they apply.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedcat.engines.gradients.triton import conv_kernels
from fedcat.engines.gradients.triton.layers import MODES, launch, pieces, power
from fedcat.engines.gradients.triton.tiles import (
    conv2d_weight_tile,
    conv_forward_tile,
    conv_input_tile,
    conv_split,
    fold_block,
)

MOST_CHANNELS = 128
"""Number of channels up to which a tile holds all of them."""


class fast_conv2d(TorchFunctionMode):
    """Computes convolutions by the kernels, in the given precision."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.mode = MODES[precision]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is functional.conv2d:
            return self._conv2d(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        sizes = [_side(value) for value in (stride, padding, dilation)]
        kernel, (step, edge, spread) = weight.shape[-1], sizes
        simple = step > 0 and 0 <= edge < kernel and spread == groups == 1 and weight.shape[-2] == kernel
        if not simple or x.dim() != 4 or max(weight.shape[:2]) > MOST_CHANNELS or x.dtype != torch.float32:
            return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
        found: Tensor = _OneConv2d.apply(x, weight, bias, step, edge, self.mode)  # type: ignore[no-untyped-call]
        return found


def _side(value: Any) -> int:
    """Return a size that is the same in both directions, or -1."""
    if isinstance(value, str):
        return -1
    sides = {value} if isinstance(value, int) else {int(side) for side in value}
    return sides.pop() if len(sides) == 1 else -1


class _OneConv2d(Function):
    """The convolution of one net, which `torch.vmap` turns into that of a stack."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, mode: str) -> Tensor:
        return functional.conv2d(x, weight, bias, stride, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: alone it has no gradient."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, int]:
        def stacked(value: Tensor, dim: int | None) -> Tensor:
            return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)

        parts = [None if t is None else stacked(t, d) for t, d in zip((x, weight, bias), in_dims, strict=False)]
        return _StackedConv2d.apply(*parts, *rest), 0  # type: ignore[no-untyped-call]


class _StackedConv2d(Function):
    """x [R, B, C, H, W], weight [R, O, C, k, k] and bias [R, O] -> [R, B, O, H', W'], all float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, mode: str
    ) -> Tensor:
        conv = _Sizes(x, weight, stride, padding, mode)
        image = conv.image(x)
        ctx.conv, ctx.biased = conv, bias is not None
        ctx.save_for_backward(image, weight)
        return conv.forward(image, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        image, weight = ctx.saved_tensors
        full = ctx.conv.spread(dy)
        dx = ctx.conv.input_gradient(full, weight) if ctx.needs_input_grad[0] else None
        dw, db = ctx.conv.weight_gradient(image, full) if any(ctx.needs_input_grad[1:3]) else (None, None)
        return dx, dw, db if ctx.biased else None, None, None, None


class _Sizes:
    """The sizes of a stacked convolution, and its kernels' launches.

    What a kernel reads patches from is channels last with a border of zeros; all else is in PyTorch's order.
    """

    def __init__(self, x: Tensor, weight: Tensor, stride: int, padding: int, mode: str) -> None:
        self.rows, self.batch, self.channels, *self.sides = x.shape
        self.outs, self.kernel = weight.shape[1], weight.shape[-1]
        self.stride, self.padding, self.mode = stride, padding, mode
        self.places = [(side + 2 * padding - self.kernel) // stride + 1 for side in self.sides]
        self.wide = [side + 2 * padding for side in self.sides]
        self.lines = pieces(self.kernel**2 * self.channels, 16) * 16
        self.units = max(16, power(self.outs, 4))
        line = self.wide[1] * self.channels
        self.edge = self.kernel - 1 - padding
        self.whole = [side + self.kernel - 1 for side in self.sides]
        self.common: dict[str, Any] = {"B": self.batch, "C": self.channels, "SPAN": self.kernel, "OUT": self.outs}
        self.common |= {"WIN": 1, "POOL": 1}
        self.common |= {"PH": self.places[0], "PW": self.places[1], "STRIDE": stride, "KP": self.lines, "MODE": mode}
        self.common |= {"X_B": self.wide[0] * line, "X_Y": line, "BO": self.units}

    def _launch(self, kernel: Any, blocks: int, *tensors: Tensor, **sizes: Any) -> None:
        step, count, order = _first_step(self.rows, tensors[0].device)
        launch(kernel, (blocks, self.rows), *tensors, step=step, count=count, order=order, ahead=0, **sizes)

    def image(self, x: Tensor) -> Tensor:
        """Return images as the kernels read them, [R, B, H, W, C]."""
        wide = x.new_zeros(self.rows, self.batch, *self.wide, self.channels)
        (height, width), edge = self.sides, self.padding
        wide[:, :, edge : edge + height, edge : edge + width] = x.permute(0, 1, 3, 4, 2)
        return wide

    def forward(self, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the outputs, [R, B, O, H', W']."""
        laid = weight.new_zeros(self.rows, self.lines, self.units)
        laid[:, : self.kernel**2 * self.channels, : self.outs] = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)
        out = weight.new_empty(self.rows, self.batch, self.outs, *self.places)
        held = laid if bias is None else bias.contiguous()
        tile = conv_forward_tile(self.mode, apart=False)
        self._launch(
            conv_kernels.conv_forward,
            pieces(self.batch * self.places[0] * self.places[1], tile["BM"]),
            *(image, laid, held, out, out),
            **self.common,
            **_named("O", _strides(self.outs, *self.places)),
            **_named("D", (0, 0, 0, 0)),
            O_0=0,
            P_ROW=self.outs,
            B_AT=0,
            RELU=False,
            BIAS=bias is not None,
            ARG=False,
            TURNED=False,
            **tile,
        )
        return out

    def spread(self, dy: Tensor) -> Tensor:
        """Return the outputs' gradient channels last, at the places of a kernel of stride 1, with a border of zeros."""
        full = dy.new_zeros(self.rows, self.batch, *self.whole, self.outs)
        last = [self.edge + (places - 1) * self.stride + 1 for places in self.places]
        inner = full[:, :, self.edge : last[0] : self.stride, self.edge : last[1] : self.stride]
        inner.copy_(dy.permute(0, 1, 3, 4, 2))
        return full

    def weight_gradient(self, image: Tensor, full: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of the weights and of the bias."""
        line = self.whole[1] * self.outs
        strides = (self.whole[0] * line, self.stride * line, self.stride * self.outs, 1)
        samples = conv_split(self.lines * self.units, self.places[0] * self.places[1])
        splits = pieces(self.batch, samples)
        part = full.new_empty(self.rows, splits, self.units * (self.lines + 1))
        tile = conv2d_weight_tile()
        self._launch(
            conv_kernels.conv_weight_gradient,
            (pieces(self.lines, tile["BK"]) + 1) * splits,
            *(image, full, full, part),
            **self.common,
            **_named("D", strides),
            DENSE=True,
            D_0=self.edge * (line + self.outs),
            SPLITS=splits,
            BS=samples,
            **tile,
        )
        count = self.outs * self.channels * self.kernel**2
        g = full.new_empty(self.rows, count + self.outs)
        block = fold_block(count + self.outs)
        self._launch(
            conv_kernels.fold,
            pieces(count + self.outs, block),
            *(part, g),
            G_ROW=count + self.outs,
            W_AT=0,
            B_AT=count,
            C=self.channels,
            OUT=self.outs,
            KS=self.kernel,
            SPAN=self.kernel,
            WIN=1,
            BIAS=True,
            SPLITS=splits,
            KP=self.lines,
            SP=power(splits, 1),
            BO=self.units,
            BLOCK=block,
        )
        return g[:, :count].view(self.rows, self.outs, self.channels, self.kernel, self.kernel), g[:, count:]

    def input_gradient(self, full: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of the inputs: a convolution of the spread gradient with the flipped weights."""
        size, whole = self.kernel, self.whole
        lines, columns = pieces(size**2 * self.outs, 16) * 16, power(self.channels)
        turned = weight.new_zeros(self.rows, lines, columns)
        turned[:, : size**2 * self.outs, : self.channels] = weight.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3)
        dx = full.new_empty(self.rows, self.batch, self.channels, *self.sides)
        tile = conv_input_tile(self.mode)
        self._launch(
            conv_kernels.conv_input_gradient,
            pieces(self.batch * self.sides[0] * self.sides[1], tile["BM"]),
            *(full, turned, dx),
            B=self.batch,
            C=self.channels,
            HI=self.sides[0],
            WI=self.sides[1],
            KS=size,
            OUT=self.outs,
            F_B=whole[0] * whole[1] * self.outs,
            F_Y=whole[1] * self.outs,
            **_named("D", _strides(self.channels, *self.sides)),
            MODE=self.mode,
            TURNED=False,
            KP=lines,
            BN=columns,
            **tile,
        )
        return dx


def _strides(channels: int, height: int, width: int) -> tuple[int, int, int, int]:
    """Return the strides of a sample, a line, a pixel and a channel of images in PyTorch's order."""
    return channels * height * width, width, 1, height * width


def _named(letter: str, strides: tuple[int, int, int, int]) -> dict[str, int]:
    return {f"{letter}_{end}": size for end, size in zip("BYXC", strides, strict=True)}


@cache
def _first_step(rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the counters of rows that stand before their first step, in their own order."""
    step, count, order = (torch.tensor(0), torch.ones(rows), torch.arange(rows))
    return tuple(values.to(device, torch.int32) for values in (step[None], count, order))  # type: ignore[return-value]
