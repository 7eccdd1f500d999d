"""SCAFFOLD (Karimireddy et al. 2020): control variates correct the drift of local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcat.core.device import on_device
from fedcat.core.errors import unknown_name
from fedcat.methods.base import Context
from fedcat.methods.client_memory import ClientMemory
from fedcat.methods.fedavg import FedAvg
from fedcat.models.layout import Tensors
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply

VARIANTS = ("corrected", "after-step", "plain")


@dataclass(frozen=True)
class ControlVariateRule(LocalRule):
    """Corrects every step by c - c_i; afterwards c_i becomes the mean gradient that the client has followed.

    `variant` says where the correction is applied and how that mean is computed from the distance covered:

    - ``corrected``: to the gradient; the distance is divided by steps * lr * A, where A is the factor by which momentum
      amplifies a constant gradient.
    - ``after-step``: to the parameters, past the momentum; the distance is divided by steps * lr, so that c_i holds A
      times the mean gradient, in the units in which it is subtracted.
    - ``plain``: to the gradient, the distance divided by steps * lr: as printed in the paper, for SGD without momentum.
    """

    variant: str
    needs_sgd: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def gradient(self, g: Tensor, p: Tensor, start: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the corrected gradient."""
        return g if self.variant == "after-step" else g + (sent["control"] - memory["control"])

    def after(self, p: Tensor, lr: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the corrected parameters."""
        return p - lr * (sent["control"] - memory["control"]) if self.variant == "after-step" else p

    def finish(
        self, start: Tensor, end: Tensor, steps: Tensor, lr: Tensor, momentum: Tensor, sent: Tensors, memory: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Upload the change of the client's control variate and keep the new one."""
        gain = amplification(momentum, steps) if self.variant == "corrected" else 1.0
        scale = steps * lr * gain
        change = torch.where(scale > 0, (start - end) / scale - sent["control"], 0.0)
        return {"control": change}, {"control": memory["control"] + change}


def amplification(momentum: Tensor, steps: Tensor) -> Tensor:
    """Return by how much a fresh momentum buffer lengthens `steps` steps along a constant gradient.

    After k steps the buffer is (1 - b^k) / (1 - b) times the gradient; this is the mean over k = 1 .. steps.
    """
    b, s = momentum.double(), steps.double()
    return ((1 - b * (1 - b**s) / ((1 - b) * s)) / (1 - b)).to(momentum.dtype)


class Scaffold(FedAvg):
    """FedAvg with control variates: one for each client that took part, and their mean on the server.

    Parameters
    ----------
    context : Context
        See there.
    variant : str
        Where the correction is applied, see `ControlVariateRule`.
    weighting : str
        ``equal``: weight clients equally, in the model and in the server's control variate, as in the paper;
        ``samples``: weight them by their number of samples, in both.
    """

    def __init__(self, context: Context, *, variant: str = "corrected", weighting: str = "equal") -> None:
        super().__init__(context, weighting=weighting)
        if variant not in VARIANTS:
            raise unknown_name("variant", variant, VARIANTS)
        self.rule = ControlVariateRule(variant)
        self.control = context.start.new_zeros(context.layout.parameter_size)
        self.memory: ClientMemory = ClientMemory({"control": self.control})

    def hop(self, round: int, slot: int, client: int, visit: int) -> Hop:
        """Send the server's control variate along."""
        return replace(super().hop(round, slot, client, visit), sent={"control": self.control})

    def uploads(self, hop: Hop) -> Tensors:
        """Return the change of a control variate."""
        return {"control": self.control}

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Average the rows, and keep the server's control variate the mean over all clients.

        If a client was drawn twice, its last reply counts, which is the one that it keeps.
        """
        last = {hop.client: reply for hop, reply in zip(hops, replies, strict=True)}
        samples, equal = self.context.samples, self.weighting == "equal"
        shares = [1 / len(samples) if equal else samples[client] / samples.sum() for client in last]
        changes = torch.stack([reply.uploads["control"] for reply in last.values()])
        self.control = self.control + on_device(shares, changes) @ changes
        return super().reduce(hops, replies)

    def state(self) -> dict[str, Any]:
        """Return also the server's control variate."""
        return {**super().state(), "control": self.control}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().restore(state)
        self.control = state["control"]
