"""Label counts: how many samples of each class a client holds, which it reports once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedcat.data.skew import class_distance
from fedcat.methods.base import Context
from fedcat.models.layout import Tensors
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import Task


class LabelReport(LocalRule):
    """A client uploads its label counts once, and remembers in `told` that it has.

    In a simulation the server, which knows whose counts have arrived, hands out that memory.
    """

    def finish(
        self, start: Tensor, end: Tensor, steps: Tensor, lr: Tensor, momentum: Tensor, sent: Tensors, memory: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Remember that the label counts have been reported."""
        return {}, {"told": torch.ones_like(memory["told"])}

    def report(self, task: Task, hop: Hop) -> dict[str, Tensor]:
        """Upload the label counts, once."""
        if bool(hop.memory["told"]):
            return {}
        return {"labels": torch.from_numpy(task.federation.class_counts[hop.client])}


class LabelCounts:
    """The label counts that clients have reported.

    Parameters
    ----------
    context : Context
        See there; it must have classes.
    """

    def __init__(self, context: Context) -> None:
        self.classes = context.classes
        self._no, self._yes = context.start.new_zeros(()), context.start.new_ones(())
        self._known: dict[int, Tensor] = {}
        self._skew: float | None = None

    def __getitem__(self, client: int) -> Tensor:
        """Return a client's counts."""
        return self._known[client]

    def memory(self, client: int) -> Tensors:
        """Return what a client remembers: whether it has reported its counts."""
        return {"told": self._yes if client in self._known else self._no}

    def uploads(self, client: int) -> Tensors:
        """Return what a client uploads: its counts, if they are not known yet."""
        return {} if client in self._known else {"labels": torch.zeros(self.classes, dtype=torch.int64)}

    def add(self, client: int, uploads: Tensors) -> None:
        """Take the counts from what a client has uploaded, if they are there."""
        if "labels" in uploads:
            self._known[client] = uploads["labels"]
            self._skew = None

    def skew(self) -> float | None:
        """Return how skewed the labels are: the mean distance of a client's class shares from those of all clients.

        It is between 0, if all have the same shares, and 1; None if no counts are known.
        """
        if self._skew is None and self._known:
            counts = torch.stack([self._known[client] for client in sorted(self._known)]).double().clamp(min=0).cpu()
            counts = counts[counts.sum(1) > 0]
            self._skew = class_distance(counts.numpy()) if len(counts) else None
        return self._skew

    def state(self) -> dict[str, Any]:
        """Return the counts."""
        return {str(client): counts for client, counts in self._known.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self._known = {int(client): counts for client, counts in state.items()}
        self._skew = None
