"""A convolution with optional pooling: its memory and its kernel launches."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedcat.engines.gradients.chain import Conv, Spatial
from fedcat.engines.gradients.triton import conv_kernels
from fedcat.engines.gradients.triton.layers import GatherLayer, Layer, merges, pieces, power
from fedcat.engines.gradients.triton.tiles import (
    conv_forward_tile,
    conv_input_tile,
    conv_split,
    conv_weight_tile,
    fold_block,
)

if TYPE_CHECKING:
    from fedcat.engines.gradients.triton.gradients import Program


class ConvLayer(Layer):
    def __init__(self, program: Program, spec: Conv, before: Layer, after: Spatial | None) -> None:
        super().__init__(program, before)
        self.spec = spec
        self._make(spec.outputs, after)
        self.arg = program.image(spec.outputs, 0, flat=after is None, dtype=torch.int8)
        channels, size, units = spec.inputs[0], spec.kernel, power(spec.channels, 4)
        self.windows = 4 if merges(spec) else 1
        self.units = max(units, 16 // self.windows)
        span = size + 1 if self.windows == 4 else size
        self.lines = pieces(span**2 * channels, 16) * 16
        self.samples = conv_split(self.lines * self.units * self.windows, spec.outputs[1] * spec.outputs[2])
        self.splits = pieces(program.batch, self.samples)
        self.laid = program.buffer(self.lines, self.units * self.windows)
        self.part = program.buffer(self.splits, self.units * (self.lines * self.windows + 1), dtype=torch.float32)
        self.kernel = {"C": channels, "OUT": spec.channels, "SPAN": span, "WIN": self.windows, "KP": self.lines}
        x = before.out.sizes("X")
        d = self.dout.strides("D")
        self.places = {
            "B": program.batch,
            "PH": spec.outputs[1],
            "PW": spec.outputs[2],
            "POOL": spec.pool,
            "STRIDE": spec.stride,
            **d,
        }
        self.common = {**self.kernel, **self.places, "X_B": x["X_B"], "X_Y": x["X_Y"], "MODE": program.mode}
        self.carries = not isinstance(before, GatherLayer)
        self.turns = program.mode == "tf32"
        if self.carries:
            reach = size - 1 - spec.padding
            whole = tuple(side + 2 * spec.padding - size + 1 for side in spec.inputs[1:])
            self.full = program.image((spec.channels, whole[0], whole[1]), reach, flat=False)
            self.columns, self.back_lines = power(channels), pieces(size**2 * spec.channels, 16) * 16
            self.turned = program.buffer(self.back_lines, self.columns)

    def prepare(self) -> None:
        self._lay_out(self.laid, self.kernel["SPAN"], self.windows, back=False)
        if self.carries:
            self._lay_out(self.turned, self.spec.kernel, 1, back=True)

    def _lay_out(self, to: Tensor, span: int, windows: int, back: bool) -> None:
        at, rows, spec = self.program, self.program.buffers, self.spec
        at.launch(
            conv_kernels.lay_out,
            pieces(to[0].numel(), 1024),
            *(rows.p, to),
            P_ROW=rows.p.stride(0),
            W_AT=spec.weight,
            C=spec.inputs[0],
            OUT=spec.channels,
            KS=spec.kernel,
            SPAN=span,
            WIN=windows,
            BACK=back,
            KP=to.shape[1],
            BN=to.shape[2],
            TURNED=self.turns,
            BLOCK=1024,
        )

    def forward(self) -> None:
        at, rows, spec = self.program, self.program.buffers, self.spec
        tile = conv_forward_tile(at.mode, apart=spec.pool == 2 and self.windows == 1)
        at.launch(
            conv_kernels.conv_forward,
            pieces(at.batch * spec.outputs[1] * spec.outputs[2], tile["BM"]),
            *(self.before.out.data, self.laid, rows.p, self.out.data, self.arg.data),
            **self.common,
            **self.out.sizes("O"),
            P_ROW=rows.p.stride(0),
            B_AT=spec.bias or 0,
            RELU=spec.relu,
            BIAS=spec.bias is not None,
            ARG=True,
            BO=self.units,
            TURNED=self.turns,
            **tile,
        )

    def spread(self) -> None:
        if not self.carries:
            return
        at, f = self.program, self.full.sizes("F")
        at.launch(
            conv_kernels.unpool,
            pieces(at.batch * prod(self.full.shape), 1024),
            *(self.dout.data, self.arg.data, self.full.data),
            OUT=self.spec.channels,
            OH=self.full.shape[1],
            OW=self.full.shape[2],
            **self.places,
            F_B=f["F_B"],
            F_Y=f["F_Y"],
            F_0=f["F_0"],
            BLOCK=1024,
        )

    def backward(self) -> None:
        at, spec, f = self.program, self.spec, self.full.sizes("F")
        tile = conv_input_tile(at.mode)
        at.launch(
            conv_kernels.conv_input_gradient,
            pieces(at.batch * spec.inputs[1] * spec.inputs[2], tile["BM"]),
            *(self.full.data, self.turned, self.before.dout.data),
            B=at.batch,
            C=spec.inputs[0],
            HI=spec.inputs[1],
            WI=spec.inputs[2],
            KS=spec.kernel,
            OUT=spec.channels,
            F_B=f["F_B"],
            F_Y=f["F_Y"],
            **self.before.dout.strides("D"),
            MODE=at.mode,
            TURNED=self.turns,
            KP=self.back_lines,
            BN=self.columns,
            **tile,
        )

    def weights(self) -> None:
        at, rows, spec = self.program, self.program.buffers, self.spec
        dense = self.carries and self.windows == 1 and spec.stride == 1
        tile = conv_weight_tile(at.mode, self.units * self.windows, self.windows > 1, dense)
        dy, where = self.dout, {**self.common, "D_0": 0}
        if dense:
            dy = self.full
            where |= {**dy.sizes("D"), "PH": dy.shape[1], "PW": dy.shape[2], "POOL": 1}
        at.launch(
            conv_kernels.conv_weight_gradient,
            (pieces(self.lines, tile["BK"]) + 1) * self.splits,
            *(self.before.out.data, dy.data, self.arg.data, self.part),
            **where,
            DENSE=dense,
            SPLITS=self.splits,
            BS=self.samples,
            BO=self.units,
            **tile,
        )
        size = spec.channels * (spec.inputs[0] * spec.kernel**2 + 1)
        block = fold_block(size)
        at.launch(
            conv_kernels.fold,
            pieces(size, block),
            *(self.part, rows.g),
            G_ROW=rows.g.stride(0),
            W_AT=spec.weight,
            B_AT=spec.bias or 0,
            KS=spec.kernel,
            **self.kernel,
            BIAS=spec.bias is not None,
            SPLITS=self.splits,
            SP=power(self.splits, 1),
            BO=self.units,
            BLOCK=block,
        )
