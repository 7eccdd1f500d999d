"""FedProx (Li et al. 2020): the local loss has a proximal term that pulls towards the global model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedcat.core.options import check_bounds
from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg
from fedcat.models.layout import Tensors
from fedcat.protocol.local_rule import LocalRule


@dataclass(frozen=True)
class ProximalRule(LocalRule):
    """Adds mu/2 * ||w - start||^2 to the loss, through its gradient, before clipping and momentum."""

    mu: float
    elementwise: ClassVar[bool] = True

    def gradient(self, g: Tensor, p: Tensor, start: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Add the gradient of the proximal term."""
        return g + self.mu * (p - start)


class FedProx(FedAvg):
    """FedAvg whose clients minimize their loss plus mu/2 * ||w - global||^2. With mu = 0 it is FedAvg.

    Parameters
    ----------
    context : Context
        See there.
    mu : float
        The strength of the proximal term.
    weighting : str
        See `FedAvg`.
    """

    def __init__(self, context: Context, *, mu: float = 0.01, weighting: str = "samples") -> None:
        super().__init__(context, weighting=weighting)
        check_bounds("mu", mu, at_least=0)
        self.rule = ProximalRule(mu)
