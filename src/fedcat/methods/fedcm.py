"""FedCM (Xu et al. 2021): the steps of all clients are led by the direction in which the last round moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcat.core.device import on_device
from fedcat.core.options import check_bounds
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg
from fedcat.models.layout import Tensors
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply


@dataclass(frozen=True)
class LedRule(LocalRule):
    """Every step is a share `lead` of the step that is sent, and 1 - lead of the client's own.

    The step that is sent has the units of the parameters: it is what the last round moved per local step, its momentum
    and learning rate included.
    """

    weight_decay: float
    needs_sgd: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def gradient(self, g: Tensor, p: Tensor, start: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the client's share of its gradient, and of the weight decay that the optimizer will add."""
        own = (1 - sent["lead"]) * g
        return own - sent["lead"] * self.weight_decay * p if self.weight_decay else own

    def after(self, p: Tensor, lr: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the parameters, moved also by the share of the step that was sent."""
        return p + sent["lead"] * sent["step"]


def led(hop: Hop, step: Tensor, lead: float) -> Hop:
    """Return a hop whose steps are led by `step`, [P]."""
    return replace(hop, sent={"step": step, "lead": on_device([lead], step)})


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
        self.lead = 1 - alpha
        self.rule = LedRule(context.weight_decay)
        self.direction = context.start.new_zeros(context.layout.parameter_size)
        self.lr = context.lr(0)

    def hop(self, round: int, slot: int, client: int, visit: int) -> Hop:
        """Send the direction along, at the learning rate of this round."""
        hop = super().hop(round, slot, client, visit)
        if hop.lr != self.lr:
            self.direction, self.lr = self.direction * (hop.lr / self.lr), hop.lr
        return led(hop, self.direction, self.lead)

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Average the rows, and remember what they moved."""
        pairs, size = zip(hops, replies, strict=True), len(self.direction)
        steps = [local_step(hop, reply.end, reply.steps, size) for hop, reply in pairs if reply.end is not None]
        self.direction = weighted_mean(torch.stack(steps), self.weights(replies))
        return super().reduce(hops, replies)

    def state(self) -> dict[str, Any]:
        """Return also the direction."""
        return {**super().state(), "direction": self.direction, "lr": self.lr}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().restore(state)
        self.direction, self.lr = state["direction"], state["lr"]
