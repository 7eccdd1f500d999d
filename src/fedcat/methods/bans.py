"""Bans: clients whose replies were refused too often are not selected any more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any


class Bans:
    """Counts refused replies by client.

    A method counts them when all replies of a round are in, or of a cycle, so that who is banned does not depend on the
    order in which they came.

    Parameters
    ----------
    after : int, optional
        The number of refused replies after which a client is banned; None for never.
    most : int
        The largest number of clients that are banned: enough must be left for a round.

    Attributes
    ----------
    refused : Counter
        Refused replies by client.
    banned : list of int
        The clients that are banned, in the order in which they were.
    """

    def __init__(self, after: int | None, most: int) -> None:
        self.after, self.most = after, most
        self.refused: Counter[int] = Counter()
        self.banned: list[int] = []

    def count(self, clients: Iterable[int]) -> bool:
        """Count a refused reply of each of these clients; return whether one is banned for it."""
        refused = sorted(clients)
        self.refused.update(refused)
        if self.after is None:
            return False
        reached = [c for c in dict.fromkeys(refused) if self.refused[c] >= self.after and c not in self.banned]
        fresh = reached[: self.most - len(self.banned)]
        self.banned += fresh
        return bool(fresh)

    def state(self) -> dict[str, Any]:
        """Return the counts and who is banned."""
        counts = {str(client): count for client, count in self.refused.items()}
        return {"refused": counts, "banned": list(self.banned)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.refused = Counter({int(client): count for client, count in state["refused"].items()})
        self.banned = list(state["banned"])
