"""How skewed a federation is, in a few figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcat.data.federation import Federation


@dataclass(frozen=True)
class Skew:
    """Figures over the clients of a federation.

    Attributes
    ----------
    samples : tuple of float
        The smallest, the median and the largest number of samples on a client.
    classes : tuple of float
        The same of the number of classes on a client.
    effective_classes : float
        The mean of exp(entropy of a client's class shares): how many equally frequent classes its mix is worth.
    distance : float
        The mean total variation distance between a client's class shares and those of all data: the share of its
        samples that would have to change their class. 0 where all clients look alike.
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
        """Compute the figures of `federation`."""
        counts = federation.class_counts
        shares = counts / counts.sum(axis=1, keepdims=True)
        whole = counts.sum(axis=0) / counts.sum()
        logs = np.log(np.where(shares > 0, shares, 1.0))
        return cls(
            samples=_spread(federation.sizes),
            classes=_spread((counts > 0).sum(axis=1)),
            effective_classes=float(np.exp(-(shares * logs).sum(axis=1)).mean()),
            distance=float(np.abs(shares - whole).sum(axis=1).mean() / 2),
            largest_share=float(shares.max(axis=1).mean()),
        )


def _spread(values: np.ndarray) -> tuple[float, float, float]:
    return float(values.min()), float(np.median(values)), float(values.max())
