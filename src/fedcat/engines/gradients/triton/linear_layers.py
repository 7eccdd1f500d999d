"""Linear layers and the loss: their memory and their kernel launches."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import proxy

import torch
from torch import Tensor

from fedcat.engines.gradients.base import Inputs
from fedcat.engines.gradients.chain import Linear
from fedcat.engines.gradients.outputs_loss import OutputsLoss
from fedcat.engines.gradients.triton import linear_kernels
from fedcat.engines.gradients.triton.layers import Layer, pieces, power
from fedcat.engines.gradients.triton.tiles import linear_tiles, tail_tile

if TYPE_CHECKING:
    from fedcat.engines.gradients.triton.gradients import Program

TAIL_WIDTH = 256
"""Number of units up to which a hidden layer is computed in one kernel with the loss."""
TAIL_SIZE = 2**14
"""Number of weights, padded to powers of two, up to which a layer after the first fits into that kernel."""


class LinearLayer(Layer):
    """A linear layer that is not computed in one kernel with the loss; the `last` one gives outputs in float32."""

    def __init__(self, program: Program, spec: Linear, before: Layer, last: bool = False) -> None:
        super().__init__(program, before)
        self.spec = spec
        self._make((spec.units, 1, 1), None, torch.float32 if last else None)
        self.sizes = {"B": program.batch, "IN": spec.width, "OUT": spec.units, "RELU": spec.relu, "MODE": program.mode}
        self.block = min(64, power(program.batch))
        self.tiles = linear_tiles(program.mode)

    def forward(self) -> None:
        at, rows, spec = self.program, self.program.buffers, self.spec
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
        at, rows, spec = self.program, self.program.buffers, self.spec
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
    """The last linear layers and the loss, in one kernel."""

    def __init__(self, program: Program, specs: tuple[Linear, ...], before: Layer) -> None:
        self.program: Program = proxy(program)
        self.specs, self.before = specs, before
        self.hidden = [program.buffer(program.batch, spec.units) for spec in specs[:-1]]
        self.errors = [program.buffer(program.batch, spec.units) for spec in specs]
        self.tile = tail_tile(program.mode)
        self.tiles = pieces(program.batch, self.tile["BM"])
        self.losses = program.buffer(self.tiles, dtype=torch.float32)

    def forward(self) -> None:
        at, rows, specs = self.program, self.program.buffers, self.specs
        filled = [*specs, *[specs[-1]] * (3 - len(specs))]
        hidden = [*self.hidden, self.errors[0], self.errors[0]]
        errors = [*self.errors, *[self.errors[-1]] * (3 - len(specs))]
        sizes = [spec.units for spec in filled]
        at.launch(
            linear_kernels.tail,
            self.tiles,
            *(
                self.before.out.data,
                rows.index,
                at.pool.y,
                rows.p,
                self.before.dout.data,
                *hidden[:2],
                *errors,
                self.losses,
            ),
            S=rows.index.shape[1],
            P_ROW=rows.p.stride(0),
            **{f"w{n}": spec.weight for n, spec in enumerate(filled, 1)},
            **{f"c{n}": spec.bias or 0 for n, spec in enumerate(filled, 1)},
            B=at.batch,
            LAYERS=len(specs),
            BIAS=specs[0].bias is not None,
            D0=specs[0].width,
            **{f"D{n}": units for n, units in enumerate(sizes, 1)},
            **{f"P{n}": power(units) for n, units in enumerate(sizes, 1)},
            PB=power(at.batch),
            MODE=at.mode,
            **self.tile,
        )

    def weights(self) -> None:
        inputs = [self.before.out.data, *self.hidden]
        for spec, x, error in zip(self.specs, inputs, self.errors, strict=True):
            _weight_gradient(self.program, spec, x, error, error, relu=False)


class LossLayer:
    """A loss of the net's outputs, see `OutputsLoss`, in PyTorch's operations.

    It is computed for all rows: gathering those that still train would take more kernels than it saves. What it writes
    for the others is not read.
    """

    def __init__(self, program: Program, loss: OutputsLoss, inputs: Inputs, before: Layer) -> None:
        self.program: Program = proxy(program)
        self.loss, self.inputs, self.before = loss, inputs, before
        self.losses = program.buffer(1, dtype=torch.float32)

    def forward(self) -> None:
        """Write the gradient of the outputs; keep what the loss adds to the gradient of the last layer."""
        rows, ahead = self.program.buffers, self.program.ahead
        active, step = rows.active(ahead), rows.now(ahead)
        index = torch.where(active, rows.index.index_select(1, step)[:, 0].long(), 0)
        drawn = {name: values.index_select(1, step)[:, 0] for name, values in self.inputs["drawn"].items()}
        losses, gradient, self.added = self.loss.of(
            self.before.out.data, rows.p, index, {**self.inputs, "drawn": drawn}
        )
        self.before.dout.data.copy_(gradient)
        self.losses.add_(torch.where(active, losses[:, None], 0.0))

    def weights(self) -> None:
        """Add the last layer's part to its gradient."""
        for place, gradient in self.added:
            self.program.buffers.g[:, place] += gradient


def _weight_gradient(at: Program, spec: Linear, x: Tensor, dy: Tensor, h: Tensor, relu: bool) -> None:
    tile = dict(linear_tiles(at.mode)[2])
    tile["BO"], tile["BI"] = min(tile["BO"], power(spec.units)), min(tile["BI"], power(spec.width))
    at.launch(
        linear_kernels.linear_weight_gradient,
        pieces(spec.units, tile["BO"]) * pieces(spec.width, tile["BI"]),
        *(x, dy, h, at.buffers.g),
        G_ROW=at.buffers.g.stride(0),
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
    """Return how many of the last layers are computed in one kernel with the loss."""
    length = 1
    same = [layer.bias is None for layer in layers]
    while length < min(3, len(layers)) and same[-length - 1] == same[-1]:
        hidden, after = layers[-length - 1].units, layers[-length].units
        if hidden > TAIL_WIDTH or power(hidden) * power(after) > TAIL_SIZE:
            break
        length += 1
    return length
