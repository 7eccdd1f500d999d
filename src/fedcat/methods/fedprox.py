"""FedProx (Li et al. 2020): the local loss pulls towards the global model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedcat.core.errors import need
from fedcat.methods.base import Context
from fedcat.methods.fedavg import FedAvg
from fedcat.protocol.hop import Tensors
from fedcat.protocol.local_rule import LocalRule


@dataclass(frozen=True)
class Proximal(LocalRule):
    """Adds mu/2 * ||w - start||^2 to the loss, by its gradient: it passes through clipping and momentum."""

    mu: float

    def gradient(self, g: Tensor, p: Tensor, start: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the gradient with the proximal term's."""
        return g + self.mu * (p - start)


class FedProx(FedAvg):
    """FedAvg whose devices minimise their loss plus mu/2 * ||w - global||^2. With mu = 0 it is FedAvg.

    Parameters
    ----------
    context : Context
        See there.
    mu : float
        The strength of the pull.
    weighting : str
        See `FedAvg`.
    """

    def __init__(self, context: Context, *, mu: float = 0.01, weighting: str = "samples") -> None:
        super().__init__(context, weighting=weighting)
        need("mu", mu, 0)
        self.rule = Proximal(mu)
