"""Keyed random streams.

Every draw has its own random stream, keyed by (seed, purpose, round, client, visit). The result of a draw therefore
depends only on its key: not on the engine, not on which other runs train at the same time, and not on how many draws
came before it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.random.bit_generator import ISeedSequence


class Purpose(IntEnum):
    """What a random stream is for. The values are part of the file format and must never change."""

    PARTITION = 1
    INITIAL = 2
    SELECT = 3
    GROUP = 4
    BATCHES = 5
    RULE = 6
    NET = 7
    SPLIT = 8
    SERVER = 9
    WRITERS = 10
    HOLD_OUT = 11
    AUGMENT = 12
    FAULT = 13
    TRAITS = 14
    RETRY = 15


def random_stream(seed: int, purpose: Purpose, round: int = 0, client: int = 0, visit: int = 0) -> np.random.Generator:
    """Return the random stream with this key.

    Parameters
    ----------
    seed : int
        The run's seed, 0 <= seed < 2**64.
    purpose : Purpose
        What the stream is for.
    round, client, visit : int
        Where in the run the stream is used; `visit` distinguishes hops of the same client in one round.

    Returns
    -------
    numpy.random.Generator
        A Philox generator with key (seed, purpose) and counter (0, visit, client, round).
    """
    counter = np.array([0, visit, client, round], dtype=np.uint64)
    key = np.array([seed, int(purpose)], dtype=np.uint64)
    philox = np.random.Philox(_NO_SEED)  # type: ignore[arg-type]  # NumPy takes any ISeedSequence
    state: Any = {**_FRESH, "state": {"counter": counter, "key": key}}
    philox.state = state
    return np.random.Generator(philox)


class _NoSeed(ISeedSequence):
    """Stands for a seed: a Philox that is made from a key gathers entropy first, which takes longer than all else."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Any:
        return np.zeros(n_words, dtype)


_NO_SEED = _NoSeed()
_FRESH: Any = {
    "bit_generator": "Philox",
    "buffer": np.zeros(4, np.uint64),
    "buffer_pos": 4,
    "has_uint32": 0,
    "uinteger": 0,
}


def torch_seed(rng: np.random.Generator) -> int:
    """Draw a seed for PyTorch's generators."""
    return int(rng.integers(2**63))
