"""The sizes of the kernels' tiles: tuned on an H200, and determined by the net and the precision alone.

A tile determines the order of summation, so it must not depend on how many rows are trained.
"""

from __future__ import annotations

Tile = dict[str, int]

WIDE = 64
"""Number of columns from which a product counts as wide."""
LARGE = 32768
"""Number of values from which a gradient counts as large."""
LEAST_WORK = 1.6e6
"""Number of products that a program should sum, unless the gradient is large."""


def _tile(warps: int = 4, stages: int = 2, **sizes: int) -> Tile:
    return {**sizes, "num_warps": warps, "num_stages": stages}


def conv_forward_tile(mode: str, apart: bool) -> Tile:
    """Return the tile of a convolution; `apart`: each position of a pooling window is computed separately."""
    if apart:
        return _tile(BM=32, BK=32) if mode == "ieee" else _tile(stages=3, BM=64, BK=32)
    if mode == "ieee":
        return _tile(stages=3, BM=64, BK=16)
    return _tile(stages=4 if mode == "bf16" else 3, BM=128, BK=32)


def conv_input_tile(mode: str) -> Tile:
    """Return the tile of a convolution's input gradient."""
    if mode == "ieee":
        return _tile(stages=3, BM=64, BK=16)
    return _tile(stages=3, BM=128, BK=64 if mode == "bf16" else 32)


def conv_weight_tile(mode: str, columns: int, merged: bool, dense: bool) -> Tile:
    """Return the tile of the gradient of weights laid out in `columns` columns.

    `merged`: the positions of pooling windows are columns; `dense`: the gradient at every position is given.
    """
    if dense:
        return {
            "bf16": _tile(stages=3, BM=64, BK=64),
            "tf32": _tile(BM=32, BK=64),
            "ieee": _tile(stages=3, BM=16, BK=64),
        }[mode]
    if mode == "ieee":
        return _tile(BM=32, BK=32 if columns >= WIDE else 64)
    if not merged:
        return _tile(BM=64, BK=128)
    if mode == "bf16":
        return _tile(BM=64, BK=128 if columns == WIDE else 64)
    return _tile(BM=64 if columns == WIDE else 32, BK=64)


def conv2d_weight_tile() -> Tile:
    """Return the tile of the same gradient in nets that are not chains, whose convolutions have fewer channels."""
    return _tile(BM=64, BK=64)


def conv_split(size: int, places: int) -> int:
    """Return over how many samples one program sums a gradient of `size` values, each a sum over `places` positions."""
    return 5 if size >= LARGE else max(1, min(4, round(LEAST_WORK / (size * places))))


def fold_block(size: int) -> int:
    """Return how many of a gradient's `size` values one program sums over the splits."""
    return 256 if size >= LARGE else 32


def tail_tile(mode: str) -> Tile:
    """Return the tile of the last layers."""
    return _tile(BM=16, BK=32) if mode == "ieee" else _tile(stages=3, BM=16, BK=64)


def linear_tiles(mode: str) -> tuple[Tile, Tile, Tile]:
    """Return the tiles of a linear layer's forward pass, input gradient and weight gradient."""
    if mode == "ieee":
        return _tile(warps=2, stages=3, BN=16, BK=64), _tile(BN=32, BK=32), _tile(BO=32, BI=32)
    return _tile(stages=4, BN=32, BK=128), _tile(stages=3, BN=64, BK=32), _tile(BO=64, BI=128)


def lstm_tiles(mode: str) -> tuple[Tile, Tile]:
    """Return the tiles of an LSTM's step, forward and backward."""
    if mode == "ieee":
        return _tile(warps=2, stages=3, BM=16, BU=32, BK=32), _tile(warps=2, stages=3, BM=16, BU=32, BK=64)
    return _tile(warps=2, stages=3, BM=32, BU=16, BK=32), _tile(stages=3, BM=32, BU=32, BK=64)
