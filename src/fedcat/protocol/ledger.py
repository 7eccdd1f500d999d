"""The traffic ledger: bytes per round, device and direction, taken from what is really sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Entry:
    """What passed between the server and one device in one round."""

    round: int
    device: int
    down: int = 0
    up: int = 0


class Ledger:
    """Bytes that went down to devices and came up from them."""

    def __init__(self) -> None:
        self.down = 0
        self.up = 0
        self._entries: dict[tuple[int, int], Entry] = {}

    def sent(self, round: int, device: int, size: int) -> None:
        """Note bytes that went to a device."""
        self.down += size
        self._entry(round, device).down += size

    def received(self, round: int, device: int, size: int) -> None:
        """Note bytes that came from a device."""
        self.up += size
        self._entry(round, device).up += size

    def _entry(self, round: int, device: int) -> Entry:
        return self._entries.setdefault((round, device), Entry(round, device))

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.down + self.up

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries in the order in which they were opened."""
        return iter(self._entries.values())

    def ended(self, round: int) -> list[Entry]:
        """Return the entries of the rounds before `round`."""
        return [entry for entry in self._entries.values() if entry.round < round]

    def forget(self, round: int) -> None:
        """Forget the entries of the rounds before `round`; the totals stay."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry.round >= round}
