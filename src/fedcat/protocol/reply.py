"""A reply: how a hop ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from torch import Tensor

from fedcat.models.layout import Tensors
from fedcat.protocol.hop import Hop, HopId

LARGEST = 1e15
"""The largest magnitude that a reply may hold: beyond it, norms overflow in float32, and training has diverged."""


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
    hop : HopId
        The id of the hop.
    end : Tensor or None
        The row after training, [D]; None unless it arrived.
    samples : int
        How many samples the client holds.
    steps : int
        How many steps it took.
    loss : float
        The mean training loss of those steps.
    uploads : mapping of str to Tensor
        What travels back besides the row.
    memory : mapping of str to Tensor
        What the client keeps for its next hop. It does not travel.
    status : Status
        How the hop ended.
    why : str
        The reason if it did not arrive.
    bytes_up : int
        Bytes that came from the client, even if the reply was refused.
    seconds : float
        How long the training took. Hops that an engine trains in one launch share its time by their steps.
    run : str
        The name of the run that the hop belongs to: an engine may train hops of several.
    finite : bool or None
        Whether all its numbers are finite and at most `LARGEST`, if the engine has looked; the reply check looks
        otherwise.
    """

    hop: HopId
    end: Tensor | None = None
    samples: int = 0
    steps: int = 0
    loss: float = 0.0
    uploads: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)
    status: Status = Status.ARRIVED
    why: str = ""
    bytes_up: int = 0
    seconds: float = 0.0
    run: str = ""
    finite: bool | None = None

    def __post_init__(self) -> None:
        if self.end is not None and not self.bytes_up:
            up = self.end.nbytes + sum(tensor.nbytes for tensor in self.uploads.values())
            object.__setattr__(self, "bytes_up", up)

    @property
    def arrived(self) -> bool:
        """Whether the method may use it."""
        return self.status is Status.ARRIVED

    @classmethod
    def lost(cls, hop: Hop, status: Status, why: str, run: str = "") -> Reply:
        """Return the reply of a hop that brought nothing back."""
        return cls(hop.id, status=status, why=why, run=run)

    def emptied(self) -> Reply:
        """Return this reply without its content."""
        return replace(self, end=None, uploads={}, memory={}, samples=0, steps=0)

    def refused(self, why: str) -> Reply:
        """Return this reply without its content, refused for the reason `why`."""
        return replace(self.emptied(), status=Status.REFUSED, why=why)
