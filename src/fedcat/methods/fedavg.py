"""FedAvg (McMahan et al. 2017): average the clients' models, weighted by their numbers of samples."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedcat.core.errors import unknown_name
from fedcat.methods.base import Context
from fedcat.methods.rounds import RoundMethod, ends
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply

WEIGHTINGS = ("samples", "equal")


class FedAvg(RoundMethod):
    """K clients, drawn uniformly without replacement, start from the global model; their models are averaged.

    A client that does not reply is left out of the average; if none replies, the model stays as it is.

    Parameters
    ----------
    context : Context
        See there.
    weighting : str
        ``samples``: weight clients by their number of samples; ``equal``: weight all clients equally.
    """

    def __init__(self, context: Context, *, weighting: str = "samples") -> None:
        super().__init__(context)
        if weighting not in WEIGHTINGS:
            raise unknown_name("weighting", weighting, WEIGHTINGS)
        self.weighting = weighting

    def weights(self, replies: Sequence[Reply]) -> list[int]:
        """Return the weights of replies."""
        return [reply.samples if self.weighting == "samples" else 1 for reply in replies]

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Average the rows, or what the user chose instead of a mean."""
        return self.aggregate(ends(replies), self.weights(replies), self.row)
