"""FedCM (Xu et al. 2021): the steps of all clients are led by the direction in which the last round moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedcat.core.options import check_bounds
from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg
from fedcat.methods.lead import Lead, LedRule
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply


class FedCM(FedAvg):
    """FedAvg whose clients follow, with a share of 1 - alpha, the mean direction of the last round.

    Parameters
    ----------
    context : Context
        See there.
    alpha : float
        The share of a client's own gradient in its steps. With alpha = 1 it is FedAvg.
    weighting : str
        See `FedAvg`; the direction is weighted like the models.
    """

    def __init__(self, context: Context, *, alpha: float = 0.1, weighting: str = "samples") -> None:
        super().__init__(context, weighting=weighting)
        check_bounds("alpha", alpha, above=0, at_most=1)
        self.rule = LedRule()
        self.share, self.lead = 1 - alpha, Lead(context)

    def hop(self, round: int, slot: int, client: int, visit: int) -> Hop:
        """Send the direction along, as a step."""
        return self.lead.send(super().hop(round, slot, client, visit), self.share, 1 - self.share)

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Average the rows, and remember how far they moved per step."""
        pairs = zip(hops, replies, strict=True)
        steps = [self.lead.step_of(hop, reply.end, reply.steps) for hop, reply in pairs if reply.end is not None]
        self.lead.follow(steps, self.weights(replies), self.aggregate, self.context.lr(self.round))
        return super().reduce(hops, replies)

    def state(self) -> dict[str, Any]:
        """Return also the direction."""
        return {**super().state(), "lead": self.lead.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().restore(state)
        self.lead.restore(state["lead"])
