"""Methods whose rounds end when all clients have replied."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.methods.base import Context, Method, run_server_work
from fedcat.methods.client_memory import ClientMemory
from fedcat.methods.selection import check_selection
from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.reply import Reply, Status

PROGRESS = ("round", "stage", "visits", "clients", "replies", "selector")
"""The entries of a state that say how far a run is, not what it has learned."""


class RoundMethod(Method):
    """A method with a barrier: K clients start from the global row, then their replies are reduced to a mean.

    Replies fill slots; when the last slot is filled, the round is reduced in slot order, so that the order of arrival
    changes nothing. A method overrides `reduce` and, if needed, `select` and `hop`. The server optimizer moves the
    global row towards the mean that `reduce` returns.

    A round may have several stages, one after another: each has its own clients, which start from the row that the
    stage before has left.

    Attributes
    ----------
    row : Tensor
        The global row.
    stages, stage : int
        How many stages a round has, and which of them comes next.
    memory : ClientMemory or None
        What clients keep between hops. If a method sets it, it is sent along with the hops, committed when replies
        have been reduced, and part of the method's state.
    """

    default_server_optimizer: str | None = "mean"
    memory: ClientMemory | None = None
    stages: int = 1
    stage: int = 0

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.row = context.start
        self.selector = context.selection()
        self._clients: list[int] = []
        self._hops: list[Hop] = []
        self._replies: dict[HopId, Reply] = {}
        self._visits: Counter[int] = Counter()

    def select(self, round: int) -> Sequence[int]:
        """Return the clients of a round, or of its next stage, in slot order; a client may occur twice."""
        return check_selection(self.selector.select(round), self.context.clients, self.context.per_round)

    def hop(self, round: int, slot: int, client: int, visit: int) -> Hop:
        """Return the hop of one slot."""
        return Hop(
            round=round,
            client=client,
            start=self.row,
            epochs=self.context.epochs,
            lr=self.context.lr(round),
            copy=slot,
            visit=visit,
            memory={} if self.memory is None else self.memory[client],
        )

    @abstractmethod
    def reduce(self, hops: Sequence[Hop], replies: Sequence[Reply]) -> Tensor:
        """Return the mean of the replies that arrived, in slot order; `hops` are theirs. There is at least one."""

    def plan(self, until: int) -> list[Hop]:
        """Return the hops of the round's stage, each once."""
        if self.round >= until:
            return []
        run_server_work([self.work()])
        if not self._hops:
            self._clients = self._clients or [int(client) for client in self.select(self.round)]
            self._hops = self._make_hops()
        return self.outstanding.start(hop for hop in self._hops if hop.id not in self._replies)

    def _make_hops(self) -> list[Hop]:
        visits = self._visits.copy()
        hops = []
        for slot, client in enumerate(self._clients, start=visits.total()):
            hop = self.hop(self.round, slot, client, visits[client])
            hops.append(replace(hop, stage=self.stage) if self.stage else hop)
            visits[client] += 1
        return hops

    def absorb(self, replies: Sequence[Reply]) -> None:
        """Fill slots; end the stage when the last one is filled."""
        for reply in replies:
            self.outstanding.end(reply)
            self._replies[reply.hop] = reply
        if self._hops and len(self._replies) == len(self._hops):
            hops, slots = self._hops, [self._replies[hop.id] for hop in self._hops]
            self._hops, self._clients, self._replies = [], [], {}
            self._end_stage(hops, slots)

    def _end_stage(self, hops: Sequence[Hop], slots: Sequence[Reply]) -> None:
        arrived = [(hop, reply) for hop, reply in zip(hops, slots, strict=True) if reply.arrived]
        if arrived:
            mean = self.reduce([hop for hop, _ in arrived], [reply for _, reply in arrived])
            self._check_mean(mean)
            self.row = self.step(self.row, mean)
        if self.memory is not None:
            for hop, reply in arrived:
                self.memory.commit(hop.client, reply.memory)
        if self.bans.count(h.client for h, r in zip(hops, slots, strict=True) if r.status is Status.REFUSED):
            self.selector.exclude(self.bans.banned)
        self.stage = (self.stage + 1) % self.stages
        self._visits.update(hop.client for hop in hops)
        if self.stage == 0:
            self._visits.clear()
            self.round += 1
            if self.average is not None:
                self.average.add(self.row)

    def _check_mean(self, mean: object) -> None:
        if isinstance(mean, Tensor) and (mean.shape, mean.dtype) == (self.row.shape, self.row.dtype):
            return
        got = f"{mean.dtype} of shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
        wanted = f"a row of {self.row.dtype} of shape {tuple(self.row.shape)}"
        raise SettingError(f"method {type(self).__name__} must return {wanted} from reduce, got {got}")

    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return the global row, and the average if one is kept."""
        return {"global": self.row, **self.averaged(self.row)}

    def state(self) -> dict[str, Any]:
        """Return the row, the round, its clients and the slots that are filled."""
        return {
            "row": self.row,
            "round": self.round,
            "stage": self.stage,
            "visits": {str(client): count for client, count in self._visits.items()},
            "clients": list(self._clients),
            "replies": [_reply_state(reply) for reply in self._replies.values()],
            "selector": self.selector.state(),
            "memory": None if self.memory is None else self.memory.state(),
            **self.parts_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.row, self.round, self.stage = state["row"], state["round"], state["stage"]
        self._visits = Counter({int(client): count for client, count in state["visits"].items()})
        self.outstanding.clear()
        self.restore_parts(state)
        self.selector.restore(state["selector"])
        if self.bans.after is not None:
            self.selector.exclude(self.bans.banned)
        if self.memory is not None:
            self.memory.restore(state["memory"])
        self._clients, self._hops = list(state["clients"]), []
        replies = [_restored_reply(reply) for reply in state["replies"]]
        self._replies = {reply.hop: reply for reply in replies}

    def rewind(self, state: dict[str, Any]) -> None:
        """Take the model, and all that was learned with it, back to an earlier state; the rounds go on.

        Bans go back too: a model that has collapsed makes honest clients send numbers that are refused.
        """
        now = self.state()
        self.restore({**state, **{name: now[name] for name in PROGRESS}})


def ends(replies: Sequence[Reply]) -> Tensor:
    """Return the rows that came back, [K, D]."""
    return torch.stack([reply.end for reply in replies if reply.end is not None])


def _reply_state(reply: Reply) -> dict[str, Any]:
    """Return a reply as plain values and tensors."""
    copies = {n: {k: t.clone() for k, t in getattr(reply, n).items()} for n in ("uploads", "memory")}
    end = None if reply.end is None else reply.end.clone()
    return {**vars(reply), **copies, "end": end, "status": reply.status.value, "hop": list(reply.hop)}


def _restored_reply(state: dict[str, Any]) -> Reply:
    return Reply(**{**state, "status": Status(state["status"]), "hop": HopId(*state["hop"])})
