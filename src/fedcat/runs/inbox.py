"""The inbox of a run: what happens to replies between the engine and the method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedcat.config.settings import Settings
from fedcat.models.layout import Layout
from fedcat.protocol.faults import KINDS, Faults
from fedcat.protocol.guard import HopGuard
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply, Status
from fedcat.protocol.reply_check import ReplyCheck, Uploads

DROPPED = "the client dropped out"


class Inbox:
    """Lets simulated clients fail, keeps a simulated clock, checks replies, and guards against liars.

    Parameters
    ----------
    settings : Settings
        What goes wrong, and what is refused.
    clients : int
        The number of clients, N.
    layout : Layout
        What a row means.

    Attributes
    ----------
    simulated_seconds : float
        What the simulated clock shows after the rounds that are recorded: how long real clients would have taken, if a
        round waits for all of its replies.
    """

    def __init__(self, settings: Settings, clients: int, layout: Layout) -> None:
        self.faults = _faults(settings, clients, layout)
        self.check = ReplyCheck(layout, settings.bound)
        self.guard = HopGuard(layout) if settings.guard else None
        self._held: list[tuple[Hop, Reply]] = []
        self.simulated_seconds = 0.0
        self._slowest: dict[int, dict[int, float]] = {}  # by round and stage

    def expect(self, hops: Sequence[Hop], uploads: Uploads) -> None:
        """Register hops that are sent out."""
        self.check.expect(hops, uploads)

    def dropped(self, hop: Hop, run: str) -> Reply | None:
        """Return the reply to a hop whose simulated client drops out, so that it need not be trained, or None."""
        return Reply.lost(hop, Status.FAILED, DROPPED, run) if self.faults.drops(hop) else None

    def admit(self, replies: Sequence[Reply]) -> list[tuple[Hop, Reply]]:
        """Return the replies that end a hop, as they arrive, each with its hop.

        A guard compares the hops of a round with each other: none is returned before all have ended.
        """
        admitted = self.check.admit(self._delivered(replies))
        if self.guard is None:
            return admitted
        self._held += admitted
        if self.check.waiting:
            return []
        held, self._held = self._held, []
        return self.guard.judged(held)

    def _delivered(self, replies: Sequence[Reply]) -> list[Reply]:
        """Return what arrives of replies if clients fail, and note how long they took."""
        found = []
        for reply in replies:
            hop = self.check.hop(reply.hop)
            if hop is not None:
                stages = self._slowest.setdefault(hop.round, {})
                stages[hop.stage] = max(stages.get(hop.stage, 0.0), self.faults.seconds(hop, reply))
                found += self.faults.delivered(hop, reply)
        return found

    def pass_round(self, round: int) -> float:
        """Return what the simulated clock shows after a round: its stages took as long as their slowest hops."""
        self.simulated_seconds += sum(self._slowest.pop(round, {}).values())
        return self.simulated_seconds

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue from here; hops that are on their way are planned again."""
        guard = None if self.guard is None else self.guard.state()
        slowest = {str(r): {str(s): t for s, t in stages.items()} for r, stages in self._slowest.items()}
        return {"simulated_seconds": self.simulated_seconds, "slowest": slowest, "guard": guard}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore from `state`."""
        self.check.forget()
        self._held = []
        stored = state["slowest"]
        self._slowest = {int(r): {int(s): t for s, t in stages.items()} for r, stages in stored.items()}
        if self.guard is not None:
            self.guard.restore(state["guard"])
        self.simulated_seconds = state["simulated_seconds"]


def _faults(settings: Settings, clients: int, layout: Layout) -> Faults:
    """Return the faults that the settings ask for."""
    slow, factor = settings.slow_clients
    return Faults(
        seed=settings.seed,
        clients=clients,
        parameter_size=layout.parameter_size,
        dropout=settings.dropout,
        corrupt=settings.corrupt,
        kinds=tuple(settings.corrupt_kinds or KINDS),
        flip=settings.flip,
        slow=slow,
        factor=factor,
        step_seconds=settings.step_seconds,
        bandwidth=settings.bandwidth * 1e6,
        deadline=settings.deadline,
    )
