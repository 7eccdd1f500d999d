"""A lead: local steps follow, with a share, the mean step of the last round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcat.core.device import on_device
from fedcat.methods.base import Context
from fedcat.models.layout import Tensors
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule


@dataclass(frozen=True)
class LedRule(LocalRule):
    """Adds a share of the step that was sent to every step of the client, whose learning rate is scaled for it."""

    needs_sgd: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def after(self, p: Tensor, lr: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the parameters, moved also by the share of the step that was sent."""
        return p + sent["lead"] * sent["step"]


class Lead:
    """The step that leads the clients of the next round: the mean step of the last one, and of a copy's own.

    Parameters
    ----------
    context : Context
        See there.
    copies : int
        How many copies of the model there are whose own last steps may lead them as well.

    Attributes
    ----------
    step : Tensor
        What the hops moved the parameters per local step, [P]: momentum and learning rate included. At first zero.
    last : Tensor
        The same of each copy's last hop, [K, P].
    share : float
        The share of a copy's own last step in what leads it; the rest is the mean step.
    lr : float
        The learning rate of these steps.
    """

    def __init__(self, context: Context, copies: int = 0) -> None:
        self.step = context.start.new_zeros(context.layout.parameter_size)
        self.last = context.start.new_zeros(copies, len(self.step))
        self.share, self.lr = 0.0, context.lr(0)
        self._weight = (0.0, context.start.new_zeros(1))  # of the step that is sent, as a number and as a tensor

    def send(self, hop: Hop, weight: float, rate: float) -> Hop:
        """Return a hop with `weight` times the step that leads in each step, and `rate` times its learning rate.

        The step that leads is at the hop's learning rate. A client's own step is proportional to it, whatever momentum,
        weight decay and clipping do.
        """
        if hop.lr != self.lr:
            factor = hop.lr / self.lr if self.lr else 0.0  # at a learning rate of 0 nothing has moved
            self.step, self.last, self.lr = self.step * factor, self.last * factor, hop.lr
        if weight != self._weight[0]:
            self._weight = (weight, on_device([weight], self.step))
        step = torch.lerp(self.step, self.last[hop.copy], self.share) if len(self.last) else self.step
        return replace(hop, lr=rate * hop.lr, sent={"step": step, "lead": self._weight[1]})

    def step_of(self, hop: Hop, end: Tensor, steps: int) -> Tensor:
        """Return what a hop moved the parameters per local step."""
        size = len(self.step)
        return (end[:size] - hop.start[:size]) / steps

    def follow(
        self,
        steps: Sequence[Tensor],
        weights: Sequence[float],
        aggregate: Callable[..., Tensor],
        lr: float,
        copies: Sequence[int] = (),
        share: float = 0.0,
    ) -> None:
        """Take the steps of a round's hops, reduced by the method's aggregation; `copies` are those that took them."""
        self.step, self.lr = aggregate(torch.stack(list(steps)), weights, torch.zeros_like(self.step)), lr
        if len(self.last):
            new = dict(zip(copies, steps, strict=True))
            self.last = torch.stack([new.get(copy, last) for copy, last in enumerate(self.last)])
            self.share = share

    def state(self) -> dict[str, Any]:
        """Return the steps, their learning rate and the share of a copy's own."""
        return {"step": self.step, "last": self.last, "share": self.share, "lr": self.lr}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.step, self.last, self.share, self.lr = (state[name] for name in ("step", "last", "share", "lr"))
