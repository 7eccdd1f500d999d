"""FedCM (Xu et al. 2021): the steps of all clients are led by the direction in which the last round moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcat.core.options import check_bounds
from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg
from fedcat.models.layout import Tensors
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply


@dataclass(frozen=True)
class LedRule(LocalRule):
    """Adds a share of the step that was sent to every step of the client, whose learning rate is smaller for it."""

    needs_sgd: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def after(self, p: Tensor, lr: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the parameters, moved also by the share of the step that was sent."""
        return p + sent["lead"] * sent["step"]


def led(hop: Hop, step: Tensor, lead: Tensor, share: float) -> Hop:
    """Return a hop of whose steps `share` is `step`, [P], and the rest the client's own.

    `lead` is the share as a tensor, [1]. A client's own step is proportional to its learning rate, whatever momentum,
    weight decay and clipping do to it.
    """
    return replace(hop, lr=(1 - share) * hop.lr, sent={"step": step, "lead": lead})


def local_step(hop: Hop, end: Tensor, steps: int, size: int) -> Tensor:
    """Return what a hop moved the first `size` numbers of its row per local step."""
    return (end[:size] - hop.start[:size]) / steps


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
        self.share = 1 - alpha
        self.rule = LedRule()
        self.direction = context.start.new_zeros(context.layout.parameter_size)
        self.lead = context.start.new_full((1,), self.share)
        self.lr = context.lr(0)

    def hop(self, round: int, slot: int, client: int, visit: int) -> Hop:
        """Send the direction along, at the learning rate of this round."""
        hop = super().hop(round, slot, client, visit)
        if hop.lr != self.lr:
            self.direction, self.lr = self.direction * (hop.lr / self.lr), hop.lr
        return led(hop, self.direction, self.lead, self.share)

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Average the rows, and remember how far they moved per step."""
        pairs, size = zip(hops, replies, strict=True), len(self.direction)
        steps = [local_step(hop, reply.end, reply.steps, size) for hop, reply in pairs if reply.end is not None]
        zero = torch.zeros_like(self.direction)
        self.direction = self.aggregate(torch.stack(steps), self.weights(replies), zero)
        return super().reduce(hops, replies)

    def state(self) -> dict[str, Any]:
        """Return also the direction."""
        return {**super().state(), "direction": self.direction, "lr": self.lr}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().restore(state)
        self.direction, self.lr = state["direction"], state["lr"]
