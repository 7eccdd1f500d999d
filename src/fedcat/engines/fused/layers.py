"""The layers of a chain: their memory, and the launches of their kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor

from fedcat.engines.fused import image_kernels, linear_kernels
from fedcat.engines.fused.chain import Conv, Linear, MaxPool, Norm, Spatial
from fedcat.engines.fused.tiles import (
    conv_forward_tile,
    conv_input_tile,
    conv_lanes,
    conv_split,
    conv_weight_tile,
    fold_block,
    linear_tiles,
    tail_tile,
)

if TYPE_CHECKING:
    from fedcat.engines.fused.program import Program

TAIL_WIDTH = 256
"""Units of a hidden layer up to which it is computed in one piece with the loss."""


def power(size: int, least: int = 16) -> int:
    """Return the power of two that holds `size`."""
    return max(least, 1 << (size - 1).bit_length())


def merges(spec: Conv) -> bool:
    """Tell whether the places of a convolution's pooling windows are columns of one product."""
    return spec.pool == 2 and power(spec.channels, 4) <= 32


def pieces(size: int, block: int) -> int:
    """Return how many blocks cover `size`."""
    return -(-size // block)


@dataclass(frozen=True, eq=False)
class Image:
    """Memory for the images [C, H, W] of all rows' batches: channels last with a border, or as PyTorch flattens.

    Channels last there may be more `lanes` than channels, so that a kernel can load several numbers at once.
    """

    data: Tensor
    shape: tuple[int, int, int]
    border: int
    flat: bool
    lanes: int

    def sizes(self, letter: str) -> dict[str, int]:
        """Return the distances of neighbours for a kernel, by the letter under which it knows the image."""
        channels, height, width = self.shape
        if self.flat:
            found = (channels * height * width, width, 1, height * width, 0)
        else:
            line = (width + 2 * self.border) * self.lanes
            found = ((height + 2 * self.border) * line, line, self.lanes, 1, self.border * (line + self.lanes))
        return {f"{letter}_{end}": size for end, size in zip("BYXC0", found, strict=True)}


class Layer(ABC):
    """A layer with its output, the gradient of its output, and the layer before it."""

    out: Image
    dout: Image
    before: Layer

    def __init__(self, program: Program, before: Layer | None) -> None:
        self.program: Program = proxy(program)  # no cycle: memory is given back at once with the program
        if before is not None:
            self.before = before

    def _make(self, shape: tuple[int, int, int], after: Spatial | None) -> None:
        """Get memory for images of a shape that the layer `after` will see."""
        border, lanes = 0, shape[0]
        if isinstance(after, Conv):
            border, lanes = after.padding, conv_lanes(self.program.mode, shape[0], merges(after))
        self.out = self.program.image(shape, border, flat=after is None, lanes=lanes)
        self.dout = self.program.image(shape, 0, flat=after is None)

    @abstractmethod
    def forward(self) -> None:
        """Write the output."""

    def spread(self) -> None:  # noqa: B027
        """Do what both ways back need."""

    @abstractmethod
    def backward(self) -> None:
        """Write the gradient of the layer before."""

    def weights(self) -> None:  # noqa: B027  (most layers have none)
        """Write the gradients of the layer's own parameters."""

    def prepare(self) -> None:  # noqa: B027
        """Do what needs the parameters only."""


class GatherLayer(Layer):
    """The samples of the step."""

    def __init__(self, program: Program, shape: tuple[int, ...], first: Spatial | None) -> None:
        super().__init__(program, None)
        stored = shape if len(shape) == 3 else (shape[0], 1, prod(shape[1:]))
        self.stored = (stored[0], stored[1], stored[2])
        crop = first if isinstance(first, Conv) else None
        self.corner = crop.corner if crop else (0, 0)
        self._make(crop.inputs if crop else self.stored, first)

    def forward(self) -> None:
        at, (channels, height, width) = self.program, self.stored
        at.launch(
            image_kernels.gather,
            pieces(at.batch * prod(self.out.shape), 1024),
            *(at.pool.x, at.rows.pick, self.out.data),
            scale=at.scale,
            shift=at.shift,
            S=at.rows.pick.shape[1],
            B=at.batch,
            C=channels,
            H=height,
            W=width,
            TOP=self.corner[0],
            LEFT=self.corner[1],
            HI=self.out.shape[1],
            WI=self.out.shape[2],
            **self.out.sizes("O"),
            BLOCK=1024,
        )

    def backward(self) -> None:
        """Nobody wants the gradient of samples."""


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
        lanes = before.out.lanes
        self.lines = pieces(span**2 * lanes, 16) * 16
        self.samples = conv_split(self.lines * self.units * self.windows, spec.outputs[1] * spec.outputs[2])
        self.splits = pieces(program.batch, self.samples)
        self.laid = program.buffer(self.lines, self.units * self.windows)
        self.part = program.buffer(self.splits, self.units * (self.lines * self.windows + 1), dtype=torch.float32)
        self.kernel = {"LANES": lanes, "OUT": spec.channels, "SPAN": span, "WIN": self.windows, "KP": self.lines}
        x = before.out.sizes("X")
        d = {name: value for name, value in self.dout.sizes("D").items() if name != "D_0"}
        self.places = {"B": program.batch, "PH": spec.outputs[1], "PW": spec.outputs[2], "POOL": spec.pool, **d}
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
        at, rows, spec = self.program, self.program.rows, self.spec
        at.launch(
            image_kernels.lay_out,
            pieces(to[0].numel(), 1024),
            *(rows.p, to),
            P_ROW=rows.p.stride(0),
            W_AT=spec.weight,
            C=spec.inputs[0],
            LANES=self.kernel["LANES"],
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
        at, rows, spec = self.program, self.program.rows, self.spec
        tile = conv_forward_tile(at.mode, apart=spec.pool == 2 and self.windows == 1)
        at.launch(
            image_kernels.conv_forward,
            pieces(at.batch * spec.outputs[1] * spec.outputs[2], tile["BM"]),
            *(self.before.out.data, self.laid, rows.p, self.out.data, self.arg.data),
            **self.common,
            **self.out.sizes("O"),
            P_ROW=rows.p.stride(0),
            B_AT=spec.bias or 0,
            RELU=spec.relu,
            BIAS=spec.bias is not None,
            BO=self.units,
            TURNED=self.turns,
            **tile,
        )

    def spread(self) -> None:
        if not self.carries:
            return
        at, f = self.program, self.full.sizes("F")
        at.launch(
            image_kernels.unpool,
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
        d = {name: value for name, value in self.before.dout.sizes("D").items() if name != "D_0"}
        at.launch(
            image_kernels.conv_input_gradient,
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
            **d,
            MODE=at.mode,
            TURNED=self.turns,
            KP=self.back_lines,
            BN=self.columns,
            **tile,
        )

    def weights(self) -> None:
        at, rows, spec = self.program, self.program.rows, self.spec
        dense = self.carries and self.windows == 1
        tile = conv_weight_tile(at.mode, self.units * self.windows, self.windows > 1, dense)
        dy, where = self.dout, {**self.common, "D_0": 0}
        if dense:
            dy = self.full
            where |= {**dy.sizes("D"), "PH": dy.shape[1], "PW": dy.shape[2], "POOL": 1}
        at.launch(
            image_kernels.conv_weight_gradient,
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
            image_kernels.fold,
            pieces(size, block),
            *(self.part, rows.g),
            G_ROW=rows.g.stride(0),
            W_AT=spec.weight,
            B_AT=spec.bias or 0,
            C=spec.inputs[0],
            KS=spec.kernel,
            **self.kernel,
            BIAS=spec.bias is not None,
            SPLITS=self.splits,
            SP=power(self.splits, 1),
            BO=self.units,
            BLOCK=block,
        )


class MaxPoolLayer(Layer):
    def __init__(self, program: Program, spec: MaxPool, before: Layer, after: Spatial | None) -> None:
        super().__init__(program, before)
        self._make(spec.outputs, after)
        self.arg = program.image(spec.outputs, 0, flat=after is None, dtype=torch.int8)
        channels, height, width = spec.inputs
        self.reach = pieces(spec.kernel, spec.stride)
        self.sizes = {"B": program.batch, "C": channels, "H": height, "W": width, "PH": spec.outputs[1]}
        self.sizes |= {"PW": spec.outputs[2], "KS": spec.kernel, "STRIDE": spec.stride, "PAD": spec.padding}
        self.sizes |= {name: value for name, value in self.dout.sizes("D").items() if name != "D_0"}

    def forward(self) -> None:
        blocks = pieces(self.program.batch * prod(self.out.shape), 1024)
        tensors = (self.before.out.data, self.out.data, self.arg.data)
        self.program.launch(
            image_kernels.pool_forward, blocks, *tensors, **self.sizes, **self.out.sizes("O"), BLOCK=1024
        )

    def backward(self) -> None:
        blocks = pieces(self.program.batch * prod(self.before.out.shape), 1024)
        tensors = (self.dout.data, self.arg.data, self.before.dout.data)
        self.program.launch(image_kernels.pool_backward, blocks, *tensors, **self.sizes, REACH=self.reach, BLOCK=1024)


class NormLayer(Layer):
    def __init__(self, program: Program, spec: Norm, before: Layer, after: Spatial | None) -> None:
        super().__init__(program, before)
        self.spec = spec
        self._make(spec.outputs, after)
        channels, height, width = spec.inputs
        block = max(1, 1024 // power(channels, 1))
        self.sizes = {"B": program.batch, "C": channels, "H": height, "W": width, "SIZE": spec.size}
        self.sizes |= {"BC": power(channels, 1), "BX": block}
        self.blocks = pieces(program.batch * height * width, block)
        self.powers = {"alpha": spec.alpha, "beta": spec.beta, "k": spec.k}

    def forward(self) -> None:
        tensors = (self.before.out.data, self.out.data)
        sizes = {**self.sizes, **self.out.sizes("O")}
        self.program.launch(image_kernels.norm_forward, self.blocks, *tensors, **self.powers, **sizes)

    def backward(self) -> None:
        tensors = (self.before.out.data, self.dout.data, self.before.dout.data)
        d = {name: value for name, value in self.dout.sizes("D").items() if name != "D_0"}
        self.program.launch(image_kernels.norm_backward, self.blocks, *tensors, **self.powers, **self.sizes, **d)


class LinearLayer(Layer):
    """A linear layer that is too wide to be computed in one piece with the loss."""

    def __init__(self, program: Program, spec: Linear, before: Layer) -> None:
        super().__init__(program, before)
        self.spec = spec
        self._make((spec.units, 1, 1), None)
        self.sizes = {"B": program.batch, "IN": spec.width, "OUT": spec.units, "RELU": spec.relu, "MODE": program.mode}
        self.block = min(64, power(program.batch))
        self.tiles = linear_tiles(program.mode)

    def forward(self) -> None:
        at, rows, spec = self.program, self.program.rows, self.spec
        at.launch(
            linear_kernels.linear_forward,
            pieces(spec.units, self.tiles[0]["BN"]) * pieces(at.batch, self.block),
            *(self.before.out.data, rows.p, self.out.data),
            P_ROW=rows.p.stride(0),
            W_AT=spec.weight,
            B_AT=spec.bias or 0,
            BIAS=spec.bias is not None,
            **self.sizes,
            BM=self.block,
            **self.tiles[0],
        )

    def backward(self) -> None:
        at, rows, spec = self.program, self.program.rows, self.spec
        at.launch(
            linear_kernels.linear_input_gradient,
            pieces(spec.width, self.tiles[1]["BN"]) * pieces(at.batch, self.block),
            *(self.dout.data, self.out.data, rows.p, self.before.dout.data),
            P_ROW=rows.p.stride(0),
            W_AT=spec.weight,
            **self.sizes,
            BM=self.block,
            **self.tiles[1],
        )

    def weights(self) -> None:
        _weight_gradient(self.program, self.spec, self.before.out.data, self.dout.data, self.out.data, self.spec.relu)


class TailLayer:
    """The last linear layers with the loss."""

    def __init__(self, program: Program, specs: tuple[Linear, ...], before: Layer) -> None:
        self.program: Program = proxy(program)
        self.specs, self.before = specs, before
        self.hidden = [program.buffer(program.batch, spec.units) for spec in specs[:-1]]
        self.errors = [program.buffer(program.batch, spec.units) for spec in specs]
        self.tile = tail_tile(program.mode)
        self.tiles = pieces(program.batch, self.tile["BM"])
        self.loss = program.buffer(self.tiles, dtype=torch.float32)

    def forward(self) -> None:
        at, rows, specs = self.program, self.program.rows, self.specs
        filled = [*specs, *[specs[-1]] * (3 - len(specs))]
        hidden = [*self.hidden, self.errors[0], self.errors[0]]
        errors = [*self.errors, *[self.errors[-1]] * (3 - len(specs))]
        widths = [spec.units for spec in filled]
        at.launch(
            linear_kernels.tail,
            self.tiles,
            *(
                self.before.out.data,
                rows.pick,
                at.pool.y,
                rows.p,
                self.before.dout.data,
                *hidden[:2],
                *errors,
                self.loss,
            ),
            S=rows.pick.shape[1],
            P_ROW=rows.p.stride(0),
            **{f"w{n}": spec.weight for n, spec in enumerate(filled, 1)},
            **{f"c{n}": spec.bias or 0 for n, spec in enumerate(filled, 1)},
            B=at.batch,
            LAYERS=len(specs),
            BIAS=specs[0].bias is not None,
            D0=specs[0].width,
            **{f"D{n}": units for n, units in enumerate(widths, 1)},
            **{f"P{n}": power(units) for n, units in enumerate(widths, 1)},
            PB=power(at.batch),
            MODE=at.mode,
            **self.tile,
        )

    def weights(self) -> None:
        inputs = [self.before.out.data, *self.hidden]
        for spec, x, error in zip(self.specs, inputs, self.errors, strict=True):
            _weight_gradient(self.program, spec, x, error, error, relu=False)


def _weight_gradient(at: Program, spec: Linear, x: Tensor, dy: Tensor, h: Tensor, relu: bool) -> None:
    tile = dict(linear_tiles(at.mode)[2])
    tile["BO"], tile["BI"] = min(tile["BO"], power(spec.units)), min(tile["BI"], power(spec.width))
    at.launch(
        linear_kernels.linear_weight_gradient,
        pieces(spec.units, tile["BO"]) * pieces(spec.width, tile["BI"]),
        *(x, dy, h, at.rows.g),
        G_ROW=at.rows.g.stride(0),
        W_AT=spec.weight,
        B_AT=spec.bias or 0,
        B=at.batch,
        IN=spec.width,
        OUT=spec.units,
        RELU=relu,
        BIAS=spec.bias is not None,
        MODE=at.mode,
        BB=min(64, power(at.batch)),
        **tile,
    )


def tail_length(layers: tuple[Linear, ...]) -> int:
    """Return how many of the last layers are computed in one piece with the loss."""
    length = 1
    same = [layer.bias is None for layer in layers]
    while length < min(3, len(layers)) and layers[-length - 1].units <= TAIL_WIDTH and same[-length - 1] == same[-1]:
        length += 1
    return length


KINDS: dict[type[Spatial], Any] = {Conv: ConvLayer, MaxPool: MaxPoolLayer, Norm: NormLayer}
