"""Statistics of how skewed a federation is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcat.data.federation import Federation


@dataclass(frozen=True)
class Skew:
    """Statistics over the clients of a federation.

    Attributes
    ----------
    samples : tuple of float
        Minimum, median and maximum number of samples per client.
    classes : tuple of float
        Minimum, median and maximum number of classes per client.
    effective_classes : float
        The mean of exp(entropy of a client's class shares): the number of equally frequent classes with that entropy.
    distance : float
        The mean total variation distance between a client's class shares and those of all data, i.e. the share of its
        samples that would have to change class. It is 0 if all clients have the same class shares.
    largest_share : float
        The mean share of a client's most frequent class.
    """

    samples: tuple[float, float, float]
    classes: tuple[float, float, float]
    effective_classes: float
    distance: float
    largest_share: float

    @classmethod
    def of(cls, federation: Federation) -> Skew:
        """Compute the statistics of `federation`."""
        counts = federation.class_counts
        shares = counts / counts.sum(axis=1, keepdims=True)
        logs = np.log(np.where(shares > 0, shares, 1.0))
        return cls(
            samples=_spread(federation.sizes),
            classes=_spread((counts > 0).sum(axis=1)),
            effective_classes=float(np.exp(-(shares * logs).sum(axis=1)).mean()),
            distance=class_distance(counts),
            largest_share=float(shares.max(axis=1).mean()),
        )


def class_distance(counts: np.ndarray) -> float:
    """Return the mean total variation distance between a client's class shares and those of all data.

    `counts` are samples by client and class, [N, C]; every client has some.
    """
    shares, whole = counts / counts.sum(axis=1, keepdims=True), counts.sum(axis=0) / counts.sum()
    return float(np.abs(shares - whole).sum(axis=1).mean() / 2)


def _spread(values: np.ndarray) -> tuple[float, float, float]:
    return float(values.min()), float(np.median(values)), float(values.max())
