"""A hop: one local training of one row on one client."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from torch import Tensor

from fedcat.models.layout import Tensors


class HopId(NamedTuple):
    """Names a hop within its run, also in another process; planned again after a restore, a hop has the same id.

    Attributes
    ----------
    round : int
        The round, from 0.
    copy : int
        The copy of the model.
    attempt : int
        Which try it is, from 0.
    """

    round: int
    copy: int
    attempt: int = 0


@dataclass(frozen=True, eq=False)
class Hop:
    """One local training: this client, from this row.

    Attributes
    ----------
    round : int
        The round it belongs to, from 0.
    client : int
        Who trains.
    start : Tensor
        The row that the client starts from, [D].
    epochs : int
        Passes over the client's data.
    lr : float
        The learning rate; a task's `lr_decay` makes it smaller from step to step.
    copy : int
        Which copy of the model this is: each of a round's hops trains another one.
    attempt : int
        Which try it is, from 0.
    visit : int
        Tells apart several hops of one client in one round.
    stage : int
        Which of the stages of its round it belongs to, if these come one after another.
    sent : mapping of str to Tensor
        What travels to the client besides the row.
    memory : mapping of str to Tensor
        What the client has kept from its last hop. It does not travel.
    """

    round: int
    client: int
    start: Tensor
    epochs: int
    lr: float
    copy: int = 0
    attempt: int = 0
    visit: int = 0
    stage: int = 0
    sent: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)

    @cached_property
    def id(self) -> HopId:
        """The hop's name within its run."""
        return HopId(self.round, self.copy, self.attempt)

    @property
    def brings(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of what was sent and of what the client has kept: a rule may differ by them."""
        return tuple(self.sent), tuple(self.memory)

    @property
    def bytes_down(self) -> int:
        """Bytes sent to the client."""
        return self.start.nbytes + sum(tensor.nbytes for tensor in self.sent.values())
