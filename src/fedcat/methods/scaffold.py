"""SCAFFOLD (Karimireddy et al. 2020): control variates keep local steps on the global course."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedcat.core.errors import unknown
from fedcat.methods.base import Context
from fedcat.methods.client_memory import DeviceMemory
from fedcat.methods.fedavg import FedAvg
from fedcat.protocol.hop import Hop, Reply, Tensors
from fedcat.protocol.local_rule import LocalRule

VARIANTS = ("corrected", "after-step", "plain")


@dataclass(frozen=True)
class Controlled(LocalRule):
    """Every step is corrected by c - c_i; afterwards c_i becomes the mean gradient that the device has followed.

    `variant` says where the correction goes and how that mean is read off the way that the device has gone:

    - ``corrected``: into the gradient; the way is divided by steps * lr * A, A being what the momentum has made of
      a constant gradient.
    - ``after-step``: into the parameters, past the momentum; the way is divided by steps * lr, so that c_i holds A
      times the mean gradient, in the units in which it is subtracted.
    - ``plain``: into the gradient, the way divided by steps * lr: the printed form, for SGD without momentum.
    """

    variant: str

    def gradient(self, g: Tensor, p: Tensor, start: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the corrected gradient."""
        return g if self.variant == "after-step" else g + (sent["control"] - memory["control"])

    def after(self, p: Tensor, lr: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the corrected parameters."""
        return p - lr * (sent["control"] - memory["control"]) if self.variant == "after-step" else p

    def finish(
        self, start: Tensor, end: Tensor, steps: Tensor, lr: Tensor, momentum: Tensor, sent: Tensors, memory: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Upload the change of the device's control variate and keep the new one."""
        gain = amplification(momentum, steps) if self.variant == "corrected" else 1.0
        way = steps * lr * gain
        change = torch.where(way > 0, (start - end) / way - sent["control"], 0.0)
        return {"control": change}, {"control": memory["control"] + change}


def amplification(momentum: Tensor, steps: Tensor) -> Tensor:
    """Return by how much a fresh momentum buffer lengthens the way of `steps` steps along a constant gradient.

    After k steps the buffer is (1 - b^k) / (1 - b) times the gradient; this is the mean over k = 1 .. steps.
    """
    b, s = momentum.double(), steps.double()
    return ((1 - b * (1 - b**s) / ((1 - b) * s)) / (1 - b)).to(momentum.dtype)


class Scaffold(FedAvg):
    """FedAvg with control variates, one for each device that took part and one of the server, their mean.

    Parameters
    ----------
    context : Context
        See there.
    variant : str
        Where the correction goes, see `Controlled`.
    weighting : str
        ``equal``: devices count alike, in the model and in the server's control variate, as in the paper;
        ``samples``: by the samples that they hold, in both.
    """

    def __init__(self, context: Context, *, variant: str = "corrected", weighting: str = "equal") -> None:
        super().__init__(context, weighting=weighting)
        if variant not in VARIANTS:
            raise unknown("variant", variant, VARIANTS)
        self.rule = Controlled(variant)
        self.control = context.start.new_zeros(context.layout.parameter_size)
        self.memory: DeviceMemory = DeviceMemory({"control": self.control})

    def hop(self, round: int, slot: int, device: int, visit: int) -> Hop:
        """Send the server's control variate along."""
        return replace(super().hop(round, slot, device, visit), sent={"control": self.control})

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> None:
        """Average the rows, and keep the server's control variate the mean over all devices.

        Of a device that was drawn twice the last reply counts, which is the one that it keeps.
        """
        super().reduce(hops, replies)
        last = {hop.device: reply for hop, reply in zip(hops, replies, strict=True) if reply.arrived}
        if last:
            samples, every = self.context.samples, self.weighting == "equal"
            shares = [1 / len(samples) if every else samples[device] / samples.sum() for device in last]
            changes = torch.stack([reply.uploads["control"] for reply in last.values()])
            self.control = self.control + changes.new_tensor(shares) @ changes

    def state(self) -> dict[str, Any]:
        """Return also the server's control variate."""
        return {**super().state(), "control": self.control}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        super().restore(state)
        self.control = state["control"]
