"""Robust aggregation: a few rows that lie, or that training has spoilt, do not carry the rest away.

A row of weight 0 counts nowhere. Norms and distances are those of the parameters, in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from fedcat.core.device import on_device
from fedcat.core.options import Bounds, Option
from fedcat.methods.aggregation import AGGREGATORS, Aggregator
from fedcat.methods.average import weighted_mean

ROUNDING = 1e-9
"""By how much a share of the rows may miss a whole number: 0.29 * 100 is 29."""


@AGGREGATORS.register("clipped", "mean of updates that are scaled down to a norm, by default the round's median norm")
class Clipped(Aggregator):
    """The weighted mean of updates, of which the long ones are scaled down to a limit first.

    Buffers are not scaled: they are the weighted mean as they are, so that a client can still spoil them.

    Parameters
    ----------
    norm : float
        The limit; 0 stands for the median norm of the updates at hand.
    """

    def __init__(
        self,
        norm: Annotated[
            float, Option("largest norm of an update in clipped; 0: their median", Bounds(at_least=0))
        ] = 0.0,
    ) -> None:
        self.norm = norm

    def aggregate(self, rows: Tensor, weights: Sequence[float], start: Tensor) -> Tensor:
        """Return the mean of the clipped rows."""
        rows, weights = _counted(rows, weights)
        size = rows.shape[1] if self.parameter_size is None else self.parameter_size
        clipped = _clip(rows[:, :size], start[:size], self.norm)
        return weighted_mean(torch.cat([clipped, rows[:, size:]], dim=1), weights)


@AGGREGATORS.register("median", "median of every coordinate, all clients alike (Yin et al. 2018)")
def median(rows: Tensor, weights: Sequence[float], start: Tensor) -> Tensor:
    """Return the median of every coordinate, the mean of the two middle ones if the number of rows is even.

    Weights are ignored: they are what clients report, and a liar would report a large one.
    """
    return _middle(_counted(rows, weights)[0].sort(dim=0).values)


@AGGREGATORS.register("trimmed-mean", "mean of every coordinate without its extremes (Yin et al. 2018)")
def trimmed_mean(
    rows: Tensor,
    weights: Sequence[float],
    start: Tensor,
    *,
    trim: Annotated[
        float, Option("share of rows that trimmed-mean leaves out at either end", Bounds(at_least=0, below=0.5))
    ] = 0.2,
) -> Tensor:
    """Return the mean of every coordinate without its smallest and largest values.

    Weights are ignored, as in `median`.

    Parameters
    ----------
    rows, weights, start
        See `Aggregator.aggregate`.
    trim : float
        The share of K rows that is left out at either end, rounded down; at least one row if `trim` is positive. One
        or two rows in the middle always stay.
    """
    rows, _ = _counted(rows, weights)
    count = len(rows)
    out = min(max(math.floor(trim * count + ROUNDING), 1 if trim else 0), (count - 1) // 2)
    kept = rows.sort(dim=0).values[out : count - out]
    return weighted_mean(kept, [1] * len(kept))


@AGGREGATORS.register("geometric-median", "the row of least weighted distance to all (RFA, Pillutla et al. 2019)")
class GeometricMedian(Aggregator):
    """The smoothed Weiszfeld algorithm of RFA: each step is a mean of rows, weighted by weight over distance.

    It starts from the mean of updates that are clipped to their median norm. RFA starts from the mean, from where a
    step comes only about K times closer to the others: a row that is far enough away wins against a few steps.

    Parameters
    ----------
    iterations : int
        The number of steps.
    smoothing : float
        The smallest distance that a weight is divided by.
    """

    def __init__(
        self,
        iterations: Annotated[int, Option("Weiszfeld steps of geometric-median", Bounds(at_least=1))] = 8,
        smoothing: Annotated[float, Option("smallest distance in geometric-median", Bounds(above=0))] = 1e-6,
    ) -> None:
        self.iterations, self.smoothing = iterations, smoothing

    def aggregate(self, rows: Tensor, weights: Sequence[float], start: Tensor) -> Tensor:
        """Return the mean of the rows, buffers and all, by the weights of the last step."""
        rows, weights = _counted(rows, weights)
        parameters = rows[:, : self.parameter_size]
        centre = weighted_mean(_clip(parameters, start[: self.parameter_size], 0.0), weights)
        given = pull = on_device(weights, rows.new_empty(0, dtype=torch.float64))
        for _ in range(self.iterations):
            away = parameters - centre
            pull = given / _norms(away).clamp(min=self.smoothing)
            pull = pull / pull.sum()
            centre = centre + pull.to(rows.dtype) @ away
        found = pull.tolist()
        # weighted_mean adds to the first row, where a far one would cost all precision
        order = sorted(range(len(found)), key=lambda i: -found[i])
        return weighted_mean(rows[order], [found[i] for i in order])


@AGGREGATORS.register("krum", "mean of the rows that lie closest together (multi-Krum, Blanchard et al. 2017)")
class Krum(Aggregator):
    """The weighted mean of the rows with the smallest scores.

    A row's score is the sum of the squared distances to the K - f - 2 rows nearest to it, at least one, where f of K
    rows are assumed to lie. Of equal scores the row that comes first is kept. The proof of Blanchard et al. needs
    K > 2 f + 2; with fewer rows f is still less than half of them, so that one or two rows are assumed to be true.

    Parameters
    ----------
    liars : float
        The share of rows that is assumed to lie, f / K; f is rounded up.
    keep : int
        The number of rows to keep. 0 stands for K - f, which is multi-Krum; 1 is Krum.
    """

    def __init__(
        self,
        liars: Annotated[float, Option("share of rows that krum assumes to lie", Bounds(at_least=0, below=0.5))] = 0.2,
        keep: Annotated[int, Option("rows that krum averages; 0: all but the liars", Bounds(at_least=0))] = 0,
    ) -> None:
        self.liars, self.keep = liars, keep

    def aggregate(self, rows: Tensor, weights: Sequence[float], start: Tensor) -> Tensor:
        """Return the mean of the rows that are kept."""
        rows, weights = _counted(rows, weights)
        count = len(rows)
        liars = min(math.ceil(self.liars * count - ROUNDING), (count - 1) // 2)
        keep = self.keep or count - liars
        if keep >= count:
            return weighted_mean(rows, weights)
        parameters = rows[:, : self.parameter_size].double()
        # no matrix product: what is equal has distance 0, and no bit depends on how a product is divided
        apart = torch.cdist(parameters, parameters, compute_mode="donot_use_mm_for_euclid_dist").square()
        near = apart.fill_diagonal_(math.inf).sort(dim=1).values[:, : max(1, count - liars - 2)]
        scores = near.sum(dim=1).tolist()
        kept = sorted(sorted(range(count), key=lambda i: scores[i])[:keep])
        return weighted_mean(rows[kept], [weights[i] for i in kept])


def _counted(rows: Tensor, weights: Sequence[float]) -> tuple[Tensor, list[float]]:
    """Return the rows of positive weight, and their weights."""
    kept = [i for i, weight in enumerate(weights) if weight > 0]
    return (rows if len(kept) == len(weights) else rows[kept]), [weights[i] for i in kept]


def _norms(rows: Tensor) -> Tensor:
    """Return the norms of rows, in double precision: squares of large float32 numbers would overflow."""
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
    return norms


def _middle(ordered: Tensor) -> Tensor:
    """Return the median along the first dimension, in which the values are in order."""
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _clip(rows: Tensor, start: Tensor, limit: float) -> Tensor:
    """Return rows at most `limit` away from `start`, 0: their median distance; those within stay as they are."""
    updates = rows - start
    norms = _norms(updates)
    most = limit if limit else _middle(norms.sort().values)
    scaled = start + (most / norms).to(rows.dtype)[:, None] * updates
    return torch.where((norms > most)[:, None], scaled, rows)
