"""Averages of rows: over clients, and over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from fedcat.core.device import on_device


def weighted_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the mean of rows [K, D] by weights >= 0, at least one of which is positive.

    It is computed as r0 + p @ (rows - r0) over the rows of positive weight, so that equal rows give exactly that row.
    """
    kept = [w for w in weights if w > 0]
    if len(kept) < len(weights):
        rows = rows[[i for i, w in enumerate(weights) if w > 0]]
    total = math.fsum(kept)
    p = on_device([w / total for w in kept], rows)
    first: Tensor = rows[0]
    return first + p @ (rows - first)


class RunningAverage:
    """The average of a row over rounds, later rounds weighing more; the weights always add up to one.

    Parameters
    ----------
    memory : float
        Below 1, the average is exponential: the factor by which a round's weight shrinks in each later round. From 1
        on, the weights grow with this power of the round (Shamir & Zhang 2013), and faster at first: in the long run, a
        power p looks back over 1 / (p + 2) of the rounds.

    Attributes
    ----------
    early : int
        The number of rounds after which a round's share is twice that of a power alone; at first it is larger, up to
        one. A model that still learns fast is then not held back by its first rounds.
    """

    early: ClassVar[int] = 50

    def __init__(self, memory: float) -> None:
        self.memory = memory
        self.rounds = 0
        self.row: Tensor | None = None

    def add(self, row: Tensor) -> None:
        """Add a round's row to the average."""
        self.rounds += 1
        self.row = row if self.row is None else self.row + self._share() * (row - self.row)

    def _share(self) -> float:
        """Return the share of the newest round."""
        if self.memory < 1:
            return (1 - self.memory) / (1 - self.memory**self.rounds)
        return min(1.0, (self.memory + 1) / self.rounds * (1 + self.early / self.rounds))

    def state(self) -> dict[str, Any]:
        """Return the average and the number of rounds in it."""
        return {"rounds": self.rounds, "row": self.row}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.rounds, self.row = state["rounds"], state["row"]
