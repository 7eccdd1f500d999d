"""The traffic ledger: bytes of every hop, counted from what is actually sent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.reply import Reply


@dataclass(slots=True)
class HopRecord:
    """What became of a hop.

    Attributes
    ----------
    round, copy, attempt : int
        The hop's id; rounds count from 0.
    client : int
        Who trained.
    down, up : int
        Bytes sent to the client and received from it.
    status : str
        ``arrived``, ``late``, ``failed`` or ``refused``; empty while it is on its way.
    why : str
        The reason if it did not arrive.
    loss : float or None
        The mean training loss; None unless it arrived.
    """

    round: int
    copy: int
    attempt: int
    client: int
    down: int
    up: int = 0
    status: str = ""
    why: str = ""
    loss: float | None = None

    @property
    def arrived(self) -> bool:
        """Whether the method could use it."""
        return self.status == "arrived"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for the history, without the round and what is usual."""
        usual = {"attempt": 0, "status": "arrived", "why": "", "loss": None}
        return {k: v for k, v in asdict(self).items() if k != "round" and (k not in usual or usual[k] != v)}


class Ledger:
    """Counts each hop once: bytes that went down to clients and came up from them.

    What evaluation on clients takes is counted apart, in `evaluation`.
    """

    def __init__(self) -> None:
        self.down = 0
        self.up = 0
        self.evaluation = 0
        self._hops: dict[HopId, HopRecord] = {}

    def sent(self, hop: Hop) -> None:
        """Count a hop's bytes down; a hop that is planned again after a restore has been counted."""
        if hop.id not in self._hops:
            self._hops[hop.id] = HopRecord(hop.round, hop.copy, hop.attempt, hop.client, hop.bytes_down)
            self.down += hop.bytes_down

    def never_sent(self, hop: Hop) -> None:
        """Take back the bytes of a hop that was given up before it was sent."""
        record = self._hops[hop.id]
        self.down -= record.down
        record.down = 0

    def received(self, hop: Hop, reply: Reply) -> None:
        """Count the bytes of a reply and note how its hop ended."""
        record = self._hops[hop.id]
        record.status, record.why = reply.status.value, reply.why
        record.loss = reply.loss if reply.arrived else None
        self.add_up(hop, reply.bytes_up)

    def add_up(self, hop: Hop, size: int) -> None:
        """Count bytes from a client, also after its hop was given up; the hop's round may have been forgotten."""
        self.up += size
        if hop.id in self._hops:
            self._hops[hop.id].up += size

    @property
    def total(self) -> int:
        """Bytes in both directions, without evaluation."""
        return self.down + self.up

    def until(self, round: int) -> tuple[int, int]:
        """Return the bytes down and up of the rounds before `round`: hops of later rounds may be on their way."""
        ahead = [hop for hop in self._hops.values() if hop.round >= round]
        return self.down - sum(hop.down for hop in ahead), self.up - sum(hop.up for hop in ahead)

    def __iter__(self) -> Iterator[HopRecord]:
        """Yield the hops that are not forgotten, in the order in which they were sent."""
        return iter(self._hops.values())

    def of_round(self, round: int) -> list[HopRecord]:
        """Return the hops of a round by copy and attempt."""
        return sorted((hop for hop in self if hop.round == round), key=lambda hop: (hop.copy, hop.attempt))

    def forget(self, round: int) -> None:
        """Forget the hops of the rounds before `round`; the totals stay."""
        self._hops = {name: hop for name, hop in self._hops.items() if hop.round >= round}

    def state(self) -> dict[str, Any]:
        """Return the totals and the hops that are not forgotten."""
        totals = {"down": self.down, "up": self.up, "evaluation": self.evaluation}
        return {**totals, "hops": [asdict(hop) for hop in self]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from `state`."""
        self.down, self.up, self.evaluation = (state[name] for name in ("down", "up", "evaluation"))
        hops = [HopRecord(**hop) for hop in state["hops"]]
        self._hops = {HopId(hop.round, hop.copy, hop.attempt): hop for hop in hops}
