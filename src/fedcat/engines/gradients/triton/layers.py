"""The base class of a chain's layers, and the image layers without parameters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any
from weakref import proxy

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fedcat.engines.gradients.chain import AvgPool, Conv, MaxPool, Norm, Spatial
from fedcat.engines.gradients.triton import image_kernels

if TYPE_CHECKING:
    from fedcat.engines.gradients.triton.gradients import Program


MODES = {"fp32": "ieee", "tf32": "tf32", "bf16": "bf16"}
"""What Triton calls the precisions."""


def power(size: int, least: int = 16) -> int:
    """Return the smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def merges(spec: Conv) -> bool:
    """Return whether the positions of a convolution's pooling windows are columns of one product."""
    return spec.pool == 2 and spec.stride == 1 and power(spec.channels, 4) <= 32


def pieces(size: int, block: int) -> int:
    """Return how many blocks cover `size`."""
    return -(-size // block)


def launch(kernel: Any, grid: tuple[int, int], *tensors: Tensor, **sizes: Any) -> None:
    """Launch a kernel; if a GPU has less shared memory than the tile needs, its loop gets fewer pipeline stages."""
    while True:
        try:
            kernel[grid](*tensors, **sizes)
            return
        except OutOfResources:
            if sizes.get("num_stages", 1) == 1:
                raise
            sizes["num_stages"] -= 1


@dataclass(frozen=True, eq=False)
class Image:
    """Memory for the images [C, H, W] of all rows' batches: channels last with a border, or in PyTorch's order."""

    data: Tensor
    shape: tuple[int, int, int]
    border: int
    flat: bool

    def sizes(self, letter: str) -> dict[str, int]:
        """Return the strides and the offset for a kernel, under names that begin with `letter`."""
        channels, height, width = self.shape
        if self.flat:
            found = (channels * height * width, width, 1, height * width, 0)
        else:
            line = (width + 2 * self.border) * channels
            found = ((height + 2 * self.border) * line, line, channels, 1, self.border * (line + channels))
        return {f"{letter}_{end}": size for end, size in zip("BYXC0", found, strict=True)}

    def strides(self, letter: str) -> dict[str, int]:
        """Return the strides alone, for images without a border."""
        return {name: size for name, size in self.sizes(letter).items() if not name.endswith("_0")}


class Layer(ABC):
    """A layer with its output, the gradient of its output, and the layer before it."""

    out: Image
    dout: Image
    before: Layer

    def __init__(self, program: Program, before: Layer | None) -> None:
        self.program: Program = proxy(program)  # no reference cycle: memory is freed immediately with the program
        if before is not None:
            self.before = before

    def _make(self, shape: tuple[int, int, int], after: Spatial | None, dtype: torch.dtype | None = None) -> None:
        """Allocate the output, which the layer `after` reads, and its gradient."""
        border = after.padding if isinstance(after, Conv) else 0
        self.out = self.program.image(shape, border, flat=after is None, dtype=dtype)
        self.dout = self.program.image(shape, 0, flat=after is None, dtype=dtype)

    @abstractmethod
    def forward(self) -> None:
        """Write the output."""

    def spread(self) -> None:  # noqa: B027
        """Compute what both `backward` and `weights` need."""

    @abstractmethod
    def backward(self) -> None:
        """Write the gradient of the previous layer's output."""

    def weights(self) -> None:  # noqa: B027  (most layers have none)
        """Write the gradients of the layer's parameters."""

    def prepare(self) -> None:  # noqa: B027
        """Compute what depends only on the parameters."""


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
            *(at.pool.x, at.buffers.index, self.out.data),
            scale=at.scale,
            shift=at.shift,
            S=at.buffers.index.shape[1],
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
        """Do nothing: the gradient of samples is not needed."""


class _PoolLayer(Layer):
    """Pooling: what both kinds have in common."""

    def __init__(self, program: Program, spec: MaxPool | AvgPool, before: Layer, after: Spatial | None) -> None:
        super().__init__(program, before)
        self._make(spec.outputs, after)
        channels, height, width = spec.inputs
        self.reach = pieces(spec.kernel, spec.stride)
        self.sizes = {"B": program.batch, "C": channels, "H": height, "W": width, "PH": spec.outputs[1]}
        self.sizes |= {"PW": spec.outputs[2], "KS": spec.kernel, "STRIDE": spec.stride, "PAD": spec.padding}

    def _forward(self, kernel: Any, *tensors: Tensor, **more: int) -> None:
        blocks = pieces(self.program.batch * prod(self.out.shape), 1024)
        self.program.launch(kernel, blocks, *tensors, **self.sizes, **self.out.sizes("O"), **more, BLOCK=1024)

    def _backward(self, kernel: Any, *tensors: Tensor) -> None:
        blocks = pieces(self.program.batch * prod(self.before.out.shape), 1024)
        sizes = {**self.sizes, **self.dout.strides("D"), "REACH": self.reach}
        self.program.launch(kernel, blocks, *tensors, **sizes, BLOCK=1024)


class MaxPoolLayer(_PoolLayer):
    def __init__(self, program: Program, spec: MaxPool, before: Layer, after: Spatial | None) -> None:
        super().__init__(program, spec, before, after)
        self.arg = program.image(spec.outputs, 0, flat=after is None, dtype=torch.int8)

    def forward(self) -> None:
        tensors = (self.before.out.data, self.out.data, self.arg.data)
        self._forward(image_kernels.pool_forward, *tensors, **self.dout.strides("D"))

    def backward(self) -> None:
        self._backward(image_kernels.pool_backward, self.dout.data, self.arg.data, self.before.dout.data)


class AvgPoolLayer(_PoolLayer):
    def forward(self) -> None:
        self._forward(image_kernels.average_forward, self.before.out.data, self.out.data)

    def backward(self) -> None:
        self._backward(image_kernels.average_backward, self.dout.data, self.before.dout.data)


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
        sizes = {**self.sizes, **self.dout.strides("D")}
        self.program.launch(image_kernels.norm_backward, self.blocks, *tensors, **self.powers, **sizes)
