"""FedCluster (Chen et al. 2020): clusters of devices take their FedAvg steps one after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcat.core.errors import SettingError
from fedcat.core.rng import Purpose, chance
from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg


class FedCluster(FedAvg):
    """The devices are divided at random into M clusters. A round goes through them in an order that is drawn anew.

    Each cluster takes a FedAvg step with its share of the round's K devices, from the model that the cluster before it
    has left.

    Parameters
    ----------
    context : Context
        See there.
    clusters : int
        How many clusters there are, M, at most K; 0 for five, or K where that is less.
    weighting : str
        See `FedAvg`.
    """

    def __init__(self, context: Context, *, clusters: int = 0, weighting: str = "samples") -> None:
        super().__init__(context, weighting=weighting)
        context.refuse_selector("in fedcluster the clusters decide who trains when")
        k = context.per_round
        if not 0 <= clusters <= k:
            raise SettingError(f"clusters must be at least 0 and at most the {k} devices of a round, got {clusters}")
        clusters = clusters or min(5, k)
        self.stages = clusters
        self.clusters = np.array_split(chance(context.seed, Purpose.GROUP).permutation(context.devices), clusters)

    def select(self, round: int) -> Sequence[int]:
        """Return the devices of the cluster whose turn it is."""
        seed, k = self.context.seed, self.context.per_round
        order = chance(seed, Purpose.GROUP, round, device=1).permutation(self.stages)
        cluster = int(order[self.stage])
        count = k // self.stages + (cluster < k % self.stages)
        rng = chance(seed, Purpose.SELECT, round, visit=cluster)
        return [int(device) for device in rng.choice(self.clusters[cluster], size=count, replace=False)]
