"""FedCluster (Chen et al. 2020): clusters of clients take their FedAvg steps one after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedcat.core.errors import SettingError
from fedcat.core.rng import Purpose, random_stream
from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg


class FedCluster(FedAvg):
    """The clients are divided at random into M clusters. Each round goes through them in a new random order.

    Each cluster takes a FedAvg step with its share of the round's K clients, from the model that the cluster before it
    has left.

    Parameters
    ----------
    context : Context
        See there.
    clusters : int
        The number of clusters, M, at most K; 0 for five, or K if that is less.
    weighting : str
        See `FedAvg`.
    """

    def __init__(self, context: Context, *, clusters: int = 0, weighting: str = "samples") -> None:
        super().__init__(context, weighting=weighting)
        context.refuse_selector("in fedcluster the clusters decide who trains when")
        k = context.per_round
        if not 0 <= clusters <= k:
            raise SettingError(f"clusters must be at least 0 and at most the {k} clients of a round, got {clusters}")
        self.stages = clusters or min(5, k)
        order = random_stream(context.seed, Purpose.GROUP).permutation(context.clients)
        self.clusters = np.array_split(order, self.stages)

    def select(self, round: int) -> Sequence[int]:
        """Return the clients of the cluster whose turn it is."""
        seed, k = self.context.seed, self.context.per_round
        order = random_stream(seed, Purpose.GROUP, round, client=1).permutation(self.stages)
        cluster = int(order[self.stage])
        count = k // self.stages + (cluster < k % self.stages)
        rng = random_stream(seed, Purpose.SELECT, round, visit=cluster)
        left = np.setdiff1d(self.clusters[cluster], self.bans.banned, assume_unique=True)
        chosen = rng.choice(left, size=min(count, len(left)), replace=False)
        if len(chosen) < count:  # too many of the cluster are banned: clients of others take their place
            others = np.setdiff1d(np.arange(self.context.clients), [*self.clusters[cluster], *self.bans.banned])
            chosen = np.concatenate([chosen, rng.choice(others, size=count - len(chosen), replace=False)])
        return [int(client) for client in chosen]
