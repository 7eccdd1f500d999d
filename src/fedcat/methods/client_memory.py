"""What clients keep between hops."""

from __future__ import annotations

from typing import Any

from fedcat.models.layout import Tensors


class ClientMemory:
    """What clients keep between hops, stored only for those that took part.

    Parameters
    ----------
    blank : mapping of str to Tensor
        What a client that never took part holds.
    """

    def __init__(self, blank: Tensors) -> None:
        self.blank = dict(blank)
        self._kept: dict[int, Tensors] = {}

    def __getitem__(self, client: int) -> Tensors:
        """Return what `client` holds."""
        return self._kept.get(client, self.blank)

    def __len__(self) -> int:
        """Return how many clients took part."""
        return len(self._kept)

    def commit(self, client: int, memory: Tensors) -> None:
        """Store what `client` keeps after a hop that arrived: a copy, since engines return views of shared memory."""
        self._kept[client] = {name: tensor.clone() for name, tensor in memory.items()}

    def state(self) -> dict[str, Any]:
        """Return the memory of the clients that took part."""
        return {str(client): dict(memory) for client, memory in self._kept.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self._kept = {int(client): memory for client, memory in state.items()}
