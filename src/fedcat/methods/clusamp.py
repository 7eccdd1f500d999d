"""CluSamp (Fraboni et al. 2021, Algorithm 2): one client from each of K clusters of similar clients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg
from fedcat.methods.rounds import ends
from fedcat.methods.selection.clustered import ClusteredSelector
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply

SLOW = 3_000
"""From this number of clients on, clustering takes seconds per round."""


class CluSamp(FedAvg):
    """FedAvg whose clients are drawn from clusters of similar clients and weighted equally.

    A client's representative gradient is its update of the parameters at its last participation; it is kept only for
    clients that took part. The memory of the clustering grows with the square of the number of clients, its time with
    the cube.

    Parameters
    ----------
    context : Context
        See there.
    similarity : str
        How representative gradients are compared: ``cosine`` (their angle), ``L1`` or ``L2``.
    """

    def __init__(self, context: Context, *, similarity: str = "cosine") -> None:
        super().__init__(context, weighting="equal")
        context.refuse_selector("clusamp is a selection itself")
        self.selector: ClusteredSelector = ClusteredSelector(
            context.seed, context.samples, context.per_round, similarity
        )

    def advice(self, rounds: int, interval: int) -> list[str]:
        """Warn that many clients make long rounds."""
        if self.context.clients < SLOW:
            return []
        return [f"{self.context.clients:,} clients are clustered in every round, which takes seconds to minutes"]

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Average the rows, all weighted equally, and learn the clients' representative gradients."""
        size = self.context.layout.parameter_size
        updates = {hop.client: row[:size] - hop.start[:size] for hop, row in zip(hops, ends(replies), strict=True)}
        self.selector.learn(updates)
        return super().reduce(hops, replies)
