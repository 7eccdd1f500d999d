"""How large the kernels' tiles are: found by trying on an H200, and fixed by the net and the precision alone.

A tile decides in which order numbers are added, so that it must not depend on how many rows are trained.
"""

from __future__ import annotations

Tile = dict[str, int]

WIDE = 64
"""Columns of a product from which on it counts as wide."""
LARGE = 32768
"""Numbers of a gradient from which on it counts as large."""
LEAST_WORK = 1.6e6
"""Products that a program should have to add up, where the gradient is not large."""


def _tile(warps: int = 4, stages: int = 2, **sizes: int) -> Tile:
    return {**sizes, "num_warps": warps, "num_stages": stages}


def conv_lanes(mode: str, channels: int, merged: bool) -> int:
    """Return in how many lanes a convolution's input channels lie: four numbers at once are loaded faster than three.

    `merged`: the places of its pooling windows are columns.
    """
    return 4 if channels == 3 and (mode == "bf16" or (mode == "tf32" and not merged)) else channels


def conv_forward_tile(mode: str, apart: bool) -> Tile:
    """Return the tile of a convolution; `apart`: each place of a pooling window alone."""
    if apart:
        return _tile(BM=32, BK=32) if mode == "ieee" else _tile(stages=3, BM=64, BK=32)
    if mode == "ieee":
        return _tile(stages=3, BM=64, BK=16)
    return _tile(stages=4 if mode == "bf16" else 3, BM=128, BK=32)


def conv_input_tile(mode: str) -> Tile:
    """Return the tile of the gradient of a convolution's input."""
    if mode == "ieee":
        return _tile(stages=3, BM=64, BK=16)
    return _tile(stages=3, BM=128, BK=64 if mode == "bf16" else 32)


def conv_weight_tile(mode: str, columns: int, merged: bool, dense: bool) -> Tile:
    """Return the tile of the gradient of weights laid out in `columns`.

    `merged`: the places of pooling windows are columns; `dense`: the gradient of every place is given.
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


def conv_split(size: int, places: int) -> int:
    """Return over how many samples one program adds up a gradient of `size` numbers, each a sum over `places`."""
    return 5 if size >= LARGE else max(1, min(4, round(LEAST_WORK / (size * places))))


def fold_block(size: int) -> int:
    """Return how many numbers of a gradient of `size` one program adds up over the splits."""
    return 256 if size >= LARGE else 32


def tail_tile(mode: str) -> Tile:
    """Return the tile of the last layers."""
    return _tile(BM=16, BK=32) if mode == "ieee" else _tile(stages=3, BM=16, BK=64)


def linear_tiles(mode: str) -> tuple[Tile, Tile, Tile]:
    """Return the tiles of a linear layer forward, of its input's and of its weights' gradient."""
    if mode == "ieee":
        return _tile(warps=2, stages=3, BN=16, BK=64), _tile(BN=32, BK=32), _tile(BO=32, BI=32)
    return _tile(stages=4, BN=32, BK=128), _tile(stages=3, BN=64, BK=32), _tile(BO=64, BI=128)
