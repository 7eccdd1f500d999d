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
    """Adds a share of the step that was sent to every step of the client, whose learning rate is smaller for it."""

    needs_sgd: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def after(self, p: Tensor, lr: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the parameters, moved also by the share of the step that was sent."""
        return p + sent["lead"] * sent["step"]


class Lead:
    """The mean step of the last round, on its way to the clients of the next one.

    Attributes
    ----------
    step : Tensor
        What the hops moved the parameters per local step, [P]: momentum and learning rate included. At first zero.
    lr : float
        The learning rate at which they did.
    """

    def __init__(self, context: Context) -> None:
        self.step = context.start.new_zeros(context.layout.parameter_size)
        self.lr = context.lr(0)
        self._share = (0.0, context.start.new_zeros(1))  # as a number and as a tensor

    def send(self, hop: Hop, share: float) -> Hop:
        """Return a hop of whose steps `share` is the mean step, at the hop's learning rate, and the rest its own.

        A client's own step is proportional to its learning rate, whatever momentum, weight decay and clipping do.
        """
        if hop.lr != self.lr:
            self.step, self.lr = self.step * (hop.lr / self.lr), hop.lr
        if share != self._share[0]:
            self._share = (share, on_device([share], self.step))
        return replace(hop, lr=(1 - share) * hop.lr, sent={"step": self.step, "lead": self._share[1]})

    def step_of(self, hop: Hop, end: Tensor, steps: int) -> Tensor:
        """Return what a hop moved the parameters per local step."""
        size = len(self.step)
        return (end[:size] - hop.start[:size]) / steps

    def follow(
        self, steps: Sequence[Tensor], weights: Sequence[float], aggregate: Callable[..., Tensor], lr: float
    ) -> None:
        """Take the steps of a round's hops, reduced by the method's aggregation."""
        self.step, self.lr = aggregate(torch.stack(list(steps)), weights, torch.zeros_like(self.step)), lr

    def state(self) -> dict[str, Any]:
        """Return the step and its learning rate."""
        return {"step": self.step, "lr": self.lr}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.step, self.lr = state["step"], state["lr"]
