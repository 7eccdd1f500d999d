"""Cyclic weight transfer (Chang et al. 2018): one model walks from client to client; nothing is averaged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedcat.core.rng import Purpose, random_stream
from fedcat.methods.base import Context
from fedcat.methods.rounds import RoundMethod, ends
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply


class Cyclic(RoundMethod):
    """One copy of the model goes round all clients, K of them one after another in each round.

    A client that does not reply is passed over.

    Parameters
    ----------
    context : Context
        See there.
    reshuffle : bool
        Draw a new order for every tour; otherwise one order is kept.
    """

    default_server_optimizer = None

    def __init__(self, context: Context, *, reshuffle: bool = False) -> None:
        super().__init__(context)
        context.refuse_aggregator("cyclic averages nothing")
        context.refuse_selector("in cyclic the model visits all clients in a fixed order")
        self.reshuffle = reshuffle
        self.stages = context.per_round

    def select(self, round: int) -> Sequence[int]:
        """Return the next client of the tour; one that is banned is passed over."""
        tour, place = divmod(round * self.stages + self.stage, self.context.clients)
        rng = random_stream(self.context.seed, Purpose.GROUP, tour if self.reshuffle else 0)
        order = np.roll(rng.permutation(self.context.clients), -place).tolist()
        return [next(client for client in order if client not in self.bans.banned)]

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Return the one row that came back."""
        return ends(replies)[0]
