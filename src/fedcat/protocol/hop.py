"""A hop: one local training of one row on one client."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from fedcat.models.layout import Tensors

SLOTS = 1_000_000
"""Hop ids of one round lie below this number, so that no two rounds share one."""


def hop_id(round: int, slot: int) -> int:
    """Return the id of a round's hop: readable, and the same whenever it is planned."""
    return round * SLOTS + slot


@dataclass(frozen=True, eq=False)
class Hop:
    """One local training: this client, from this row.

    Attributes
    ----------
    id : int
        Names the hop within its run; planned again after a restore, it has the same id.
    round : int
        The round it belongs to, from 0.
    client : int
        Who trains.
    start : Tensor
        The row that the client starts from, [D].
    epochs : int
        Passes over the client's data.
    lr : float
        The learning rate.
    copy : int
        Which copy of the model this is, or the slot in the round.
    visit : int
        Tells apart several hops of one client in one round.
    sent : mapping of str to Tensor
        What travels to the client besides the row.
    memory : mapping of str to Tensor
        What the client has kept from its last hop. It does not travel.
    """

    id: int
    round: int
    client: int
    start: Tensor
    epochs: int
    lr: float
    copy: int = 0
    visit: int = 0
    sent: Tensors = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)

    @property
    def bytes_down(self) -> int:
        """Bytes sent to the client."""
        return self.start.nbytes + sum(tensor.nbytes for tensor in self.sent.values())
