"""How large the kernels' tiles are: found by trying on an H200, and fixed by the net and the precision alone.

A tile decides in which order numbers are added, so that it must not depend on how many rows are trained.
"""

from __future__ import annotations

Tile = dict[str, int]

WIDE = 64
"""Columns of a product from which on it counts as wide."""


def _tile(warps: int = 4, stages: int = 2, **sizes: int) -> Tile:
    return {**sizes, "num_warps": warps, "num_stages": stages}


def conv_forward_tile(mode: str, lines: int, apart: bool) -> Tile:
    """Return the tile of a convolution whose patches have `lines` numbers; `apart`: each place of a window alone."""
    if apart:
        return _tile(BM=32, BK=32)
    if mode == "bf16":
        return _tile(BM=128, BK=32)
    if mode == "tf32":
        return _tile(BM=32, BK=16 if lines <= 128 else 64)
    return _tile(BM=64, BK=16)


def conv_input_tile(mode: str, columns: int) -> Tile:
    """Return the tile of the gradient of an input with `columns` channels."""
    if mode == "bf16":
        return _tile(BM=128, BK=64)
    if mode == "tf32":
        return _tile(BM=32, BK=64) if columns >= WIDE else _tile(BM=128, BK=32)
    return _tile(BM=128, BK=16)


def conv_weight_tile(mode: str, columns: int, merged: bool, apart: bool) -> Tile:
    """Return the tile of the gradient of weights laid out in `columns`; `merged`: a window's places are columns."""
    if apart:
        return _tile(BM=32, BK=32 if mode == "ieee" else 64)
    if mode == "bf16":
        return _tile(BM=64, BK=128)
    if mode == "tf32":
        return _tile(BM=64, BK=128) if columns >= WIDE and not merged else _tile(BM=64, BK=32)
    return _tile(BM=32, BK=32 if columns >= WIDE else 64)


def linear_tiles(mode: str) -> tuple[Tile, Tile, Tile]:
    """Return the tiles of a linear layer forward, of its input's and of its weights' gradient."""
    if mode == "ieee":
        return _tile(BN=32, BK=32), _tile(BN=32, BK=32), _tile(BO=32, BI=32)
    weights = _tile(BO=64, BI=128) if mode == "bf16" else _tile(BO=32, BI=128)
    return _tile(stages=4, BN=32, BK=128), _tile(BN=64, BK=32), weights
