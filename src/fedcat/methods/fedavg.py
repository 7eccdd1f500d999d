"""FedAvg (McMahan et al. 2017): average the devices' models by their numbers of samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fedcat.hop import Hop, Reply
from fedcat.methods.method import RoundMethod, weighted_mean


class FedAvg(RoundMethod):
    """K devices, uniformly without replacement, start from the global model; their models are averaged.

    A device that does not come back is left out of the average; if none comes back the model stays.
    """

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> None:
        """Average the rows that arrived, weighted by samples."""
        ends = [(reply.end, reply.samples) for reply in replies if reply.end is not None]
        if ends:
            self.row = weighted_mean(torch.stack([end for end, _ in ends]), [n for _, n in ends])
