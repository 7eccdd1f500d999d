"""The traffic ledger: bytes per round, client and direction, counted from what is actually sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Entry:
    """What passed between the server and one client in one round."""

    round: int
    client: int
    down: int = 0
    up: int = 0


class Ledger:
    """Bytes that went down to clients and came up from them."""

    def __init__(self) -> None:
        self.down = 0
        self.up = 0
        self._entries: dict[tuple[int, int], Entry] = {}

    def sent(self, round: int, client: int, size: int) -> None:
        """Add bytes sent to a client."""
        self.down += size
        self._entry(round, client).down += size

    def received(self, round: int, client: int, size: int) -> None:
        """Add bytes received from a client."""
        self.up += size
        self._entry(round, client).up += size

    def _entry(self, round: int, client: int) -> Entry:
        return self._entries.setdefault((round, client), Entry(round, client))

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
