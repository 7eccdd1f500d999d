"""Options of methods and datasets: the parameters with a default of what makes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np

from fedcat.core.errors import SettingError, unknown

WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    tuple: "a list",
    list: "a list of texts",
    dict: "a table of options",
}
"""What values of a type are called in errors."""


def options(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of what `factory` makes and their defaults, under the names that users write."""
    return {name: p.default for name, p in _parameters(factory).items()}


def plain_options(factory: Callable[..., Any]) -> dict[str, Any]:
    """Return the options whose defaults a settings file can hold."""
    return {n: v for n, v in options(factory).items() if isinstance(v, (bool, int, float, str, tuple))}


def arguments(kind: str, name: str, factory: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options that a user gave and return them as keyword arguments of `factory`.

    Parameters
    ----------
    kind, name : str
        What it makes and how that is called, for errors.
    factory : callable
        What takes the options.
    given : mapping
        The options by the names that users write.
    """
    if not isinstance(given, Mapping):
        raise SettingError(f"options of {kind} {name!r} must be a table, got {given!r}")
    known = _parameters(factory)
    ready = {}
    for key, value in given.items():
        if key not in known:
            if not known:
                raise SettingError(f"{kind} {name!r} has no options, got {key!r}")
            raise unknown(f"option of {name}", key, known)
        ready[known[key].name] = _fitted(f"{name}.{key}", value, known[key].default)
    return ready


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with NumPy's numbers as Python's own and paths as texts, also in tables."""
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
    """Return the parameters with a default, without the underscore that keeps a name from being a keyword."""
    try:
        found = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return {p.name.rstrip("_"): p for p in found if p.kind in kinds and p.default is not inspect.Parameter.empty}


def _fitted(name: str, value: Any, default: Any) -> Any:
    """Return `value` in the type of `default`, or say what type it must have."""
    if default is None:
        return value
    kind = type(default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is tuple and isinstance(value, (list, int, float)) and not isinstance(value, bool):
        return tuple(value) if isinstance(value, list) else (value,)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise SettingError(f"{name} must be {WORDS.get(kind, kind.__name__)}, got {value!r}")
    return value
