"""FedCross (Hu et al. 2022): each copy of the model takes a little of another one after every round."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcat.core.errors import unknown_name
from fedcat.core.options import check_bounds
from fedcat.methods.base import Context
from fedcat.methods.copies import CopiesMethod

COLLABORATORS = ("least-similar", "most-similar", "in-order")


class FedCross(CopiesMethod):
    """Copies of the model, each of which becomes alpha of itself and 1 - alpha of a collaborator.

    Parameters
    ----------
    context : Context
        See there.
    alpha : float
        How much of itself a copy keeps.
    collaborator : str
        Which copy it mixes in: ``least-similar`` or ``most-similar`` by the cosine of the parameters, or ``in-order``:
        the next copy, in the next round the one after it, and so on.
    """

    def __init__(self, context: Context, *, alpha: float = 0.99, collaborator: str = "least-similar") -> None:
        super().__init__(context)
        check_bounds("alpha", alpha, at_least=0.5, at_most=1)
        if collaborator not in COLLABORATORS:
            raise unknown_name("collaborator", collaborator, COLLABORATORS)
        self.alpha, self.collaborator = alpha, collaborator

    def exchange(self, copies: Tensor, mean: Tensor) -> Tensor:
        """Cross-aggregate: copy_i = alpha * copy_i + (1 - alpha) * its collaborator."""
        if len(copies) == 1:
            return copies
        return copies + (1 - self.alpha) * (copies[self.collaborators(copies)] - copies)

    def collaborators(self, copies: Tensor) -> Tensor:
        """Return the collaborator of each of two or more copies."""
        k = len(copies)
        if self.collaborator == "in-order":
            return (torch.arange(k, device=copies.device) + self.round % (k - 1) + 1) % k
        directions = torch.nn.functional.normalize(copies[:, : self.context.layout.parameter_size])
        similarity = directions @ directions.T
        wanted = similarity if self.collaborator == "most-similar" else -similarity
        return wanted.fill_diagonal_(-torch.inf).argmax(1)
