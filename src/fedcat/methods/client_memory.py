"""What devices keep between hops."""

from __future__ import annotations

from typing import Any

from fedcat.protocol.hop import Tensors


class DeviceMemory:
    """What devices keep between hops, for those that took part only.

    Parameters
    ----------
    blank : mapping of str to Tensor
        What a device that never took part holds.
    """

    def __init__(self, blank: Tensors) -> None:
        self.blank = dict(blank)
        self._kept: dict[int, Tensors] = {}

    def __getitem__(self, device: int) -> Tensors:
        """Return what `device` holds."""
        return self._kept.get(device, self.blank)

    def __len__(self) -> int:
        """Return how many devices hold something of their own."""
        return len(self._kept)

    def commit(self, device: int, memory: Tensors) -> None:
        """Note what `device` keeps after a hop that arrived: a copy, since engines give views of all rows."""
        self._kept[device] = {name: tensor.clone() for name, tensor in memory.items()}

    def state(self) -> dict[str, Any]:
        """Return the memory of the devices that took part."""
        return {str(device): dict(memory) for device, memory in self._kept.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._kept = {int(device): memory for device, memory in state.items()}
