"""FedAvg (McMahan et al. 2017): average the devices' models by their numbers of samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedcat.core.errors import unknown
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context
from fedcat.methods.rounds import RoundMethod
from fedcat.protocol.hop import Hop, Reply

WEIGHTINGS = ("samples", "equal")


class FedAvg(RoundMethod):
    """K devices, uniformly without replacement, start from the global model; their models are averaged.

    A device that does not come back is left out of the average; if none comes back the model stays.

    Parameters
    ----------
    context : Context
        See there.
    weighting : str
        ``samples``: a device counts by the samples it holds; ``equal``: all count alike.
    """

    def __init__(self, context: Context, *, weighting: str = "samples") -> None:
        super().__init__(context)
        if weighting not in WEIGHTINGS:
            raise unknown("weighting", weighting, WEIGHTINGS)
        self.weighting = weighting

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> None:
        """Average the rows that arrived."""
        ends = [(reply.end, reply.samples) for reply in replies if reply.end is not None]
        if ends:
            weights = [n if self.weighting == "samples" else 1 for _, n in ends]
            self.row = weighted_mean(torch.stack([end for end, _ in ends]), weights)
