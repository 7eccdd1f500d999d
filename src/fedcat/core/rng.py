"""Chance is addressed, never consumed.

Every random choice of a simulation comes from a generator of its own, keyed by what the choice is for. A choice
therefore depends neither on the engine, nor on what else runs beside it, nor on how many choices were made before.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np


class Purpose(IntEnum):
    """What a random choice is for. The numbers are part of the file format: they never change."""

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


def random_stream(seed: int, purpose: Purpose, round: int = 0, client: int = 0, visit: int = 0) -> np.random.Generator:
    """Return the generator at one address.

    Parameters
    ----------
    seed : int
        The simulation's seed, 0 <= seed < 2**64.
    purpose : Purpose
        What the numbers are for.
    round, client, visit : int
        Where in the simulation they are used; `visit` tells apart two hops of one client in one round.

    Returns
    -------
    numpy.random.Generator
        A Philox generator with key (seed, purpose) and counter (0, visit, client, round).
    """
    counter = np.array([0, visit, client, round], dtype=np.uint64)
    key = np.array([seed, int(purpose)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def torch_seed(rng: np.random.Generator) -> int:
    """Draw a seed for PyTorch's own generators."""
    return int(rng.integers(2**63))
