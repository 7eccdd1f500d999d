"""Learning rate schedules over rounds."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedcat.core.errors import unknown_name

USED_BY = {
    "constant": (),
    "step": ("lr_decay", "lr_every"),
    "inverse": ("lr_decay",),
    "inverse-step": ("lr_decay",),
    "cosine": (),
}
"""The schedules, and the settings that each uses besides the learning rate."""

SCHEDULES = tuple(USED_BY)


def schedule(name: str, lr: float, rounds: int, decay: float, every: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the round, counted from 0.

    Parameters
    ----------
    name : str
        ``constant``; ``step``: lr * decay**(round // every); ``inverse``: lr / (1 + decay * round); ``cosine``: from
        lr to 0 along half a cosine. ``inverse-step`` is constant here: the task's `lr_decay` lets it decay with every
        local step.
    lr : float
        The initial learning rate.
    rounds : int
        The number of rounds.
    decay : float
        The factor of ``step``, or the decay per round of ``inverse``.
    every : int
        Rounds between two decays of ``step``.
    """
    if name in ("constant", "inverse-step"):
        return lambda round: lr
    if name == "step":
        return lambda round: lr * decay ** (round // every)
    if name == "inverse":
        return lambda round: lr / (1 + decay * round)
    if name == "cosine":
        return lambda round: lr * 0.5 * (1 + math.cos(math.pi * round / rounds))
    raise unknown_name("lr_schedule", name, SCHEDULES)
