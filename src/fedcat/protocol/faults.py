"""Faults of simulated clients: who drops out, who is slow, who sends nonsense and who lies; and a simulated clock.

Every draw has its own random stream, keyed by seed, round, client and visit: faults are reproducible, do not depend on
the engine, and are the same for all methods of a comparison that send a client a hop in the same round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedcat.core.rng import Purpose, random_stream
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply, Status

HUGE = 1e6
"""The factor by which a corrupt reply may enlarge its update."""


@dataclass(frozen=True)
class Faults:
    """What goes wrong, and how long hops take.

    Attributes
    ----------
    seed : int
        The run's seed.
    clients : int
        The number of clients, N.
    parameter_size : int
        How many of a row's numbers are parameters, the first ones.
    dropout : float
        The probability that a client drops out of a hop: it gets the model and sends nothing back.
    corrupt : float
        The probability that a reply is corrupt.
    kinds : tuple of str
        How, each with the same probability: see `CORRUPTIONS`, and ``repeated`` for a reply that comes twice.
    flip : float
        The share of the clients that always send their change with its sign turned.
    slow, factor : float
        The share of the clients that are slow, and how many times as long their steps and transfers take.
    step_seconds, bandwidth : float
        Seconds per local step of a client that is not slow, and bytes per second that it sends and receives.
    deadline : float or None
        Simulated seconds after which a hop is given up as late. Without one, it is noticed at once who drops out.
    """

    seed: int
    clients: int
    parameter_size: int
    dropout: float = 0.0
    corrupt: float = 0.0
    kinds: tuple[str, ...] = ()
    flip: float = 0.0
    slow: float = 0.0
    factor: float = 1.0
    step_seconds: float = 0.01
    bandwidth: float = 1e6
    deadline: float | None = None

    @cached_property
    def liars(self) -> frozenset[int]:
        """The clients that turn the sign of their change."""
        return self._share(self.flip, 0)

    @cached_property
    def slow_clients(self) -> frozenset[int]:
        """The clients that are slow."""
        return self._share(self.slow, 1)

    def _share(self, share: float, which: int) -> frozenset[int]:
        """Return a fixed share of the clients; a larger share contains a smaller one."""
        order = random_stream(self.seed, Purpose.TRAITS, client=which).permutation(self.clients)
        return frozenset(order[: round(share * self.clients)].tolist())

    def drops(self, hop: Hop) -> bool:
        """Return whether the client drops out of a hop; it need not be trained then."""
        return self.dropout > 0 and bool(self._draws(hop)[0] < self.dropout)

    def _draws(self, hop: Hop) -> list[float]:
        """Return the numbers that decide over a hop: whether it drops out or is corrupt, how, and where."""
        rng = random_stream(self.seed, Purpose.FAULT, hop.round, hop.client, hop.visit)
        draws: list[float] = rng.random(4).tolist()
        return draws

    def seconds(self, hop: Hop, reply: Reply) -> float:
        """Return how long a hop takes on the simulated clock: its steps, and its bytes in both directions.

        A hop that was given up takes as long as the server waits for it.
        """
        if not reply.steps:
            return self.deadline or 0.0
        pace = self.factor if hop.client in self.slow_clients else 1.0
        taken = pace * (reply.steps * self.step_seconds + (hop.bytes_down + reply.bytes_up) / self.bandwidth)
        return taken if self.deadline is None else min(taken, self.deadline)

    def delivered(self, hop: Hop, reply: Reply) -> list[Reply]:
        """Return what arrives at the server instead of a reply."""
        if not reply.arrived:
            return [reply]
        if self.deadline is not None and self.seconds(hop, reply) >= self.deadline:
            why = f"not back within {self.deadline:g} s of simulated time"
            return [replace(reply, end=None, uploads={}, memory={}, status=Status.LATE, why=why)]
        if hop.client in self.liars:
            reply = self._turned(hop, reply)
        _, chance, kind, place = self._draws(hop) if self.corrupt else (1.0, 1.0, 0.0, 0.0)
        if chance >= self.corrupt or reply.end is None:
            return [reply]
        name = self.kinds[int(kind * len(self.kinds))]
        if name == "repeated":
            return [reply, reply]
        end = CORRUPTIONS[name](reply.end, hop.start, int(place * len(reply.end)))
        return [replace(reply, end=end, finite=None)]

    def _turned(self, hop: Hop, reply: Reply) -> Reply:
        """Return a reply with the sign of its change turned, in the parameters and in what it uploads besides them."""
        assert reply.end is not None
        size = self.parameter_size
        end = torch.cat([2 * hop.start[:size] - reply.end[:size], reply.end[size:]])
        uploads = {name: -t if t.is_floating_point() else t for name, t in reply.uploads.items()}
        return replace(reply, end=end, uploads=uploads)


def _with(end: Tensor, place: int, value: float) -> Tensor:
    changed = end.clone()
    changed[place] = value
    return changed


CORRUPTIONS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "nan": lambda end, start, place: _with(end, place, float("nan")),
    "inf": lambda end, start, place: _with(end, place, float("inf")),
    "huge": lambda end, start, place: start + HUGE * (end - start),
    "shape": lambda end, start, place: end[:-1],
}
"""How a corrupt reply's row differs from the sound one."""

KINDS = (*CORRUPTIONS, "repeated")


def parse_straggler(text: str) -> tuple[float, float]:
    """Return the share of slow clients and their factor from a text such as ``0.2,5``, or raise a ValueError."""
    if not text:
        return 0.0, 1.0
    share, factor = (float(part) for part in text.split(","))
    if not (0 <= share <= 1 and 1 <= factor < np.inf):
        raise ValueError(text)
    return share, factor
