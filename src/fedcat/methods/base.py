"""The server side of a method: it plans hops and absorbs replies; an engine trains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.methods.average import RunningAverage
from fedcat.methods.selection.base import FunctionSelector, Selector, uniform
from fedcat.methods.server_optimizer import ServerChoice
from fedcat.models.layout import Layout
from fedcat.protocol.hop import Hop, Reply
from fedcat.protocol.local_rule import LocalRule


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
    server : ServerChoice
        What the user has chosen of how the global parameters follow the mean of the devices' models.
    average : float, optional
        The decay of an average of the model over rounds, where one is wanted.
    blank : Tensor, optional
        One input of zeros, [1, ...], of the shape and type that the net takes.
    classes : int
        How many classes there are.
    exact : bool
        Whether no bit may depend on what else runs beside.
    """

    seed: int
    layout: Layout
    start: Tensor
    samples: NDArray[np.int64]
    per_round: int
    epochs: int
    lr: Callable[[int], float]
    selector: Selector | None = None
    server: ServerChoice = ServerChoice()
    average: float | None = None
    blank: Tensor | None = None
    classes: int = 0
    exact: bool = False

    @property
    def devices(self) -> int:
        """The number of devices, N."""
        return len(self.samples)

    def selection(self) -> Selector:
        """Return the user's selector, or uniform selection without replacement."""
        return self.selector or FunctionSelector(uniform, self.seed, self.samples, self.per_round)

    def refuse_selector(self, why: str) -> None:
        """Raise where the user named a selector, for a method whose own selection is the method."""
        if self.selector is not None:
            raise SettingError(f"selector cannot be set: {why}")


class ServerWork(ABC):
    """Work of the server that can wait until its method plans again, so that several simulations' is done as one."""

    @abstractmethod
    def key(self) -> Hashable:
        """Return what tells apart works that cannot be done as one."""

    @abstractmethod
    def run(self, works: Sequence[Self]) -> None:
        """Do all of `works`, this one among them; they have the same key."""


class Method(ABC):
    """What the server does. Options are keyword arguments of ``__init__`` after the context.

    Attributes
    ----------
    rule : LocalRule
        What the devices do.
    round : int
        Rounds that are complete.
    server_step : str or None
        The server's step where the user names none; None for a method that has no use for one.
    """

    rule: LocalRule = LocalRule()
    round: int = 0
    server_step: str | None = None

    def __init__(self, context: Context) -> None:
        self.context = context
        self.server = context.server.make(self.server_step, type(self).__name__)
        self.average = None if context.average is None else RunningAverage(context.average)

    @abstractmethod
    def plan(self, until: int) -> list[Hop]:
        """Return the hops of rounds before `until` that can start now; none while it waits for replies."""

    @abstractmethod
    def absorb(self, replies: Sequence[Reply]) -> None:
        """Take replies to any of the outstanding hops, in any grouping and order; each hop ends once."""

    def work(self) -> ServerWork | None:
        """Hand out what is left to compute before the next plan, once: who asks for it does it.

        A method that plans while there is some does it itself.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """Aggregate what is not yet part of the global model."""

    @abstractmethod
    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return rows to evaluate: ``global`` always, ``average`` where the context asks for it.

        Also ``mean`` and ``copies``, if wanted and if there are such.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return everything that a restored method needs: rows, numbers and small tables."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state; hops that were outstanding are planned again with the same ids."""

    def advice(self, rounds: int) -> list[str]:
        """Return lines that a user who runs `rounds` rounds should read first."""
        return []

    def stepped(self, row: Tensor, mean: Tensor) -> Tensor:
        """Return the next global row: the server's step for the parameters, the mean for the buffers."""
        size = self.context.layout.parameter_size
        asked = mean[:size]
        moved = self.server.step(row[:size], asked)
        if type(moved) is not type(asked) or (moved.shape, moved.dtype) != (asked.shape, asked.dtype):
            got = f"{moved.dtype} of shape {tuple(moved.shape)}" if isinstance(moved, Tensor) else repr(moved)
            name, shape = type(self.server).__name__, tuple(asked.shape)
            raise SettingError(f"server {name} must return parameters of {asked.dtype} of shape {shape}, got {got}")
        return moved if len(mean) == size else torch.cat([moved, mean[size:]])

    def averaged(self, row: Tensor) -> dict[str, Tensor]:
        """Return the average over rounds, where there is to be one; before the first round it is `row`."""
        if self.average is None:
            return {}
        return {"average": row if self.average.row is None else self.average.row}

    def parts_state(self) -> dict[str, Any]:
        """Return the state of the server's step and of the average, as part of a method's state."""
        return {"server": self.server.state(), "average": None if self.average is None else self.average.state()}

    def restore_parts(self, state: dict[str, Any]) -> None:
        """Give back to the server's step and to the average what `parts_state` took."""
        self.server.restore(state["server"])
        if self.average is not None and state["average"] is not None:
            self.average.restore(state["average"])


def do_together(works: Iterable[ServerWork | None]) -> None:
    """Do the servers' work of several simulations, what can be done as one together."""
    groups: dict[Hashable, list[ServerWork]] = {}
    for work in works:
        if work is not None:
            groups.setdefault((type(work), work.key()), []).append(work)
    for group in groups.values():
        group[0].run(group)
