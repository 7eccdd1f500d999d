"""Clustered sampling (Fraboni et al. 2021, algorithm 2): one device from each of K clusters of similar devices."""

from __future__ import annotations

from collections.abc import Sequence

from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg
from fedcat.methods.selection.clustered import ClusteredSelector
from fedcat.protocol.hop import Hop, Reply

SLOW = 3_000
"""Devices from which on clustering takes seconds a round."""


class CluSamp(FedAvg):
    """FedAvg whose devices are drawn from clusters, so that they count alike in the average.

    A device's representative gradient is how it changed the parameters at its last participation; it is kept for the
    devices that took part only. The memory of the clustering grows with the square of the number of devices, its time
    with the cube.

    Parameters
    ----------
    context : Context
        See there.
    similarity : str
        How representative gradients are compared: ``cosine`` (its angle), ``L1`` or ``L2``.
    """

    def __init__(self, context: Context, *, similarity: str = "cosine") -> None:
        super().__init__(context, weighting="equal")
        context.refuse_selector("clusamp is a selection itself")
        self.selector: ClusteredSelector = ClusteredSelector(
            context.seed, context.samples, context.per_round, similarity
        )

    def advice(self, rounds: int) -> list[str]:
        """Say that many devices make long rounds."""
        if self.context.devices < SLOW:
            return []
        return [f"{self.context.devices:,} devices are clustered anew in every round, which takes seconds to minutes"]

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> None:
        """Average the rows that arrived, all alike, and learn how the devices changed them."""
        super().reduce(hops, replies)
        size = self.context.layout.parameter_size
        pairs = [(hop, reply.end) for hop, reply in zip(hops, replies, strict=True) if reply.end is not None]
        self.selector.learn({hop.device: end[:size] - hop.start[:size] for hop, end in pairs})
