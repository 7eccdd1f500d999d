"""Gradients by hand for stacks of a chain of layers on a CPU, as batched matrix products.

For a step of a small net, `torch.vmap` and autograd run several hundred small operations; this runs about seventy.
Images are stored channels last, [R, B, H, W, C]; a convolution multiplies the patches under its kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

import torch
from torch import Tensor

from fedcat.data.pool import Pool
from fedcat.engines.gradients.base import Found, Gradients, Step
from fedcat.engines.gradients.chain import Chain, Conv, Linear, chain_of
from fedcat.engines.gradients.trials import disagrees
from fedcat.models.layout import Layout

MOST_PATCHES = 150_000
"""Number of values in the patches of a row's batch up to which this is faster than `torch.vmap` (docs/speed.md)."""
MOST_PARAMETERS = 250_000
"""Number of parameters up to which a net is small: all rows of a launch are in memory several times."""
SHORT = 16
"""Contiguous values below which patches are gathered by index; longer contiguous runs are faster to copy."""


def manual_gradients(layout: Layout, pool: Pool, batch: int) -> ManualGradients | None:
    """Return a net's gradients by hand, or None if there are none, if they are slower or differ from autograd's."""
    if layout.device.type != "cpu" or layout.parameter_size > MOST_PARAMETERS:
        return None
    found = layout.once(("manual gradients", pool.id), lambda: _tried(layout, pool))
    return found if found is not None and batch * found.patches <= MOST_PATCHES else None


def _tried(layout: Layout, pool: Pool) -> ManualGradients | None:
    chain = chain_of(layout, pool)
    if isinstance(chain, str):
        return None
    if not all(isinstance(layer, Conv) and layer.stride == 1 for layer in chain.spatial):
        return None
    made = ManualGradients(layout, pool, chain)
    return None if disagrees(made, batch=4) else made


class ManualGradients(Gradients):
    """Gradients of the cross entropy, layer by layer.

    Parameters
    ----------
    layout, pool
        See `Gradients`.
    chain : Chain
        The net: convolutions, optionally pooled 2 x 2, and linear layers.
    """

    name = "hand-written gradients"

    def __init__(self, layout: Layout, pool: Pool, chain: Chain) -> None:
        super().__init__(layout, pool)
        images = [_Convolution(layer) for layer in chain.spatial if isinstance(layer, Conv)]
        self.crop = (images[0].spec.corner, images[0].spec.inputs) if images else None
        linear = [_Linear(layer) for layer in chain.linear]
        self.layers: list[_Layer] = [*images, _Flatten(), *linear] if images else [*linear]
        self.layers[0].first = True
        self.patches = sum(layer.size * prod(layer.sides) for layer in images)

    def of(self, step: Step) -> Found:
        """Return losses and gradients; there are no buffers."""
        losses, g = self.gradients(step.p, *step.samples(self.pool, self.layout.dtype), step.mask())
        return losses, g, step.buffers

    def gradients(self, p: Tensor, x: Tensor, y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the losses [R] of rows [R, P] on batches [R, B, ...], and their gradients [R, P].

        `mask` [R, B] is 0 for samples that do not count.
        """
        if self.crop is not None:
            (top, left), (_, height, width) = self.crop
            x = x[..., top : top + height, left : left + width].permute(0, 1, 3, 4, 2)
        else:
            x = x.flatten(2)
        for layer in self.layers:
            x = layer.forward(p, x)
        scores = torch.log_softmax(x, 2)
        share = x.new_full(y.shape, 1 / x.shape[1]) if mask is None else mask / mask.sum(1, keepdim=True)
        where = y[..., None]
        losses = -(scores.gather(2, where)[..., 0] * share).sum(1)
        d = scores.exp_()
        d.scatter_add_(2, where, d.new_full((1, 1, 1), -1.0).expand(where.shape))
        d *= share[..., None]
        g = torch.empty_like(p)
        for layer in reversed(self.layers):
            d = layer.backward(p, g, d)
            layer.forget()
        return losses, g


class _Layer(ABC):
    """A layer that keeps what its backward pass needs; the gradient of the `first` layer's input is not needed."""

    first = False
    kept: tuple[str, ...] = ()

    def forget(self) -> None:
        """Drop what was kept for the backward pass."""
        for name in self.kept:
            self.__dict__.pop(name, None)

    @abstractmethod
    def forward(self, p: Tensor, x: Tensor) -> Tensor:
        """Return the output."""

    @abstractmethod
    def backward(self, p: Tensor, g: Tensor, d: Tensor) -> Tensor:
        """Write the parameters' gradients into `g` and return the input's gradient, given that of the output, `d`."""


class _Flatten(_Layer):
    """Flattens images in PyTorch's order."""

    def forward(self, p: Tensor, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x.permute(0, 1, 4, 2, 3).flatten(2)

    def backward(self, p: Tensor, g: Tensor, d: Tensor) -> Tensor:
        rows, batch, height, width, channels = self.shape
        return d.view(rows, batch, channels, height, width).permute(0, 1, 3, 4, 2)


class _Linear(_Layer):
    kept = ("x", "out")

    def __init__(self, spec: Linear) -> None:
        self.spec = spec

    def _weight(self, rows: Tensor) -> Tensor:
        at, size = self.spec.weight, self.spec.units * self.spec.width
        return rows[:, at : at + size].view(len(rows), self.spec.units, self.spec.width)

    def forward(self, p: Tensor, x: Tensor) -> Tensor:
        spec, self.x = self.spec, x
        weight = self._weight(p).transpose(1, 2)
        if spec.bias is None:
            out = torch.bmm(x, weight)
        else:
            out = torch.baddbmm(p[:, None, spec.bias : spec.bias + spec.units], x, weight)
        self.out = out.clamp_min_(0) if spec.relu else out
        return self.out

    def backward(self, p: Tensor, g: Tensor, d: Tensor) -> Tensor:
        spec = self.spec
        if spec.relu:
            d = torch.ops.aten.threshold_backward(d, self.out, 0)
        self._weight(g).copy_(torch.bmm(d.transpose(1, 2), self.x))
        if spec.bias is not None:
            g[:, spec.bias : spec.bias + spec.units] = d.sum(1)
        return d if self.first else torch.bmm(d, self._weight(p))


class _Convolution(_Layer):
    """A convolution, optionally pooled 2 x 2 and with ReLU.

    To be pooled, its output is stored as [R, 4, B, H / 2, W / 2, C], which makes each of the four positions in the
    windows contiguous.
    """

    kept = ("patches", "places", "out")

    def __init__(self, spec: Conv) -> None:
        self.spec = spec
        self.size = spec.inputs[0] * spec.kernel**2
        self.sides = [side + 2 * spec.padding - spec.kernel + 1 for side in spec.inputs[1:]]
        self.positions: dict[int, Tensor] = {}

    def _weight(self, rows: Tensor) -> Tensor:
        """Return the weights [R, out, in, ky, kx]."""
        spec = self.spec
        weight = rows[:, spec.weight : spec.weight + spec.channels * self.size]
        return weight.view(len(rows), spec.channels, spec.inputs[0], spec.kernel, spec.kernel)

    def forward(self, p: Tensor, x: Tensor) -> Tensor:
        spec, rows, batch = self.spec, len(p), x.shape[1]
        x = _padded(x, spec.padding)
        if spec.inputs[0] * spec.kernel < SHORT:
            self.patches = x.view(rows, -1).index_select(1, self._positions(batch)).view(rows, -1, self.size)
        else:
            self.patches = _patches(x, spec.kernel, spec.pool)
        weight = self._weight(p).permute(0, 3, 4, 2, 1).reshape(rows, -1, spec.channels)
        if spec.bias is None:
            out = torch.bmm(self.patches, weight)
        else:
            out = torch.baddbmm(p[:, None, spec.bias : spec.bias + spec.channels], self.patches, weight)
        if spec.pool == 2:
            self.places = out.view(rows, 4, -1).unbind(1)
            a, b, c, d = self.places
            out = torch.maximum(torch.maximum(a, b), torch.maximum(c, d))
        self.out = out.clamp_min_(0) if spec.relu else out
        return self.out.view(rows, batch, *spec.outputs[1:], spec.channels)

    def backward(self, p: Tensor, g: Tensor, d: Tensor) -> Tensor:
        spec, rows, batch = self.spec, len(p), d.shape[1]
        d = d.reshape(self.out.shape)
        if spec.relu:
            d = torch.ops.aten.threshold_backward(d, self.out, 0)
        if spec.pool == 2:
            d = self._unpooled(d)
        d = d.view(rows, -1, spec.channels)
        found = torch.bmm(self.patches.transpose(1, 2), d)
        found = found.view(rows, spec.kernel, spec.kernel, spec.inputs[0], spec.channels)
        self._weight(g).copy_(found.permute(0, 4, 3, 1, 2))
        if spec.bias is not None:
            g[:, spec.bias : spec.bias + spec.channels] = d.sum(1)
        if self.first:
            return d
        turned = self._weight(p).flip(3, 4).permute(0, 3, 4, 1, 2).reshape(rows, -1, spec.inputs[0])
        back = torch.bmm(_patches(self._image(d, batch), spec.kernel), turned)
        return back.view(rows, batch, *spec.inputs[1:], spec.inputs[0])

    def _positions(self, batch: int) -> Tensor:
        """Return the indices of the values under the kernel in a batch of padded images, in the order of `_patches`."""
        if batch not in self.positions:
            spec = self.spec
            shape = (1, batch, *(side + 2 * spec.padding for side in spec.inputs[1:]), spec.inputs[0])
            self.positions[batch] = _patches(torch.arange(prod(shape)).view(shape), spec.kernel, spec.pool).flatten()
        return self.positions[batch]

    def _unpooled(self, d: Tensor) -> Tensor:
        """Return the gradient before pooling: the window's at the first position with its largest value, else zero."""
        full = d.new_empty(len(d), 4, d[0].numel())
        nothing = torch.zeros_like(d)
        for place, to in zip(self.places[:3], full.unbind(1), strict=False):
            torch.where(place == self.out, d, nothing, out=to)
            d = d - to
        full[:, 3] = d
        return full

    def _image(self, d: Tensor, batch: int) -> Tensor:
        """Return the gradient as images, with the border that the backward pass needs."""
        spec, sides, edge = self.spec, self.sides, self.spec.kernel - 1 - self.spec.padding
        image = d.new_zeros(len(d), batch, *(side + 2 * edge for side in sides), spec.channels)
        inner = image[:, :, edge : edge + sides[0], edge : edge + sides[1]]
        if spec.pool == 1:
            inner.copy_(d.view(inner.shape))
            return image
        _, height, width = spec.outputs
        for place, values in enumerate(d.view(len(d), 4, batch, height, width, spec.channels).unbind(1)):
            inner[:, :, place // 2 : 2 * height : 2, place % 2 : 2 * width : 2] = values
        return image


def _padded(x: Tensor, padding: int) -> Tensor:
    """Return contiguous images with a border of zeros."""
    if not padding:
        return x.contiguous()
    rows, batch, height, width, channels = x.shape
    wide = x.new_zeros(rows, batch, height + 2 * padding, width + 2 * padding, channels)
    wide[:, :, padding : padding + height, padding : padding + width] = x
    return wide


def _patches(x: Tensor, kernel: int, pool: int = 1) -> Tensor:
    """Return the patches under a kernel: [R, positions in a window * B * windows, ky * kx * C]."""
    rows, batch, height, width, channels = x.shape
    line = width * channels
    windows = ((height - kernel + 1) // pool, (width - kernel + 1) // pool)
    sizes = (rows, pool, pool, batch, *windows, kernel, kernel * channels)
    steps = (batch * height * line, line, channels, height * line, pool * line, pool * channels, line, 1)
    return x.as_strided(sizes, steps).reshape(rows, pool * pool * batch * prod(windows), kernel * kernel * channels)
