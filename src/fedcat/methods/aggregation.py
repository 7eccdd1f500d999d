"""Aggregation: how the rows that came back become one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.options import arguments, check_options
from fedcat.core.registry import Registry, accepts_call, label_of
from fedcat.methods.average import weighted_mean


class Aggregator(ABC):
    """Reduces rows to one. A function of the same parameters will do unless it has state.

    Attributes
    ----------
    parameter_size : int or None
        How many of a row's numbers are parameters, the first ones; the method sets it. None: all.
    """

    parameter_size: int | None = None

    @abstractmethod
    def aggregate(self, rows: Tensor, weights: Sequence[float], start: Tensor) -> Tensor:
        """Return one row.

        Parameters
        ----------
        rows : Tensor
            The rows that came back, or FedCat's copies, [K, D]: parameters, then float buffers. There is at least one.
        weights : sequence of float
            Their weights, at least one of them positive: samples, or equal ones, as the method has it.
        start : Tensor
            The global row that they started from, [D].
        """

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue from here."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore from `state`."""


AGGREGATORS: Registry[Callable[..., Any]] = Registry("aggregator")


@AGGREGATORS.register("mean", "mean by the method's weights, the default")
def mean(rows: Tensor, weights: Sequence[float], start: Tensor) -> Tensor:
    """Return the weighted mean."""
    return weighted_mean(rows, weights)


class FunctionAggregator(Aggregator):
    """Aggregates by a function of (rows, weights, start)."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function, self.name = function, label_of(function)

    def aggregate(self, rows: Tensor, weights: Sequence[float], start: Tensor) -> Tensor:
        """Return what the function returns."""
        return self.function(rows, weights, start)


def make_aggregator(name: str, part: Any, given: Mapping[str, Any]) -> Aggregator:
    """Make an aggregator of a function of (rows, weights, start), or of an `Aggregator` class, with its options."""
    if not callable(part):
        raise SettingError(f"aggregator must be a name, a function or an Aggregator class, got {part!r}")
    missing = ", ".join(sorted(getattr(part, "__abstractmethods__", ())))
    if missing:
        raise SettingError(f"aggregator {name!r} must define {missing}")
    options = arguments(part, check_options("aggregator", name, part, given, prefix="aggregator_"))
    if isinstance(part, type):
        made = part(**options)
        if not isinstance(made, Aggregator):
            raise SettingError(f"aggregator {name!r} must be an Aggregator class, got {label_of(part)}")
        return made
    few = torch.zeros(1, 1)
    if not accepts_call(part, few, [1], few[0], **options):
        raise SettingError(f"aggregator {name!r} must be a function of (rows, weights, start, options with defaults)")
    return FunctionAggregator(partial(part, **options) if options else part)
