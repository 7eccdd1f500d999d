"""One training step of a chain of layers, as launches of the Triton kernels on fixed memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedcat.data.augment import Augment
from fedcat.data.pool import Pool
from fedcat.engines.gradients.base import Found, Gradients, InPlace, Inputs, Step, no_inputs
from fedcat.engines.gradients.chain import AvgPool, Chain, Conv, MaxPool, Norm, Spatial
from fedcat.engines.gradients.outputs_loss import OutputsLoss
from fedcat.engines.gradients.triton import linear_kernels
from fedcat.engines.gradients.triton.conv_layer import ConvLayer
from fedcat.engines.gradients.triton.layers import (
    MODES,
    AvgPoolLayer,
    GatherLayer,
    Image,
    Layer,
    MaxPoolLayer,
    NormLayer,
    launch,
    pieces,
)
from fedcat.engines.gradients.triton.linear_layers import LinearLayer, LossLayer, TailLayer, tail_length
from fedcat.engines.step_buffers import StepBuffers
from fedcat.models.layout import Layout

KINDS: dict[type[Spatial], Any] = {Conv: ConvLayer, MaxPool: MaxPoolLayer, AvgPool: AvgPoolLayer, Norm: NormLayer}
"""The class that launches the kernels of each kind of image layer."""


class TritonGradients(Gradients):
    """Gradients of a chain of layers by kernels of our own, a dozen per step however many rows there are.

    Parameters
    ----------
    layout, pool, precision
        See `Gradients`.
    chain : Chain
        The net.
    outputs_loss : OutputsLoss, optional
        The loss, if it is not the cross entropy.
    """

    name = "fused"

    def __init__(
        self, layout: Layout, pool: Pool, chain: Chain, precision: str, outputs_loss: OutputsLoss | None = None
    ) -> None:
        super().__init__(layout, pool, precision)
        self.chain, self.outputs_loss = chain, outputs_loss
        if outputs_loss is not None:
            self.rule, self.loss = outputs_loss.rule, outputs_loss.loss
            self.name = "fused, loss by autograd"
        self.independent = outputs_loss is None

    def of(self, step: Step) -> Found:
        """Return losses and gradients, computed on memory that is made for them; there are no buffers."""
        rows, batch = step.index.shape
        buffers = StepBuffers.make(rows, self.layout.parameter_size, 0, 1, batch, like=step.p)
        buffers.p.copy_(step.p)
        buffers.index.copy_(step.index[:, None])
        buffers.count.fill_(1)
        inputs = step.inputs or no_inputs(step.p)
        drawn = {n: t[:, None] for n, t in inputs["drawn"].items()}
        found = self.on(buffers, {**inputs, "drawn": drawn})
        found.gradients(0, rows)
        return found.losses.sum(1), buffers.g.clone(), step.buffers

    def on(
        self, buffers: StepBuffers, inputs: Inputs, augment: Augment | None = None, numbers: Tensor | None = None
    ) -> Program:
        """Return the kernels' launches on fixed memory."""
        return Program(self.chain, self.pool, buffers, self.precision, self.outputs_loss, inputs)


class Program(InPlace):
    """Launches the kernels of a net on the rows of a launch.

    Parameters
    ----------
    chain : Chain
        The net.
    pool : Pool
        The training samples.
    buffers : StepBuffers
        The rows and their progress.
    precision : str
        ``fp32``, ``tf32`` or ``bf16``.
    outputs_loss : OutputsLoss, optional
        The loss, if it is not the cross entropy.
    inputs : mapping, optional
        What that loss gets.
    """

    def __init__(
        self,
        chain: Chain,
        pool: Pool,
        buffers: StepBuffers,
        precision: str,
        outputs_loss: OutputsLoss | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        super().__init__(buffers)
        self.mode, self.pool = MODES[precision], pool
        self.count, _, self.batch = buffers.index.shape
        self.kept = torch.bfloat16 if precision == "bf16" else torch.float32
        self.scale, self.shift = _affine(pool)
        self.width = self.count
        self.ahead = 0
        following = [*chain.spatial, None]
        self.layers: list[Layer] = [GatherLayer(self, chain.shape, following[0])]
        for spec, after in zip(chain.spatial, following[1:], strict=True):
            self.layers.append(KINDS[type(spec)](self, spec, self.layers[-1], after))
        cut = len(chain.linear) - (0 if outputs_loss else tail_length(chain.linear))
        for linear in chain.linear[:cut]:
            self.layers.append(LinearLayer(self, linear, self.layers[-1], last=linear is chain.linear[-1]))
        self.end: TailLayer | LossLayer
        if outputs_loss is None:
            self.end = TailLayer(self, chain.linear[cut:], self.layers[-1])
        else:
            self.end = LossLayer(self, outputs_loss, inputs or no_inputs(buffers.p), self.layers[-1])
        self.losses = self.end.losses

    def buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeroed memory for every row."""
        return torch.zeros(self.count, *shape, dtype=dtype or self.kept, device=self.buffers.p.device)

    def image(self, shape: tuple[int, int, int], border: int, flat: bool, dtype: torch.dtype | None = None) -> Image:
        """Return memory for the images of all batches."""
        channels, height, width = shape
        size = channels * (height + 2 * border) * (width + 2 * border)
        return Image(self.buffer(self.batch, size, dtype=dtype), shape, 0 if flat else border, flat)

    def gradients(self, ahead: int, width: int) -> None:
        """Compute the gradients of one step for the first `width` rows in `order`."""
        self.ahead, self.width = ahead, width
        for layer in self.layers:
            layer.prepare()
        for layer in self.layers:
            layer.forward()
        self.end.forward()
        for layer in reversed(self.layers[1:]):
            layer.spread()
            layer.weights()
            if layer is not self.layers[1]:  # the gradient of the samples is not needed
                layer.backward()
        self.end.weights()

    def descend(self, ahead: int, width: int) -> None:
        """Take the step of SGD."""
        at, size = self.buffers, self.buffers.p.shape[1]
        linear_kernels.descend[pieces(size, 1024), width](
            *(at.p, at.v, at.g, at.lr, at.lr_decay, at.momentum, at.decay, at.step, at.count, at.order),
            *(ahead, size, at.p.stride(0), at.lr_decays, 1024),
        )

    def launch(self, kernel: Any, blocks: int, *tensors: Tensor, **sizes: Any) -> None:
        """Launch a kernel on the first `width` rows; add the arguments that all kernels take."""
        at = self.buffers
        state = {"step": at.step, "count": at.count, "order": at.order, "ahead": self.ahead}
        launch(kernel, (blocks, self.width), *tensors, **state, **sizes)


def _affine(pool: Pool) -> tuple[Tensor, Tensor]:
    """Return the scale and the shift that normalize the stored values, per channel."""
    channels = pool.shape[0]
    how = pool.normalize
    scale, mean, std = (1.0, (0.0,), (1.0,)) if how is None else (how.scale, how.mean, how.std)
    means, stds = (torch.tensor(values, dtype=torch.float64).expand(channels) for values in (mean, std))
    device = pool.x.device
    return (1 / (scale * stds)).to(device, torch.float32), (-means / stds).to(device, torch.float32)
