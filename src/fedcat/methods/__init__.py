"""The methods by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedcat.errors import SettingError, unknown
from fedcat.methods.fedavg import FedAvg
from fedcat.methods.fedcat import FedCat
from fedcat.methods.method import Context, Method
from fedcat.registry import Registry, takes

Factory = Callable[..., Method]

METHODS: Registry[Factory] = Registry("method")
METHODS.add("fedavg", FedAvg, "average the devices' models by samples (McMahan et al. 2017)")
METHODS.add("fedcat", FedCat, "copies walk through chains of devices, then are averaged (Hu et al. 2022)")
METHODS.add(
    "fedcat-gc",
    partial(FedCat, concatenation=False),
    "FedCat's grouping- and count-based selection alone, averaged every round (the paper's w/ GC)",
)
METHODS.add(
    "fedcat-dc",
    partial(FedCat, grouping=False),
    "FedCat's device concatenation alone, devices drawn uniformly (the paper's w/ DC)",
)


def options(factory: Factory) -> dict[str, Any]:
    """Return a method's options and their defaults, under the names that users write."""
    return {name: p.default for name, p in _parameters(factory).items()}


def arguments(name: str, factory: Factory, given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options that a user gave and return them as keyword arguments of the method."""
    if not isinstance(given, Mapping):
        raise SettingError(f"options of method {name!r} must be a table, got {given!r}")
    known = _parameters(factory)
    ready = {}
    for key, value in given.items():
        if key not in known:
            if not known:
                raise SettingError(f"method {name!r} has no options, got {key!r}")
            raise unknown(f"option of {name}", key, known)
        ready[known[key].name] = _fitted(f"{name}.{key}", value, known[key].default)
    return ready


def make_method(name: str, factory: Factory, context: Context, given: Mapping[str, Any]) -> Method:
    """Make a method; what is no method is refused."""
    missing = ", ".join(sorted(getattr(factory, "__abstractmethods__", ())))
    if missing:
        raise SettingError(f"method {name!r} must define {missing}")
    if not callable(factory) or not takes(factory, context, **given):
        raise SettingError(f"method {name!r} must be a Method class, or a function of (context, options with defaults)")
    made = factory(context, **given)
    if not isinstance(made, Method):
        raise SettingError(f"method {name!r} must make a Method, got {type(made).__name__}")
    return made


def _parameters(factory: Factory) -> dict[str, inspect.Parameter]:
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
    if kind is tuple and isinstance(value, list):
        return tuple(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
        raise SettingError(f"{name} must be {words.get(kind, kind.__name__)}, got {value!r}")
    return value


__all__ = ["METHODS", "Context", "Factory", "FedAvg", "FedCat", "Method", "arguments", "make_method", "options"]
