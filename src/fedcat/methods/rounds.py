"""Methods whose rounds end with all devices' replies."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedcat.methods.base import Context, Method, do_together
from fedcat.methods.client_memory import DeviceMemory
from fedcat.methods.selection.base import checked
from fedcat.protocol.hop import Hop, Reply, Status, hop_id


class RoundMethod(Method):
    """A method whose rounds have a barrier: K devices start from the global row, then their replies are reduced.

    Replies fill slots; the round is reduced when the last slot is filled, in slot order, so that the order of arrival
    changes nothing. A method overrides `reduce`, and where it needs to `select` and `hop`. What `reduce` makes of the
    global row is the mean that the server's step gets.

    A round may have several stages, one after another: each has its own devices, which start from the row that the
    stage before has left.

    Attributes
    ----------
    row : Tensor
        The global row.
    stages, stage : int
        How many stages a round has, and which of them comes next.
    memory : DeviceMemory or None
        What devices keep between hops. A method that sets it has it sent along with the hops, committed when replies
        have been reduced, and kept in its state.
    """

    server_step: str | None = "mean"
    memory: DeviceMemory | None = None
    stages: int = 1
    stage: int = 0

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.row = context.start
        self.selector = context.selection()
        self._devices: list[int] = []
        self._hops: list[Hop] = []
        self._replies: dict[int, Reply] = {}
        self._out: set[int] = set()
        self._visits: Counter[int] = Counter()

    def select(self, round: int) -> Sequence[int]:
        """Return the devices of a round, or of its next stage, in slot order; one may be named twice."""
        chosen = self.selector.select(round)
        devices: list[int] = checked(chosen, self.context.devices, self.context.per_round).tolist()
        return devices

    def hop(self, round: int, slot: int, device: int, visit: int) -> Hop:
        """Return the hop of one slot."""
        return Hop(
            id=hop_id(round, slot),
            round=round,
            device=device,
            start=self.row,
            epochs=self.context.epochs,
            lr=self.context.lr(round),
            copy=slot,
            visit=visit,
            memory={} if self.memory is None else self.memory[device],
        )

    @abstractmethod
    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> None:
        """Make the next global row of a round's replies, in slot order, those that did not arrive among them."""

    def plan(self, until: int) -> list[Hop]:
        """Return the hops of the round's stage, each once."""
        if self.round >= until:
            return []
        do_together([self.work()])
        if not self._hops:
            self._devices = self._devices or [int(device) for device in self.select(self.round)]
            self._hops = self._make()
        ready = [hop for hop in self._hops if hop.id not in self._replies and hop.id not in self._out]
        self._out.update(hop.id for hop in ready)
        return ready

    def _make(self) -> list[Hop]:
        visits = self._visits.copy()
        hops = []
        for slot, device in enumerate(self._devices, start=visits.total()):
            hops.append(self.hop(self.round, slot, device, visits[device]))
            visits[device] += 1
        return hops

    def absorb(self, replies: Sequence[Reply]) -> None:
        """Fill slots; reduce the stage when the last one is filled."""
        for reply in replies:
            if reply.hop not in self._out:
                raise ValueError(f"hop {reply.hop} is not outstanding")
            self._out.remove(reply.hop)
            self._replies[reply.hop] = reply
        if self._hops and len(self._replies) == len(self._hops):
            filled = [self._replies[hop.id] for hop in self._hops]
            hops, self._hops, self._devices, self._replies = self._hops, [], [], {}
            self._end(hops, filled)

    def _end(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> None:
        before = self.row
        self.reduce(hops, replies)
        if any(reply.arrived for reply in replies):
            self.row = self.stepped(before, self.row)
        if self.memory is not None:
            for hop, reply in zip(hops, replies, strict=True):
                if reply.arrived:
                    self.memory.commit(hop.device, reply.memory)
        self.stage = (self.stage + 1) % self.stages
        self._visits.update(hop.device for hop in hops)
        if self.stage == 0:
            self._visits.clear()
            self.round += 1
            if self.average is not None:
                self.average.add(self.row)

    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return the global row and the average: there are no copies between rounds."""
        return {"global": self.row, **self.averaged(self.row)}

    def state(self) -> dict[str, Any]:
        """Return the row, the round, its devices and the slots that are filled."""
        return {
            "row": self.row,
            "round": self.round,
            "stage": self.stage,
            "visits": {str(device): count for device, count in self._visits.items()},
            "devices": list(self._devices),
            "replies": {reply.hop: reply_state(reply) for reply in self._replies.values()},
            "selector": self.selector.state(),
            "memory": None if self.memory is None else self.memory.state(),
            **self.parts_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.row, self.round, self.stage = state["row"], state["round"], state["stage"]
        self._visits = Counter({int(device): count for device, count in state["visits"].items()})
        self.restore_parts(state)
        self.selector.restore(state["selector"])
        if self.memory is not None:
            self.memory.restore(state["memory"])
        self._devices, self._hops = list(state["devices"]), []
        self._replies = {int(h): restored_reply(r) for h, r in state["replies"].items()}
        self._out = set()


def reply_state(reply: Reply) -> dict[str, Any]:
    """Return a reply as plain values and tensors."""
    copies = {n: {k: t.clone() for k, t in getattr(reply, n).items()} for n in ("uploads", "memory")}
    end = None if reply.end is None else reply.end.clone()
    return {**vars(reply), **copies, "end": end, "status": reply.status.value}


def restored_reply(state: dict[str, Any]) -> Reply:
    """Return the reply that `reply_state` took apart."""
    return Reply(**{**state, "status": Status(state["status"])})
