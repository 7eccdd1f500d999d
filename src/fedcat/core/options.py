"""Options of methods, datasets, partitions and server optimizers: the parameters of a function that have a default.

A parameter may be annotated with an `Option`, which adds a line of help and bounds::

    def dirichlet(labels, clients, rng, *, alpha: Annotated[float, Option("concentration", Bounds(above=0))] = 0.5): ...
"""

from __future__ import annotations

import inspect
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

from fedcat.core.errors import SettingError, unknown_name

TYPE_NAMES = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    tuple: "a list",
    list: "a list of strings",
    dict: "a table of options",
}
"""What error messages call the values of a type."""


@dataclass(frozen=True)
class Bounds:
    """The range of a number. Infinity and NaN are never inside."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and not (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and value <= self.above)
            or (self.at_most is not None and value > self.at_most)
            or (self.below is not None and value >= self.below)
        )

    def __str__(self) -> str:
        words = {"at least": self.at_least, ">": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {_shown(bound)}" for word, bound in words.items() if bound is not None)

    def check(self, name: str, value: float) -> None:
        """Raise a `SettingError` that names the value and the range unless the value is inside."""
        if value not in self:
            finite = "" if math.isfinite(value) else " and finite"
            raise SettingError(f"{name} must be {self}{finite}, got {_shown(value)}")


def check_bounds(name: str, value: float, **bounds: float) -> None:
    """Raise a `SettingError` unless `value` lies within `Bounds` of these keywords."""
    Bounds(**bounds).check(name, value)


def _shown(value: float) -> str:
    return "2**63" if value == 2**63 else f"{value:g}" if isinstance(value, float) else f"{value:,}"


@dataclass(frozen=True)
class Option:
    """What a declaration says about an option beside its default: a line of help, and the range of its values."""

    help: str = ""
    bounds: Bounds | None = None


class Typed(str):
    """A value as it was typed on a command line: read according to the type of the option that it is meant for."""

    __slots__ = ()

    def read(self, kind: type | None = None) -> Any:
        """Return the value that the text stands for; text that is no such value is returned as it is."""
        if kind is str:
            return str(self)
        if kind is list:
            return [part.strip() for part in self.split(",")]
        try:
            value = tomllib.loads(f"value = {self}")["value"]
        except (ValueError, RecursionError):
            return str(self)
        return str(self) if isinstance(value, int) and abs(value) > 10**300 else value  # no number could hold it


def options(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of what `factory` makes and their defaults, under the names that users write."""
    return {name: p.default for name, p in _parameters(factory).items()}


def storable_options(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the options whose defaults a settings file can hold."""
    return {n: v for n, v in options(factory).items() if isinstance(v, (bool, int, float, str, tuple))}


def declarations(factory: Callable[..., Any]) -> dict[str, Option]:
    """Return what the options of `factory` are annotated with; an empty `Option` where there is none."""
    found = {}
    for name, parameter in _parameters(factory).items():
        metadata = getattr(_annotation(factory, parameter), "__metadata__", ())
        found[name] = next((entry for entry in metadata if isinstance(entry, Option)), Option())
    return found


def check_options(
    kind: str, name: str, factory: Callable[..., Any], given: Mapping[str, Any], prefix: str | None = None
) -> dict[str, Any]:
    """Return the options that a user gave in the types of their defaults, or raise an error for the first bad one.

    Parameters
    ----------
    kind, name : str
        What `factory` makes, such as ``method``, and what it is called; for error messages.
    factory : callable
        The function or class that takes the options.
    given : mapping
        The options by the names that users write.
    prefix : str, optional
        What precedes an option's name in error messages; by default ``name.``.
    """
    if not isinstance(given, Mapping):
        raise SettingError(f"options of {kind} {name!r} must be a table, got {given!r}")
    known, declared = options(factory), declarations(factory)
    ready = {}
    for key, value in given.items():
        written = f"{prefix or ''}{key}"
        if key not in known:
            if not known:
                raise SettingError(f"{kind} {name!r} has no options, got {written!r}")
            raise unknown_name(f"option of {name}", written, [f"{prefix or ''}{option}" for option in known])
        label = f"{name}.{key}" if prefix is None else written
        ready[key] = _fitted(label, value, known[key], _kind(factory, key))
        bounds = declared[key].bounds
        if bounds is not None and ready[key] is not None:
            if not isinstance(ready[key], (int, float)):
                raise SettingError(f"{label} must be a number, got {ready[key]!r}")
            bounds.check(label, ready[key])
    return ready


def arguments(factory: Callable[..., Any], checked: Mapping[str, Any]) -> dict[str, Any]:
    """Return checked options as keyword arguments of `factory`."""
    parameters = _parameters(factory)
    return {parameters[name].name: value for name, value in checked.items()}


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with NumPy's numbers as Python's own and paths as strings, in nested tables as well."""
    found = {}
    for name, value in values.items():
        if isinstance(value, np.generic):
            value = value.item()
        elif isinstance(value, PurePath):
            value = str(value)
        elif isinstance(value, (list, tuple)):
            value = type(value)(v.item() if isinstance(v, np.generic) else v for v in value)
        found[name] = plain_values(value) if isinstance(value, Mapping) else value
    return found


def _parameters(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters with a default; a trailing underscore, as in ``lambda_``, is not part of the name."""
    try:
        found = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name.rstrip("_"): p for p in found if p.kind in kinds and p.default is not inspect.Parameter.empty}


def _annotation(factory: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return a parameter's annotation, evaluated if it is a string; None if only a type checker can read it."""
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    function = getattr(factory, "func", factory)
    owner: Any = vars(function).get("__init__", function) if isinstance(function, type) else function
    try:
        return eval(parameter.annotation, getattr(owner, "__globals__", {}))
    except Exception:  # whatever a user's annotation raises
        return None


def _kind(factory: Callable[..., Any], option: str) -> type:
    """Return the type of an option: that of its default, or float if annotated so, as in ``momentum: float = 0``."""
    parameter = _parameters(factory)[option]
    annotation = _annotation(factory, parameter)
    number = getattr(annotation, "__origin__", annotation) is float
    return float if number and type(parameter.default) is int else type(parameter.default)


def _fitted(name: str, value: Any, default: Any, kind: type) -> Any:
    """Return `value` in the type of an option, or raise an error that names that type."""
    if isinstance(value, Typed):
        value = value.read(kind)
    if default is None:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is tuple and isinstance(value, (list, int, float)) and not isinstance(value, bool):
        return tuple(value) if isinstance(value, list) else (value,)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise SettingError(f"{name} must be {TYPE_NAMES.get(kind, kind.__name__)}, got {value!r}")
    return value
