"""Which samples a device sees in which step: the same for every engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedcat.chance import Purpose, chance
from fedcat.hop import Hop
from fedcat.local import Task

Ints = NDArray[np.int64]


def batch_lengths(samples: int, batch_size: int, join_lone: bool = False) -> list[int]:
    """Return the sizes of one epoch's batches; the last may be short.

    With `join_lone` a last batch of one sample joins the batch before it.
    """
    full, rest = divmod(samples, batch_size)
    lengths = [batch_size] * full + ([rest] if rest else [])
    if join_lone and rest == 1 and full:
        lengths = [*lengths[:-2], batch_size + 1]
    return lengths


def steps_of(task: Task, hop: Hop) -> int:
    """Return how many steps a hop takes."""
    return hop.epochs * len(batch_lengths(task.samples(hop.device), task.batch_size, task.join_lone))


def batches(task: Task, hop: Hop) -> tuple[Ints, Ints]:
    """Return a hop's batches.

    Returns
    -------
    index : numpy.ndarray
        Positions in the pool, [steps, width]; short batches are filled up with -1.
    lengths : numpy.ndarray
        How many positions of each step are real, [steps].
    """
    mine = task.federation.indices(hop.device)
    epoch = batch_lengths(len(mine), task.batch_size, task.join_lone)
    rng = chance(task.seed, Purpose.BATCHES, hop.round, hop.device, hop.visit)
    lengths = np.tile(np.array(epoch, np.int64), hop.epochs)
    width = max(epoch)
    if epoch[0] == width:
        index = np.full((hop.epochs, len(epoch) * width), -1, np.int64)
        for row in index:
            row[: len(mine)] = mine[rng.permutation(len(mine))]
        return index.reshape(-1, width), lengths
    order = np.concatenate([mine[rng.permutation(len(mine))] for _ in range(hop.epochs)])
    index = np.full((len(lengths), width), -1, np.int64)
    index[np.arange(width) < lengths[:, None]] = order
    return index, lengths
