"""One training step of a chain of layers, as launches of the fused kernels on fixed buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from fedcat.data.pool import Pool
from fedcat.engines.fused import linear_kernels
from fedcat.engines.fused.chain import Chain, Conv, MaxPool, Norm, Spatial
from fedcat.engines.fused.conv_layer import ConvLayer
from fedcat.engines.fused.layers import GatherLayer, Image, Layer, MaxPoolLayer, NormLayer, pieces
from fedcat.engines.fused.linear_layers import LinearLayer, TailLayer, tail_length
from fedcat.engines.rows import Rows

KINDS: dict[type[Spatial], Any] = {Conv: ConvLayer, MaxPool: MaxPoolLayer, Norm: NormLayer}
MODES = {"fp32": "ieee", "tf32": "tf32", "bf16": "bf16"}
NARROW = 2
"""Number of rows up to which independent kernels run concurrently."""


class Program:
    """Launches the kernels of a net on the rows of a launch.

    Parameters
    ----------
    chain : Chain
        The net.
    pool : Pool
        The training samples.
    rows : Rows
        The state of the launch.
    precision : str
        ``fp32``, ``tf32`` or ``bf16``.
    """

    def __init__(self, chain: Chain, pool: Pool, rows: Rows, precision: str) -> None:
        self.rows, self.mode, self.pool = rows, MODES[precision], pool
        self.count, _, self.batch = rows.pick.shape
        self.kept = torch.bfloat16 if precision == "bf16" else torch.float32
        self.scale, self.shift = _affine(pool)
        self.width = self.count
        self.ahead = 0
        self._streams: list[Any] = []
        self._busy: list[Any] = []
        following = [*chain.spatial, None]
        self.layers: list[Layer] = [GatherLayer(self, chain.shape, following[0])]
        for spec, after in zip(chain.spatial, following[1:], strict=True):
            self.layers.append(KINDS[type(spec)](self, spec, self.layers[-1], after))
        cut = len(chain.linear) - tail_length(chain.linear)
        for linear in chain.linear[:cut]:
            self.layers.append(LinearLayer(self, linear, self.layers[-1]))
        self.tail = TailLayer(self, chain.linear[cut:], self.layers[-1])

    @property
    def losses(self) -> Tensor:
        """The sums of the steps' losses per tile of samples, [R, tiles]; set them to zero before the first step."""
        return self.tail.loss

    def buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeroed memory for every row."""
        return torch.zeros(self.count, *shape, dtype=dtype or self.kept, device=self.rows.p.device)

    def image(
        self,
        shape: tuple[int, int, int],
        border: int,
        flat: bool,
        dtype: torch.dtype | None = None,
        lanes: int | None = None,
    ) -> Image:
        """Return memory for the images of all batches."""
        channels, height, width = shape
        lanes = lanes or channels
        size = lanes * (height + 2 * border) * (width + 2 * border)
        return Image(self.buffer(self.batch, size, dtype=dtype), shape, 0 if flat else border, flat, lanes)

    def gradients(self, ahead: int, width: int) -> None:
        """Compute the gradients of one step for the first `width` rows in `order`."""
        self.ahead, self.width = ahead, width
        with self._aside(0):
            for layer in self.layers:
                layer.prepare()
        self.layers[0].forward()
        self._join()
        for layer in self.layers[1:]:
            layer.forward()
        self.tail.forward()
        with self._aside(0):
            self.tail.weights()
        for number, layer in reversed(list(enumerate(self.layers[1:]))):
            layer.spread()
            with self._aside(1 + number):
                layer.weights()
            if number:
                layer.backward()
        self._join()

    def descend(self, ahead: int, width: int) -> None:
        """Take the step."""
        rows, size = self.rows, self.rows.p.shape[1]
        linear_kernels.descend[pieces(size, 1024), width](
            *(rows.p, rows.v, rows.g, rows.lr, rows.momentum, rows.decay, rows.step, rows.count, rows.order),
            *(ahead, size, rows.p.stride(0), 1024),
        )

    def launch(self, kernel: Any, blocks: int, *tensors: Tensor, **sizes: Any) -> None:
        """Launch a kernel on the first `width` rows; add the arguments that all kernels take.

        If a GPU has less shared memory than the tile needs, the loop gets fewer pipeline stages.
        """
        rows = self.rows
        state = {"step": rows.step, "count": rows.count, "order": rows.order, "ahead": self.ahead}
        while True:
            try:
                kernel[blocks, self.width](*tensors, **state, **sizes)
                return
            except OutOfResources:
                if sizes.get("num_stages", 1) == 1:
                    raise
                sizes["num_stages"] -= 1

    @contextmanager
    def _aside(self, number: int) -> Iterator[None]:
        """Launch on a side stream if few rows leave most of the GPU idle; wider launches slow each other down."""
        if self.rows.p.device.type != "cuda" or self.width > NARROW:
            yield
            return
        while len(self._streams) <= number:
            self._streams.append(torch.cuda.Stream(self.rows.p.device))  # type: ignore[no-untyped-call]
        stream = self._streams[number]
        self._busy.append(stream)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def _join(self) -> None:
        for stream in self._busy:
            torch.cuda.current_stream().wait_stream(stream)
        self._busy.clear()


def _affine(pool: Pool) -> tuple[Tensor, Tensor]:
    """Return the scale and the shift that normalize the stored values, per channel."""
    channels = pool.shape[0]
    how = pool.normalize
    scale, mean, std = (1.0, (0.0,), (1.0,)) if how is None else (how.scale, how.mean, how.std)
    means, stds = (torch.tensor(values, dtype=torch.float64).expand(channels) for values in (mean, std))
    device = pool.x.device
    return (1 / (scale * stds)).to(device, torch.float32), (-means / stds).to(device, torch.float32)
