"""Nets that are chains of known layers: those with gradients of our own, by hand on a CPU and in Triton on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from fedcat.data.pool import Pool
from fedcat.models.layout import Layout
from fedcat.models.nets import CenterCrop, Net


@dataclass(frozen=True)
class Conv:
    """A convolution with optional ReLU and 2 x 2 pooling; `weight` and `bias` are offsets in the row."""

    weight: int
    bias: int | None
    stored: tuple[int, int, int]
    corner: tuple[int, int]
    inputs: tuple[int, int, int]
    kernel: int
    padding: int
    channels: int
    relu: bool = False
    pool: int = 1
    stride: int = 1

    @property
    def outputs(self) -> tuple[int, int, int]:
        """The output shape."""
        height, width = ((side + 2 * self.padding - self.kernel) // self.stride + 1 for side in self.inputs[1:])
        return self.channels, height // self.pool, width // self.pool


@dataclass(frozen=True)
class _Pool:
    """Pooling with windows that may overlap."""

    inputs: tuple[int, int, int]
    outputs: tuple[int, int, int]
    kernel: int
    stride: int
    padding: int


class MaxPool(_Pool):
    """Max pooling."""


class AvgPool(_Pool):
    """Average pooling; zeros of the padding count."""


@dataclass(frozen=True)
class Norm:
    """Local response normalization over channels."""

    inputs: tuple[int, int, int]
    size: int
    alpha: float
    beta: float
    k: float

    @property
    def outputs(self) -> tuple[int, int, int]:
        """The output shape."""
        return self.inputs


@dataclass(frozen=True)
class Linear:
    """A linear layer with optional ReLU."""

    weight: int
    bias: int | None
    width: int
    units: int
    relu: bool = False


Spatial = Conv | MaxPool | AvgPool | Norm


@dataclass(frozen=True)
class Chain:
    """Image layers, then linear layers, the last of which gives the logits."""

    shape: tuple[int, ...]
    spatial: tuple[Spatial, ...]
    linear: tuple[Linear, ...]


class Unknown(Exception):
    """The net is not a chain of known layers; the message says why."""


def chain_of(layout: Layout, pool: Pool) -> Chain | str:
    """Return the chain of a net, or why the net is not a chain."""

    def find() -> Chain | str:
        try:
            return _read(layout, pool.shape)
        except Unknown as reason:
            return str(reason)

    return layout.once(("chain", pool.shape), find)


def _read(layout: Layout, shape: tuple[int, ...]) -> Chain:
    if layout.buffers or layout.outside(layout.net):
        raise Unknown("it has buffers or frozen parameters")
    places = {slot.name: slot.start for slot in layout.parameters}
    reader = _Reader(shape, places)
    layers = _leaves("", layout.net)
    if len({layer for _, layer in layers}) < len(layers):
        raise Unknown("it uses a layer twice")
    for name, layer in layers:
        reader.add(name, layer)
    if not reader.linear or reader.linear[-1].relu:
        raise Unknown("its last layer is not linear")
    if reader.used != set(places):
        raise Unknown("it has parameters that no layer uses")
    return Chain(shape, tuple(reader.spatial), tuple(reader.linear))


def _leaves(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers in the order in which they run, each with the prefix of its parameters' names."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "parametrizations")
    if any(getattr(module, name, None) for name in hooks):
        raise Unknown(f"its layer {type(module).__name__} has hooks")
    if type(module) is nn.Sequential or type(module) is Net:  # both run their children in this order
        return [leaf for part, child in module._modules.items() if child for leaf in _leaves(f"{name}{part}.", child)]
    return [(name, module)]


KNOWN = (
    *(nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.LocalResponseNorm, CenterCrop),
    *(nn.ReLU, nn.Flatten, nn.Linear, nn.Identity),
)
"""The layers of chains; subclasses may compute anything."""


class _Reader:
    """Reads a net's layers in order and tracks the shape."""

    def __init__(self, shape: tuple[int, ...], places: dict[str, int]) -> None:
        self.places = places
        self.shape, self.stored, self.corner = shape, shape, (0, 0)
        self.flat = len(shape) == 1
        self.spatial: list[Spatial] = []
        self.linear: list[Linear] = []
        self.used: set[str] = set()

    def add(self, prefix: str, layer: nn.Module) -> None:
        """Add the next layer, whose parameters' names begin with `prefix`."""
        self.prefix, name = prefix, type(layer).__name__
        method = getattr(self, f"_{name.lower()}", None)
        if method is None or type(layer) not in KNOWN:
            raise Unknown(f"its layer {name} has no fused kernel")
        method(layer)

    def _identity(self, layer: nn.Identity) -> None:
        pass

    def _centercrop(self, layer: CenterCrop) -> None:
        if self.spatial or self.shape != self.stored or len(self.shape) != 3 or min(self.shape[1:]) < layer.size:
            raise Unknown("it crops images other than its input")
        self.corner = ((self.shape[1] - layer.size) // 2, (self.shape[2] - layer.size) // 2)
        self.shape = (self.shape[0], layer.size, layer.size)

    def _image(self, layer: nn.Module) -> tuple[int, int, int]:
        if self.flat or len(self.shape) != 3:
            raise Unknown(f"its layer {type(layer).__name__} is not applied to images")
        return self.shape[0], self.shape[1], self.shape[2]

    def _conv2d(self, layer: nn.Conv2d) -> None:
        inputs = self._image(layer)
        simple = len(set(layer.stride)) == 1 and layer.dilation == (1, 1) and layer.groups == 1
        square = (
            len(set(layer.kernel_size)) == 1 and not isinstance(layer.padding, str) and len(set(layer.padding)) == 1
        )
        if not simple or not square or layer.padding_mode != "zeros":
            raise Unknown("its convolution has groups or dilation, is not square or not padded by a number of zeros")
        if int(layer.padding[0]) >= layer.kernel_size[0]:
            raise Unknown("its convolution is padded by its kernel size or more")
        stored = (self.stored[0], self.stored[1], self.stored[2]) if not self.spatial else inputs
        corner = (0, 0) if self.spatial else self.corner
        weight, bias = self._place("weight"), None if layer.bias is None else self._place("bias")
        kernel, padding, stride = layer.kernel_size[0], int(layer.padding[0]), layer.stride[0]
        made = Conv(weight, bias, stored, corner, inputs, kernel, padding, layer.out_channels)
        self._append(replace(made, stride=stride))

    def _append(self, layer: Spatial) -> None:
        if min(layer.outputs) < 1:
            raise Unknown("an image gets too small")
        self.spatial.append(layer)
        self.shape = layer.outputs

    def _relu(self, layer: nn.ReLU) -> None:
        if self.linear and not self.linear[-1].relu:
            self.linear[-1] = replace(self.linear[-1], relu=True)
        elif not self.flat and self.spatial and isinstance(last := self.spatial[-1], Conv) and not last.relu:
            self.spatial[-1] = replace(last, relu=True)
        else:
            raise Unknown("its ReLU does not follow a convolution or a linear layer")

    def _maxpool2d(self, layer: nn.MaxPool2d) -> None:
        inputs = self._image(layer)
        sizes = (layer.kernel_size, layer.stride, layer.padding)
        if any(not isinstance(size, int) for size in sizes) or layer.dilation != 1 or layer.return_indices:
            raise Unknown("its pooling is not square")
        kernel, stride, padding = (int(size) for size in sizes if isinstance(size, int))
        if kernel**2 > 127:
            raise Unknown("its pooling windows are too large")
        last = self.spatial[-1] if self.spatial else None
        even = not layer.ceil_mode or all(side % 2 == 0 for side in inputs[1:])
        if isinstance(last, Conv) and last.pool == 1 and (kernel, stride, padding) == (2, 2, 0) and even:
            self.spatial[-1] = pooled = replace(last, pool=2)
            if min(pooled.outputs) < 1:
                raise Unknown("an image gets too small")
            self.shape = pooled.outputs
            return
        if not self.spatial:
            raise Unknown("it begins with pooling")
        height, width = (_windows(side, kernel, stride, padding, layer.ceil_mode) for side in inputs[1:])
        self._append(MaxPool(inputs, (inputs[0], height, width), kernel, stride, padding))

    def _avgpool2d(self, layer: nn.AvgPool2d) -> None:
        if not self.spatial:
            raise Unknown("it begins with pooling")
        inputs = self._image(layer)
        if layer.ceil_mode or not layer.count_include_pad or layer.divisor_override is not None:
            raise Unknown("its average pooling does not divide whole windows by their size")
        kernel, stride, padding = (_square(size) for size in (layer.kernel_size, layer.stride, layer.padding))
        height, width = (_windows(side, kernel, stride, padding, ceil=False) for side in inputs[1:])
        self._append(AvgPool(inputs, (inputs[0], height, width), kernel, stride, padding))

    def _adaptiveavgpool2d(self, layer: nn.AdaptiveAvgPool2d) -> None:
        inputs = self._image(layer)
        size = _square(layer.output_size)
        kernel = inputs[1] // max(1, size)
        if inputs[1:] != (kernel * size, kernel * size):
            raise Unknown("its adaptive pooling has windows that are not square or not equal")
        self._avgpool2d(nn.AvgPool2d(kernel))

    def _localresponsenorm(self, layer: nn.LocalResponseNorm) -> None:
        if not self.spatial:
            raise Unknown("it begins with a normalization")
        self._append(Norm(self._image(layer), layer.size, layer.alpha, layer.beta, layer.k))

    def _flatten(self, layer: nn.Flatten) -> None:
        if (layer.start_dim, layer.end_dim) != (1, -1):
            raise Unknown("it flattens only some dimensions")
        if self.shape != self.stored and not self.spatial:
            raise Unknown("it crops images that no convolution sees")
        self.flat = True

    def _linear(self, layer: nn.Linear) -> None:
        inputs = self.linear[-1].units if self.linear else _product(self.shape)
        if not self.flat or layer.in_features != inputs or (self.linear and not self.linear[-1].relu):
            raise Unknown("its linear layers do not form a chain with ReLU between them")
        bias = None if layer.bias is None else self._place("bias")
        self.linear.append(Linear(self._place("weight"), bias, inputs, layer.out_features))

    def _place(self, kind: str) -> int:
        """Return where a parameter of the current layer begins in the row."""
        name = self.prefix + kind
        if name not in self.places:
            raise Unknown("it uses a parameter twice")
        self.used.add(name)
        return self.places[name]


def _square(size: int | tuple[int | None, ...] | None) -> int:
    """Return a size of pooling that is the same in both directions."""
    first, *others = size if isinstance(size, tuple) else (size,)
    if first is None or any(side != first for side in others):
        raise Unknown("its pooling is not square")
    return first


def _windows(side: int, kernel: int, stride: int, padding: int, ceil: bool) -> int:
    """Return the number of pooling windows along a side; with `ceil`, one may extend past the edge, not begin there."""
    span = side + 2 * padding - kernel
    count = -(-span // stride) + 1 if ceil else span // stride + 1
    if ceil and (count - 1) * stride >= side + padding:
        count -= 1
    return count


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for side in shape:
        total *= side
    return total
