"""Participation: how often each client took part, and whom each copy met."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcat.runs.history import Record


@dataclass(frozen=True)
class Participation:
    """Who took part how often.

    Attributes
    ----------
    counts : list of int
        How often each client trained in the whole run.
    coverage : list of float
        The fraction of the clients that had taken part at each evaluation.
    least, most : list of int
        How often the clients that took part least and most often had done so at each evaluation.
    entropy : list of float
        The entropy of the counts at each evaluation, over its maximum: 1 if all clients took part equally often.
    distinct : float
        How many different clients a copy met in a cycle of K rounds, on average.
    """

    counts: list[int]
    coverage: list[float]
    least: list[int]
    most: list[int]
    entropy: list[float]
    distinct: float


def participation(history: Sequence[Record], clients: int, k: int) -> Participation:
    """Return who took part in the rounds of a run; a failed hop counts, for the client was selected."""
    counts = np.zeros(clients, np.int64)
    coverage, least, most, spread = [], [], [], []
    for record in history:
        np.add.at(counts, record.clients, 1)
        if record.evaluated:
            coverage.append(round(float((counts > 0).mean()), 4))
            least.append(int(counts.min()))
            most.append(int(counts.max()))
            spread.append(round(entropy(counts), 5))
    cycles = [history[first : first + k] for first in range(0, len(history) - k + 1, k)]
    met = [
        len({hop.client for record in cycle for hop in record.hops if hop.copy == c})
        for cycle in cycles
        for c in range(k)
    ]
    return Participation(counts.tolist(), coverage, least, most, spread, round(float(np.mean(met)), 4) if met else 0.0)


def entropy(counts: NDArray[np.int64]) -> float:
    """Return the entropy of counts over the largest there can be; 0 if nobody took part."""
    share = counts[counts > 0] / max(1, counts.sum())
    return float(-(share * np.log(share)).sum() / math.log(len(counts))) if len(counts) > 1 else 1.0
