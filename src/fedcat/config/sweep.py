"""Comparisons: from methods and swept values to the settings of each variant."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedcat.config.layers import (
    OPTION_TABLES,
    SettingsFile,
    as_layer,
    check_not_setting,
    check_renamed,
    merge_tables,
    option_settings,
    overlay,
)
from fedcat.config.settings import TABLES, Settings, value_type
from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.options import Typed, options
from fedcat.core.registry import label_of
from fedcat.data.dataset import DATASETS, dataset_options
from fedcat.methods import METHODS, declared
from fedcat.methods.server_optimizer import SERVER_OPTIMIZERS

PER_METHOD = ("method_options", "server_optimizer", "server_options", "evaluate")
"""Settings of which a comparison gives each method only what it takes."""

Variant = tuple[str, dict[str, Any]]
"""A label, and the settings of one method with one choice of swept values."""


def variants(
    methods: Sequence[Any], sweep: Mapping[str, Sequence[Any]], given: Mapping[str, Any], file: SettingsFile
) -> tuple[list[Variant], SettingsFile, list[str]]:
    """Combine every method with every choice of swept values.

    Options of methods, settings of the server optimizer and further models to evaluate go to the methods that take
    them; choices that differ only in what a method does not take are run once.

    Parameters
    ----------
    methods : sequence
        Names of methods, classes, or functions that make a method.
    sweep : mapping
        Settings, or options of the methods or of the dataset, and the values to try.
    given : mapping
        The settings of all variants.
    file : SettingsFile
        The layer below.

    Returns
    -------
    list of Variant, SettingsFile, list of str
        The variants, the layer below them, and notes for the user.
    """
    upper = as_layer(given)
    Settings.checked({name: upper[name] for name in (*TABLES, "evaluate") if name in upper})
    lifted = {name: file.layer[name] for name in PER_METHOD if name in file.layer}
    below = SettingsFile(file.name, {n: v for n, v in file.layer.items() if n not in (*PER_METHOD, "method")})
    settings = {**file.layer, **upper}
    factories = [_factory(method) for method in methods]
    swept = _read(sweep, factories, settings)
    _check_not_both(swept, upper)
    found: list[Variant] = []
    used: set[str] = set()
    unused: dict[str, set[str]] = {}
    for method, factory in zip(methods, factories, strict=True):
        label, seen = _label(method), set()
        for places in itertools.product(*(range(len(values)) for values in swept.values())):
            chosen = {name: swept[name][place] for name, place in zip(swept, places, strict=True)}
            layer = overlay(lifted, merge_tables(upper, _layer(chosen, settings, factories)))
            idle = _idle(factory, layer)
            ignored = idle - {"server_optimizer"} if _names_default(factory, layer) else idle
            used |= _asked(layer) - ignored
            unused.setdefault(label, set()).update(ignored)
            kept = _without(layer, idle)
            words = {name: value for name, value in chosen.items() if _reaches(name, kept, settings)}
            key = tuple((name, place) for name, place in zip(swept, places, strict=True) if name in words)
            if key not in seen:
                seen.add(key)
                shown = "".join(f" {name}={_shown(value)}" for name, value in words.items())
                found.append((label + shown, {**kept, **_own_tables(kept, method, factory), "method": method}))
    _check_used(set().union(*unused.values()) - used - _asked(lifted), upper.get("evaluate", []), methods)
    labels = {name for method, factory in zip(methods, factories, strict=True) for name in _names(method, factory)}
    strangers = [name for name in upper.get("options", {}) if name not in labels]
    for name in strangers:
        if name not in METHODS:
            raise unknown_name("method in options", name, {*labels, *(known for known, _ in METHODS)})
    notes = [f"options of {name} have no effect: it is not among the methods" for name in strangers]
    return found, below, [*_notes(unused), *notes]


def _own_tables(layer: Mapping[str, Any], method: Any, factory: Any) -> dict[str, Any]:
    """Return the tables of options in a layer without those of the other methods of a comparison."""
    if "options" not in layer:
        return {}
    names = _names(method, factory)
    return {"options": {name: table for name, table in layer["options"].items() if name in names}}


def _names(method: Any, factory: Any) -> set[str]:
    """Return the names under which a table of options can be meant for a method."""
    return {_label(method)} if isinstance(method, str) and method in METHODS else {_label(method), label_of(factory)}


def _label(method: Any) -> str:
    return method if isinstance(method, str) else label_of(method)


def _factory(method: Any) -> Any:
    return METHODS.get(method) if isinstance(method, str) else method


def _dataset_options(dataset: object) -> dict[str, Any]:
    if isinstance(dataset, str):
        return dataset_options(DATASETS.get(str(dataset)))
    return dataset_options(dataset) if callable(dataset) else {}


def _sweepable(parts: Mapping[str, Any]) -> dict[str, type | None]:
    """Return the settings that can be swept, among them options of the chosen parts, and their types."""
    names = set(Settings.__dataclass_fields__) - {"method", "seed", "threads", "monitor", *TABLES}
    nested = {name: kind for name, (_, _, kind) in option_settings(parts).items()}
    return {**{name: value_type(name) for name in names}, **nested}


def _read(
    sweep: Mapping[str, Sequence[Any]], factories: Iterable[Any], settings: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """Return the swept values; those from a command line are read in the types of what they are for."""
    for name, values in sweep.items():
        if isinstance(values, str) or not hasattr(values, "__len__"):
            raise SettingError(f"sweep of {name} must be a list of values, got {values!r}")
        if not len(values):
            raise SettingError(f"sweep of {name} must list at least one value, got none")
    datasets = sweep.get("dataset", [settings.get("dataset", Settings.dataset)])
    parts = [*(options(factory) for factory in factories), *(_dataset_options(dataset) for dataset in datasets)]
    types: dict[str, Any] = {name: type(default) for part in parts for name, default in part.items()}
    for chosen in _choices(sweep, settings):
        types |= _sweepable(chosen)
    for name in sweep:
        if name not in types:
            check_renamed(name)
            if name == "method":
                raise SettingError("method cannot be swept: list the methods to compare instead")
            raise unknown_name("sweep", name, types)
    found = {
        name: [value.read(types[name]) if isinstance(value, Typed) else value for value in values]
        for name, values in sweep.items()
    }
    for name, values in found.items():
        twice = [value for place, value in enumerate(values) if any(value is v or value == v for v in values[:place])]
        if twice:
            raise SettingError(f"sweep of {name} must list different values, got {_shown(twice[0])} twice")
    return found


def _choices(sweep: Mapping[str, Sequence[Any]], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parts with options of a comparison, each as settings that name it."""
    names = [part for part, _, _ in OPTION_TABLES]
    return [{name: value} for name in names for value in sweep.get(name, [settings.get(name)])]


def _check_not_both(swept: Mapping[str, Any], common: Mapping[str, Any]) -> None:
    """Raise an error for a setting or option that is both set and swept, or that hides one that is swept."""
    for name in swept:
        tables = {"method_options": "", "dataset_options": "", **{table: prefix for _, table, prefix in OPTION_TABLES}}
        written = {prefix + option for table, prefix in tables.items() for option in common.get(table, {})}
        if name in common or name in written:
            raise SettingError(f"{name} must be set or swept, got both")
        for method, table in common.get("options", {}).items():
            if isinstance(table, Mapping) and name in table:
                raise SettingError(f"{name} must be set or swept, got both {method}.{name} and a sweep")
    if "fraction" in swept and common.get("per_round") is not None:
        raise SettingError("per_round must not be set if fraction is swept: fraction would have no effect")


def _layer(chosen: Mapping[str, Any], settings: Mapping[str, Any], factories: Iterable[Any]) -> dict[str, Any]:
    """Return a choice of swept values as a layer; options that the chosen dataset does not have are left out."""
    of_methods = {option for factory in factories for option in options(factory)}
    of_data = _dataset_options(chosen.get("dataset", settings.get("dataset", Settings.dataset)))
    parts = {**settings, **chosen}
    known = _sweepable(parts)
    layer = as_layer({name: value for name, value in chosen.items() if name in known}, parts)
    rest = {name: value for name, value in chosen.items() if name not in known}
    tables = {
        "method_options": {name: value for name, value in rest.items() if name in of_methods},
        "dataset_options": {n: v for n, v in rest.items() if n not in of_methods and n in of_data},
    }
    return {**layer, **{name: table for name, table in tables.items() if table}}


def _reaches(name: str, layer: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Tell whether a swept value is part of a variant's settings."""
    table, option, _ = option_settings({**settings, **layer}).get(name, ("", "", str))
    places = (layer, layer.get("method_options", {}), layer.get("dataset_options", {}))
    return any(name in place for place in places) or option in layer.get(table, {})


def _asked(layer: Mapping[str, Any]) -> set[str]:
    """Return what a layer sets that only some methods take."""
    server = {f"server_{option}" for option in layer.get("server_options", {})}
    server |= {"server_optimizer"} if layer.get("server_optimizer") else set()
    return {*layer.get("method_options", {}), *server, *layer.get("evaluate", [])}


def _idle(factory: Any, layer: Mapping[str, Any]) -> set[str]:
    """Return what a layer sets that a method does not take."""
    models, default = declared(factory, "extra_models", None), declared(factory, "default_server_optimizer", "")
    idle: set[str] = layer.get("method_options", {}).keys() - options(factory)
    if models is not None:
        idle |= {name for name in layer.get("evaluate", []) if name not in models}
    if default == "":  # a function: what its method takes is not known before it is called
        return idle
    chosen = layer.get("server_optimizer") or default
    taken: set[str] = set()
    if chosen == default or default == "mean":
        optimizer = SERVER_OPTIMIZERS.get(chosen) if isinstance(chosen, str) else chosen
        taken = {f"server_{option}" for option in options(optimizer)}
        taken |= {"server_optimizer"} if default == "mean" else set()
    return idle | {name for name in _asked(layer) if name.startswith("server_") and name not in taken}


def _names_default(factory: Any, layer: Mapping[str, Any]) -> bool:
    """Tell whether a layer names the server optimizer that a method has anyway, which is no reason for a note."""
    return bool(layer.get("server_optimizer") == declared(factory, "default_server_optimizer", ""))


def _notes(unused: Mapping[str, set[str]]) -> list[str]:
    """Return which settings of the server optimizer have no effect on which methods."""
    server = {label: sorted(name for name in names if name.startswith("server_")) for label, names in unused.items()}
    return [f"{', '.join(n)} not used by {label}, see `fedcat methods`" for label, n in server.items() if n]


def _without(layer: Mapping[str, Any], idle: set[str]) -> dict[str, Any]:
    """Return a layer without what a method does not take."""
    kept = {name: value for name, value in layer.items() if name not in idle}
    for table, prefix in (("method_options", ""), ("server_options", "server_")):
        if table in layer:
            kept[table] = {name: value for name, value in layer[table].items() if f"{prefix}{name}" not in idle}
    if "evaluate" in layer:
        kept["evaluate"] = [name for name in layer["evaluate"] if name not in idle]
    return kept


def _check_used(idle: set[str], models: Sequence[str], methods: Sequence[Any]) -> None:
    """Raise an error for what was given and no method takes."""
    labels, factories = ", ".join(map(_label, methods)), [_factory(method) for method in methods]
    for name in sorted(idle):
        if name.startswith("server_"):
            raise SettingError(f"{name} has no effect on any of the methods {labels}")
        if name in models:
            raise unknown_name("evaluate", name, {m for f in factories for m in declared(f, "extra_models", ())})
        check_not_setting(name)
        raise unknown_name(f"option of {labels}", name, {option for f in factories for option in options(f)})


def _shown(value: Any) -> str:
    """Return a swept value as it appears in a label."""
    if isinstance(value, (list, tuple)):
        return "+".join(map(_shown, value)) or "none"
    plain = value is None or isinstance(value, (str, int, float, bool, np.generic))
    return str(value) if plain else label_of(value)
