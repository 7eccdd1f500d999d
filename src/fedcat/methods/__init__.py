"""The methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedcat.errors import SettingError
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


__all__ = ["METHODS", "Context", "Factory", "FedAvg", "FedCat", "Method", "make_method"]
