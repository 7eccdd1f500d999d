"""The server side of a method: it plans hops and absorbs replies; an engine trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.hop import Hop, Reply, Status, Tensors, hop_id
from fedcat.local import LocalRule
from fedcat.models.layout import Layout
from fedcat.selection import FunctionSelector, Selector, checked, uniform


@dataclass(frozen=True, eq=False)
class Context:
    """What a method is given.

    Attributes
    ----------
    seed : int
        The simulation's seed.
    layout : Layout
        The net.
    start : Tensor
        The initial global row, [D].
    samples : numpy.ndarray
        How many samples each device holds, as the devices have told.
    per_round : int
        Devices in a round, K.
    epochs : int
        Local epochs of a hop.
    lr : callable
        The step size of a round.
    selector : Selector, optional
        The user's own selection; a method has one of its own where this is None.
    """

    seed: int
    layout: Layout
    start: Tensor
    samples: NDArray[np.int64]
    per_round: int
    epochs: int
    lr: Callable[[int], float]
    selector: Selector | None = None

    @property
    def devices(self) -> int:
        """The number of devices, N."""
        return len(self.samples)

    def selection(self) -> Selector:
        """Return the user's selector, or uniform selection without replacement."""
        return self.selector or FunctionSelector(uniform, self.seed, self.samples, self.per_round)


class Method(ABC):
    """What the server does. Options are keyword arguments of ``__init__`` after the context.

    Attributes
    ----------
    rule : LocalRule
        What the devices do.
    round : int
        Rounds that are complete.
    """

    rule: LocalRule = LocalRule()
    round: int = 0

    def __init__(self, context: Context) -> None:
        self.context = context

    @abstractmethod
    def plan(self, until: int) -> list[Hop]:
        """Return the hops of rounds before `until` that can start now; none while it waits for replies."""

    @abstractmethod
    def absorb(self, replies: Sequence[Reply]) -> None:
        """Take replies to any of the outstanding hops, in any grouping and order; each hop ends once."""

    def close(self) -> None:  # noqa: B027
        """Aggregate what is not yet part of the global model."""

    @abstractmethod
    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return rows to evaluate: ``global`` always; ``mean`` and ``copies`` if wanted and if there are such."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return everything that a restored method needs: rows, numbers and small tables."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state; hops that were outstanding are planned again with the same ids."""

    def advice(self, rounds: int) -> list[str]:
        """Return lines that a user who runs `rounds` rounds should read first."""
        return []


class RoundMethod(Method):
    """A method whose rounds have a barrier: K devices start from the global row, then their replies are reduced.

    Replies fill slots; the round is reduced when the last slot is filled, in slot order, so that the order of arrival
    changes nothing. A method overrides `reduce`, and where it needs to `select` and `hop`.

    Attributes
    ----------
    row : Tensor
        The global row.
    memory : DeviceMemory or None
        What devices keep between hops. A method that sets it has it sent along with the hops, committed when replies
        have been reduced, and kept in its state.
    """

    memory: DeviceMemory | None = None

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.row = context.start
        self.selector = context.selection()
        self._devices: list[int] = []
        self._hops: list[Hop] = []
        self._replies: dict[int, Reply] = {}
        self._out: set[int] = set()

    def select(self, round: int) -> Sequence[int]:
        """Return the devices of a round, in slot order; one may be named twice."""
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
        """Return the round's hops, each once."""
        if self.round >= until:
            return []
        if not self._hops:
            self._devices = self._devices or [int(device) for device in self.select(self.round)]
            self._hops = self._make()
        ready = [hop for hop in self._hops if hop.id not in self._replies and hop.id not in self._out]
        self._out.update(hop.id for hop in ready)
        return ready

    def _make(self) -> list[Hop]:
        seen: Counter[int] = Counter()
        hops = []
        for slot, device in enumerate(self._devices):
            hops.append(self.hop(self.round, slot, device, seen[device]))
            seen[device] += 1
        return hops

    def absorb(self, replies: Sequence[Reply]) -> None:
        """Fill slots; reduce the round when the last one is filled."""
        for reply in replies:
            if reply.hop not in self._out:
                raise ValueError(f"hop {reply.hop} is not outstanding")
            self._out.remove(reply.hop)
            self._replies[reply.hop] = reply
        if self._hops and len(self._replies) == len(self._hops):
            filled = [self._replies[hop.id] for hop in self._hops]
            hops, self._hops, self._devices, self._replies = self._hops, [], [], {}
            self.reduce(hops, filled)
            if self.memory is not None:
                for hop, reply in zip(hops, filled, strict=True):
                    if reply.arrived:
                        self.memory.commit(hop.device, reply.memory)
            self.round += 1

    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return the global row: there are no copies between rounds."""
        return {"global": self.row}

    def state(self) -> dict[str, Any]:
        """Return the row, the round, its devices and the slots that are filled."""
        return {
            "row": self.row,
            "round": self.round,
            "devices": list(self._devices),
            "replies": {reply.hop: reply_state(reply) for reply in self._replies.values()},
            "selector": self.selector.state(),
            "memory": None if self.memory is None else self.memory.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.row, self.round = state["row"], state["round"]
        self.selector.restore(state["selector"])
        if self.memory is not None:
            self.memory.restore(state["memory"])
        self._devices, self._hops = list(state["devices"]), []
        self._replies = {int(h): restored_reply(r) for h, r in state["replies"].items()}
        self._out = set()


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


def weighted_mean(rows: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the mean of rows [K, D] by weights >= 0, of which one at least is positive.

    It is computed as r0 + p @ (rows - r0) over the rows that count, so that equal rows give exactly that row.
    """
    p = torch.tensor([w for w in weights if w > 0], dtype=torch.float64)
    if len(p) < len(weights):
        rows = rows[[i for i, w in enumerate(weights) if w > 0]]
    p = (p / p.sum()).to(rows.device, rows.dtype)
    first: Tensor = rows[0]
    return first + p @ (rows - first)


def reply_state(reply: Reply) -> dict[str, Any]:
    """Return a reply as plain values and tensors."""
    copies = {n: {k: t.clone() for k, t in getattr(reply, n).items()} for n in ("uploads", "memory")}
    end = None if reply.end is None else reply.end.clone()
    return {**vars(reply), **copies, "end": end, "status": reply.status.value}


def restored_reply(state: dict[str, Any]) -> Reply:
    """Return the reply that `reply_state` took apart."""
    return Reply(**{**state, "status": Status(state["status"])})
