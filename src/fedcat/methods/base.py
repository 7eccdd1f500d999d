"""The server's side of a method: it plans hops and absorbs replies; an engine trains."""

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
from fedcat.core.registry import label_of
from fedcat.methods.aggregation import Aggregator, FunctionAggregator, mean
from fedcat.methods.average import RunningAverage
from fedcat.methods.bans import Bans
from fedcat.methods.selection import FunctionSelector, Selector, uniform
from fedcat.methods.server_optimizer import ServerOptimizerChoice
from fedcat.models.layout import Layout, Tensors
from fedcat.models.metrics import ClientScores
from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply


@dataclass(frozen=True, eq=False)
class Context:
    """What a method is given.

    Attributes
    ----------
    seed : int
        The run's seed.
    layout : Layout
        The net.
    start : Tensor
        The initial global row, [D].
    samples : numpy.ndarray
        How many samples each client holds, as the clients report it.
    per_round : int
        Clients per round, K.
    epochs : int
        Local epochs per hop.
    lr : callable
        The learning rate of a round.
    selector : Selector, optional
        The selection that the user chose; if None, the method uses its own.
    aggregator : Aggregator, optional
        The aggregation that the user chose; if None, the weighted mean.
    server_optimizer : ServerOptimizerChoice
        The server optimizer that the user chose, if any.
    average : float, optional
        The memory of an average of the model over rounds, if one is wanted, see `RunningAverage`.
    ban_after : int, optional
        The number of refused replies after which a client is not selected any more; None for never.
    blank : Tensor, optional
        One input of zeros, [1, ...], of the shape and type that the net takes.
    classes : int
        The number of classes, 0 if the targets are values.
    exact : bool
        Whether no bit may depend on what else runs in the comparison.
    """

    seed: int
    layout: Layout
    start: Tensor
    samples: NDArray[np.int64]
    per_round: int
    epochs: int
    lr: Callable[[int], float]
    selector: Selector | None = None
    aggregator: Aggregator | None = None
    server_optimizer: ServerOptimizerChoice = ServerOptimizerChoice()
    average: float | None = None
    ban_after: int | None = None
    blank: Tensor | None = None
    classes: int = 0
    exact: bool = False

    @property
    def clients(self) -> int:
        """The number of clients, N."""
        return len(self.samples)

    def selection(self) -> Selector:
        """Return the user's selector, or uniform selection without replacement."""
        return self.selector or FunctionSelector(uniform, self.seed, self.samples, self.per_round)

    def refuse_selector(self, why: str) -> None:
        """Raise an error if the user chose a selector, for a method that is defined by its own selection."""
        if self.selector is not None:
            raise SettingError(f"selector cannot be set: {why}")

    def refuse_aggregator(self, why: str) -> None:
        """Raise an error if the user chose an aggregator, for a method that aggregates nothing."""
        if self.aggregator is not None:
            raise SettingError(f"aggregator cannot be set: {why}")


class ServerWork(ABC):
    """Work of the server that can wait until its method plans again, so that several runs can do theirs together."""

    @abstractmethod
    def key(self) -> Hashable:
        """Return a key; work with the same key can be done together."""

    @abstractmethod
    def run(self, works: Sequence[Self]) -> None:
        """Do all of `works`, which includes this one; they have the same key."""


class Outstanding:
    """The hops that were planned and have not ended yet."""

    def __init__(self) -> None:
        self._hops: dict[HopId, Hop] = {}

    def start(self, hops: Iterable[Hop]) -> list[Hop]:
        """Return those of `hops` that are not on their way yet, which are from now on."""
        fresh = [hop for hop in hops if hop.id not in self._hops]
        self._hops.update({hop.id: hop for hop in fresh})
        return fresh

    def end(self, reply: Reply) -> Hop:
        """Return the hop that a reply ends."""
        if reply.hop not in self._hops:
            raise ValueError(f"hop {reply.hop} is not outstanding")
        return self._hops.pop(reply.hop)

    def copies(self) -> set[int]:
        """Return the copies that are on their way."""
        return {hop.copy for hop in self._hops.values()}

    def clear(self) -> None:
        """Forget all hops; after a restore they are planned again."""
        self._hops.clear()


class Method(ABC):
    """The server. Options are keyword parameters of ``__init__`` after the context.

    Attributes
    ----------
    rule : LocalRule
        What the clients do.
    round : int
        Rounds that are complete.
    default_server_optimizer : str or None
        The server optimizer unless the user names one; None for a method that takes none.
    extra_models : tuple of str
        The models that the method offers for evaluation besides the global one, see `models`.
    """

    rule: LocalRule = LocalRule()
    round: int = 0
    default_server_optimizer: str | None = None
    extra_models: tuple[str, ...] = ()

    def __init__(self, context: Context) -> None:
        self.context = context
        choice, name = context.server_optimizer, type(self).__name__
        self.server_optimizer = choice.make(self.default_server_optimizer, name)
        self.aggregator = context.aggregator or FunctionAggregator(mean)
        self.aggregator.parameter_size = context.layout.parameter_size
        self.average = None if context.average is None else RunningAverage(context.average)
        self.bans = Bans(context.ban_after, context.clients - context.per_round)
        self.outstanding = Outstanding()

    @abstractmethod
    def plan(self, until: int) -> list[Hop]:
        """Return the hops of rounds before `until` that can start now; none while the method waits for replies."""

    @abstractmethod
    def absorb(self, replies: Sequence[Reply]) -> None:
        """Take replies to any of the outstanding hops, in any grouping and order; each hop ends once."""

    def work(self) -> ServerWork | None:
        """Hand out, once, what is left to compute before the next plan; the caller must run it.

        A method that is asked to plan while work is left runs it itself.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """Aggregate what is not yet part of the global model."""

    @abstractmethod
    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return rows to evaluate: ``global`` always, ``average`` if the context asks for it.

        Also those of `extra_models` that are wanted; one name may stand for several rows.
        """

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue from here: rows, numbers and small tables."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`; hops that were outstanding are planned again with the same ids."""

    def uploads(self, hop: Hop) -> Tensors | None:
        """Return what the reply to a hop must upload besides its row, as tensors of the right shapes and types.

        Their values do not matter. A method whose rule uploads something says what; None: it is not checked.
        """
        rule = type(self.rule)
        plain = rule.finish is LocalRule.finish and rule.report is LocalRule.report
        return {} if plain else None

    def rewind(self, state: dict[str, Any]) -> None:
        """Take the model back to an earlier state of it, between two rounds; the rounds and the selection go on."""
        raise SettingError(
            f"on_collapse cannot be 'restore': the method {type(self).__name__} cannot take its model back"
        )

    def validated(self, scores: ClientScores) -> None:  # noqa: B027
        """Take the global model's scores on the clients' validation data, at each evaluation.

        A method that overrides this is steered by them, so that their traffic counts as training traffic.
        """

    def advice(self, rounds: int, interval: int) -> list[str]:
        """Return notes for a user who is about to run `rounds` rounds and evaluate every `interval` of them."""
        return []

    def aggregate(self, rows: Tensor, weights: Sequence[float], start: Tensor) -> Tensor:
        """Return rows [K, D] as one by the aggregator, by default their weighted mean; `start` is what they were."""
        found = self.aggregator.aggregate(rows, weights, start)
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (start.shape, start.dtype):
            got = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            wanted = f"a row of {start.dtype} of shape {tuple(start.shape)}"
            raise SettingError(f"aggregator {label_of(self.aggregator)} must return {wanted}, got {got}")
        if self.context.aggregator is not None and not torch.isfinite(found).all():
            raise SettingError(f"aggregator {label_of(self.aggregator)} returned numbers that are not finite")
        return found

    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Return the next global row: the server optimizer moves the parameters, the buffers are the mean's."""
        size = self.context.layout.parameter_size
        wanted = mean[:size]
        moved = self.server_optimizer.step(row[:size], wanted)
        if type(moved) is not type(wanted) or (moved.shape, moved.dtype) != (wanted.shape, wanted.dtype):
            got = f"{moved.dtype} of shape {tuple(moved.shape)}" if isinstance(moved, Tensor) else repr(moved)
            name, shape = type(self.server_optimizer).__name__, tuple(wanted.shape)
            raise SettingError(
                f"server_optimizer {name} must return parameters of {wanted.dtype} of shape {shape}, got {got}"
            )
        return moved if len(mean) == size else torch.cat([moved, mean[size:]])

    def averaged(self, row: Tensor) -> dict[str, Tensor]:
        """Return the average over rounds if one is kept; before the first round it is `row`."""
        if self.average is None:
            return {}
        return {"average": row if self.average.row is None else self.average.row}

    def parts_state(self) -> dict[str, Any]:
        """Return the state of the aggregator, the server optimizer, the average and the bans, for a method's state."""
        average = None if self.average is None else self.average.state()
        optimizer, aggregator = self.server_optimizer.state(), self.aggregator.state()
        bans = self.bans.state()
        return {"server_optimizer": optimizer, "aggregator": aggregator, "average": average, "bans": bans}

    def restore_parts(self, state: dict[str, Any]) -> None:
        """Restore the aggregator, the server optimizer, the average and the bans from what `parts_state` returned."""
        self.bans.restore(state["bans"])
        self.aggregator.restore(state["aggregator"])
        self.server_optimizer.restore(state["server_optimizer"])
        if self.average is not None and state["average"] is not None:
            self.average.restore(state["average"])


def declared(factory: Any, attribute: str, otherwise: Any) -> Any:
    """Return an attribute of the class that `factory` makes, `otherwise` if it is a function and cannot be known."""
    return getattr(getattr(factory, "func", factory), attribute, otherwise)


def run_server_work(works: Iterable[ServerWork | None]) -> None:
    """Do the server work of several runs, together where possible."""
    groups: dict[Hashable, list[ServerWork]] = {}
    for work in works:
        if work is not None:
            groups.setdefault((type(work), work.key()), []).append(work)
    for group in groups.values():
        group[0].run(group)
