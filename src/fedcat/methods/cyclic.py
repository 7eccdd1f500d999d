"""Cyclic weight transfer (Chang et al. 2018): one model walks from device to device; nothing is averaged."""

from __future__ import annotations

from collections.abc import Sequence

from fedcat.core.rng import Purpose, chance
from fedcat.methods.base import Context
from fedcat.methods.rounds import RoundMethod
from fedcat.protocol.hop import Hop, Reply


class Cyclic(RoundMethod):
    """One copy of the model goes round all devices, K of them one after another in each round.

    A device that does not come back is passed over.

    Parameters
    ----------
    context : Context
        See there.
    reshuffle : bool
        Draw the order anew for every tour; otherwise one order is kept.
    """

    server_step = None

    def __init__(self, context: Context, *, reshuffle: bool = False) -> None:
        super().__init__(context)
        context.refuse_selector("in cyclic the model goes round all devices in their order")
        self.reshuffle = reshuffle
        self.stages = context.per_round

    def select(self, round: int) -> Sequence[int]:
        """Return the next device of the tour."""
        tour, place = divmod(round * self.stages + self.stage, self.context.devices)
        rng = chance(self.context.seed, Purpose.GROUP, tour if self.reshuffle else 0)
        return [int(rng.permutation(self.context.devices)[place])]

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> None:
        """Go on with the row that came back."""
        (reply,) = replies
        if reply.end is not None:
            self.row = reply.end.clone()
