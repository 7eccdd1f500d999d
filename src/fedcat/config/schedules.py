"""How the step size changes over rounds."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedcat.core.errors import unknown

SCHEDULES = ("constant", "step", "inverse", "cosine")


def schedule(name: str, lr: float, rounds: int, decay: float, every: int) -> Callable[[int], float]:
    """Return the step size as a function of the round, from 0.

    Parameters
    ----------
    name : str
        ``constant``; ``step``: lr * decay**(round // every); ``inverse``: lr / (1 + decay * round); ``cosine``: from
        lr down to 0 along half a cosine.
    lr : float
        The first step size.
    rounds : int
        How many rounds there are.
    decay : float
        What it means is said above.
    every : int
        Rounds between the steps of ``step``.
    """
    if name == "constant":
        return lambda round: lr
    if name == "step":
        return lambda round: lr * decay ** (round // every)
    if name == "inverse":
        return lambda round: lr / (1 + decay * round)
    if name == "cosine":
        return lambda round: lr * 0.5 * (1 + math.cos(math.pi * round / rounds))
    raise unknown("lr_schedule", name, SCHEDULES)
