"""Methods whose copies of the model train side by side and learn from each other, but are not averaged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context
from fedcat.methods.rounds import RoundMethod
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply


class CopiesMethod(RoundMethod):
    """K copies of the model go to the K clients of a round and come back; then they learn from each other.

    The global model is the equal mean of the copies that came back, before the exchange; it is evaluated, but not
    trained. A copy whose hop fails takes part as it was. A method overrides `exchange`.

    Attributes
    ----------
    copies : Tensor
        The copies, [K, D].
    """

    default_server_optimizer = None
    extra_models = ("copies",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        context.refuse_aggregator(f"{type(self).__name__} trains copies that are never averaged")
        self.copies = self.row.repeat(context.per_round, 1)

    @abstractmethod
    def exchange(self, copies: Tensor, mean: Tensor) -> Tensor:
        """Return the copies of the next round, [K, D], given those that came back and their mean."""

    def hop(self, round: int, slot: int, client: int, visit: int) -> Hop:
        """Send each of the round's clients another copy."""
        return replace(super().hop(round, slot, client, visit), start=self.copies[slot])

    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Return the mean of the copies that came back and of those that did not; let them learn from each other."""
        ends = {hop.copy: reply.end for hop, reply in zip(hops, replies, strict=True) if reply.end is not None}
        copies = torch.stack([ends.get(number, copy) for number, copy in enumerate(self.copies)])
        mean = weighted_mean(copies, [1] * len(copies))
        self.copies = self.exchange(copies, mean)
        return mean

    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return the global model and its average; if wanted, the copies that the next round starts from."""
        copies = {f"copy {i}": copy for i, copy in enumerate(self.copies)} if "copies" in wanted else {}
        return {**super().models(*wanted), **copies}

    def state(self) -> dict[str, Any]:
        """Return also the copies."""
        return {**super().state(), "copies": self.copies}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().restore(state)
        self.copies = state["copies"]
