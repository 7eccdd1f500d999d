"""What passes between a method and an engine: a hop goes out, a reply comes back, one door checks it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]

SLOTS = 1_000_000
"""Hop ids of one round lie below this number, so that no two rounds share one."""


def hop_id(round: int, slot: int) -> int:
    """Return the id of a round's hop: readable, and the same whenever it is planned."""
    return round * SLOTS + slot


@dataclass(frozen=True, eq=False)
class Hop:
    """One local training: this device, from this row.

    Attributes
    ----------
    id : int
        Names the hop within its simulation; planned again after a restore, it has the same id.
    round : int
        The round it belongs to, from 0.
    device : int
        Who trains.
    start : Tensor
        The row that the device starts from, [D].
    epochs : int
        Passes over the device's data.
    lr : float
        The step size.
    copy : int
        Which copy of the model this is, or the slot in the round.
    visit : int
        Tells apart several hops of one device in one round.
    sent : mapping of str to Tensor
        What travels to the device beside the row.
    memory : mapping of str to Tensor
        What the device has kept from its last hop. It does not travel.
    """

    id: int
    round: int
    device: int
    start: Tensor
    epochs: int
    lr: float
    copy: int = 0
    visit: int = 0
    sent: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)

    @property
    def bytes_down(self) -> int:
        """Bytes that go to the device."""
        return _bytes(self.start) + sum(_bytes(t) for t in self.sent.values())


class Status(StrEnum):
    """How a hop ended."""

    ARRIVED = "arrived"
    LATE = "late"
    FAILED = "failed"
    REFUSED = "refused"


@dataclass(frozen=True, eq=False)
class Reply:
    """How one hop ended.

    Attributes
    ----------
    hop : int
        The id of the hop.
    end : Tensor or None
        The row after training, [D]; None unless it arrived.
    samples : int
        How many samples the device holds.
    steps : int
        How many steps it took.
    loss : float
        The mean training loss of those steps.
    uploads : mapping of str to Tensor
        What travels back beside the row.
    memory : mapping of str to Tensor
        What the device keeps for its next hop. It does not travel.
    status : Status
        How the hop ended.
    why : str
        The reason, where it did not arrive.
    bytes_up : int
        Bytes that came from the device, also where the door refused them.
    """

    hop: int
    end: Tensor | None = None
    samples: int = 0
    steps: int = 0
    loss: float = 0.0
    uploads: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    status: Status = Status.ARRIVED
    why: str = ""
    bytes_up: int = 0

    def __post_init__(self) -> None:
        if self.end is not None and not self.bytes_up:
            up = _bytes(self.end) + sum(_bytes(t) for t in self.uploads.values())
            object.__setattr__(self, "bytes_up", up)

    @property
    def arrived(self) -> bool:
        """Whether the method may use it."""
        return self.status is Status.ARRIVED

    @classmethod
    def lost(cls, hop: Hop, status: Status, why: str) -> Reply:
        """Return the reply of a hop that brought nothing back."""
        return cls(hop.id, status=status, why=why)

    def emptied(self) -> Reply:
        """Return this reply without its content."""
        return replace(self, end=None, uploads={}, memory={}, samples=0, steps=0)

    def refused(self, why: str) -> Reply:
        """Return this reply without its content, refused for the reason `why`."""
        return replace(self.emptied(), status=Status.REFUSED, why=why)


class Door:
    """Where every reply is checked before a method sees it.

    Parameters
    ----------
    size : int
        The length of a row.
    dtype : torch.dtype
        The type of a row.
    bound : float, optional
        The largest norm of a device's change that is let in.
    """

    def __init__(self, size: int, dtype: torch.dtype, bound: float | None = None) -> None:
        self.size, self.dtype, self.bound = size, dtype, bound
        self._waiting: dict[int, Hop] = {}

    def expect(self, hops: Sequence[Hop]) -> None:
        """Note the hops that were sent out; only these are let in, each once."""
        self._waiting.update({hop.id: hop for hop in hops})

    def admit(self, replies: Sequence[Reply]) -> list[tuple[Hop, Reply]]:
        """Return the replies that end a hop, each with its hop, refused where its content is not sound.

        A reply to a hop that was never sent, or that has ended already, ends nothing and is left out.
        """
        known: list[tuple[Hop, Reply]] = []
        for reply in replies:
            hop = self._waiting.pop(reply.hop, None)
            if hop is not None:
                known.append((hop, self._checked(reply)))
        bad = self._bad_numbers(known)
        return [(hop, reply.refused(bad[hop.id]) if hop.id in bad else reply) for hop, reply in known]

    def _checked(self, reply: Reply) -> Reply:
        if not reply.arrived:
            return reply.emptied()
        end = reply.end
        if end is None:
            return reply.refused("no row came back")
        if end.shape != (self.size,):
            return reply.refused(f"row of shape {tuple(end.shape)}, expected ({self.size},)")
        if end.dtype != self.dtype:
            return reply.refused(f"row of {end.dtype}, expected {self.dtype}")
        if reply.samples < 1 or reply.steps < 1:
            return reply.refused(f"{reply.samples} samples and {reply.steps} steps, expected at least one")
        return reply

    def _bad_numbers(self, known: list[tuple[Hop, Reply]]) -> dict[int, str]:
        """Return why replies are refused for their numbers, by hop id; all of them are read in one go."""
        checked = [(hop, reply, reply.end) for hop, reply in known if reply.end is not None]
        if not checked:
            return {}
        ends = torch.stack([end for _, _, end in checked])
        finite = torch.isfinite(ends).all(1)
        beside = [(n, t) for n, (_, reply, _) in enumerate(checked) for t in _beside(reply)]
        if beside:
            sound = torch.stack([torch.isfinite(t).all().to(ends.device) for _, t in beside])
            unsound = torch.zeros_like(finite, dtype=torch.int64)
            unsound.index_add_(0, torch.tensor([n for n, _ in beside], device=ends.device), (~sound).long())
            finite &= unsound == 0
        sizes = torch.zeros(len(ends), dtype=torch.float64, device=ends.device)
        if self.bound is not None:
            moved = ends - torch.stack([hop.start for hop, _, _ in checked])
            sizes = torch.linalg.vector_norm(moved, dim=1).to(torch.float64)
        bad = {}
        answers = torch.stack([finite.to(torch.float64), sizes], 1).tolist()
        for (hop, _, _), (all_finite, norm) in zip(checked, answers, strict=True):
            if not all_finite:
                bad[hop.id] = "numbers that are not finite"
            elif self.bound is not None and norm > self.bound:
                bad[hop.id] = f"a change of norm {norm:.3g}, above the bound {self.bound:g}"
        return bad


def _beside(reply: Reply) -> list[Tensor]:
    """Return the tensors that come with a row."""
    return [*reply.uploads.values(), *reply.memory.values()]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
