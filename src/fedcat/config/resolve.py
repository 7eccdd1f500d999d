"""The one road from what a user gives to checked settings.

The layers, from the lowest: the general defaults, the dataset's defaults, a settings file, and what was given by flags
or in Python. A preset lies directly below the layer that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedcat.config.layers import (
    LISTS,
    PLAIN,
    REGISTRIES,
    SettingsFile,
    as_layer,
    check_not_setting,
    displaced,
    flat,
    overlay,
)
from fedcat.config.presets import preset
from fedcat.config.resolve_data import (
    GIVEN,
    Loader,
    check_not_file,
    check_registered,
    left_out,
    load_data,
    of_federation,
    over_defaults,
    partition_options,
    stale_partition_options,
)
from fedcat.config.schedules import USED_BY
from fedcat.config.settings import Settings
from fedcat.core.device import find_device
from fedcat.core.errors import DataError, SettingError, unknown_name
from fedcat.core.options import Typed, check_options, options, storable_options
from fedcat.core.registry import import_path, label_of, name_of
from fedcat.data.dataset import Dataset, make_dataset
from fedcat.data.federation import Federation
from fedcat.data.files.locations import expand_user
from fedcat.methods import METHODS, declared
from fedcat.methods.server_optimizer import SERVER_OPTIMIZERS
from fedcat.models.metrics import METRICS
from fedcat.protocol.local_optimizer import OPTIMIZERS

OF_METHODS = ("epochs", "batch_size", "optimizer", "lr", "momentum", "weight_decay", "clip", "average")
"""Settings that a method's table of options may hold, for this method alone."""


@dataclass(frozen=True)
class Resolved:
    """What a run is made of.

    Attributes
    ----------
    settings : Settings
        Checked, with every default filled in. Objects that were given stand in it by their names.
    parts : mapping
        The parts that the settings name, by setting; None where none is named.
    data : Dataset or Federation
        The data.
    notes : tuple of str
        Lines that the user should read.
    """

    settings: Settings
    parts: Mapping[str, Any]
    data: Dataset | Federation
    notes: tuple[str, ...]


def resolve(given: Mapping[str, Any], file: SettingsFile | None = None, load: Loader = make_dataset) -> Resolved:
    """Turn what a user gave into checked settings.

    Parameters
    ----------
    given : mapping
        Settings by name. Those that name a part (`REGISTRIES`) may be objects, and so may be the entries of `metrics`
        and `augment`.
        `method_options` are options of the method in use. Options of the registered partitions and server optimizers
        may stand beside the settings, as ``alpha`` and ``server_lr``.
    file : SettingsFile, optional
        The layer below.
    load : callable, optional
        What makes the dataset; one that remembers lets several runs share their data.
    """
    upper, lower = _lifted(as_layer(given), file or SettingsFile())
    layered, notes = _layered(upper, lower)
    objects = {name: layered[name] for name in REGISTRIES if not isinstance(layered.get(name), PLAIN)}
    if str(layered.get("monitor")) in METRICS:  # it is recorded, then
        layered["metrics"] = _with_monitor(layered.get("metrics", []), layered["monitor"])
    lists = {name: _parts(name, layered) for name in LISTS}
    named = {**layered, **{name: name_of(part) for name, part in objects.items()}}
    named |= {name: [name_of(part) for part in layered[name]] for name in lists if name in layered}
    _check_before_loading(named, objects, stale_partition_options(upper, lower.layer, named))
    data, named["dataset_options"] = load_data(_part("dataset", named, objects), named, load)
    explicit = {**lower.layer, **upper}
    complete = over_defaults(data, named, explicit) if isinstance(data, Dataset) else of_federation(data, named)
    complete["options"] = _method_tables(complete, objects)
    complete.pop("method_options", None)
    parts = {name: _part(name, complete, objects) for name in REGISTRIES if name != "dataset"} | lists
    stale = stale_partition_options(upper, lower.layer, named, complete)
    settings = Settings.checked({**complete, **_complete_tables(complete, parts, stale)})
    unused = [option for option in upper.get("partition_options", {}) if option not in settings.partition_options]
    notes += [f"{option} has no effect with the partition {settings.partition!r}" for option in unused]
    if "fraction" in upper and upper.get("per_round") is not None:
        raise SettingError(f"per_round {settings.k} and fraction {settings.fraction:g} are both set: leave one out")
    unused = [name for name in ("lr_decay", "lr_every") if name in upper and name not in USED_BY[settings.lr_schedule]]
    notes += [f"{name} has no effect with lr_schedule {settings.lr_schedule!r}" for name in unused]
    if settings.optimizer != "sgd" and "lr" not in explicit:
        notes.append(f"lr {settings.lr:g} is meant for sgd, optimizer {settings.optimizer!r} may need another: set lr")
    if "momentum" in upper and settings.optimizer != "sgd":
        notes.append(f"momentum has no effect with the optimizer {settings.optimizer!r}: it is a setting of sgd")
    others = sorted(set(upper.get("options", {})) - {settings.method, label_of(parts["method"])})
    notes += [f"options of {name} have no effect on {settings.method}" for name in others]
    if isinstance(data, Dataset) and (left := left_out(data, settings)):
        notes.append(left)
    return Resolved(settings, parts, data, tuple(notes))


def _lifted(upper: Mapping[str, Any], file: SettingsFile) -> tuple[dict[str, Any], SettingsFile]:
    """Return both layers with the settings that stand in the method's own table beside the others."""
    method = upper.get("method", file.layer.get("method", Settings.method))
    factory = METHODS.get(method) if isinstance(method, str) else method
    names = {method if isinstance(method, str) else import_path(method), label_of(factory)}

    def lifted(layer: Mapping[str, Any]) -> dict[str, Any]:
        tables = layer.get("options", {})
        if not isinstance(tables, Mapping):
            return dict(layer)
        own = {name: table for name, table in tables.items() if name in names and isinstance(table, Mapping)}
        settings = set(OF_METHODS) - options(factory).keys()
        raised = {n: v for table in own.values() for n, v in table.items() if n in settings}
        rest = {name: {n: v for n, v in table.items() if n not in raised} for name, table in own.items()}
        return {**layer, **({"options": {**tables, **rest}} if raised else {}), **raised}

    return lifted(upper), SettingsFile(file.name, lifted(file.layer))


def _layered(upper: Mapping[str, Any], file: SettingsFile) -> tuple[dict[str, Any], list[str]]:
    """Return the upper layer over the file, each over the preset that it names, and notes about what was hidden."""
    dataset = upper.get("dataset", file.layer.get("dataset", Settings.dataset))
    gone = displaced(file.layer, upper) | ({"preset"} & upper.keys())
    lower = {**{name: value for name, value in file.layer.items() if name not in gone}, "dataset": dataset}
    above, below = (_over_preset(layer, dataset) for layer in (upper, lower))
    notes = []
    parts = ("optimizer", "aggregator", "server")
    lost = {name: file.layer[name] for name in sorted(displaced(file.layer, above)) if name.startswith(parts)}
    if any(lost.values()):
        names = [name.replace("options.", "") for name in flat(lost)]
        notes.append(f"ignored from {file.name}, which sets them for another method or optimizer: {', '.join(names)}")
    if upper.get("preset"):
        ours, theirs = flat(above), flat(file.layer)
        hidden = [n for n in theirs if n in ours and ours[n] != theirs[n]]
        hidden += [name for name in displaced(file.layer, above) if not name.startswith(parts)]
        changed = [name for name in dict.fromkeys(hidden) if name in theirs and name not in {*flat(upper), "preset"}]
        if changed:
            listed = ", ".join(f"{name} {theirs[name]}" for name in changed)
            notes.append(f"preset {upper['preset']!r} overrides these settings of {file.name}: {listed}")
    return overlay(below, above), notes


def _over_preset(layer: Mapping[str, Any], dataset: object) -> dict[str, Any]:
    """Return a layer over the preset that it names, if any."""
    name = layer.get("preset")
    return overlay(preset(name, dataset), layer) if name and isinstance(name, str) else dict(layer)


def _part(setting: str, values: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    """Return the part that a setting names, or None if it names none."""
    if setting in objects:
        return objects[setting]
    name = values.get(setting, getattr(Settings, setting))
    return None if name in ("", None, GIVEN) else REGISTRIES[setting].get(name)


def _with_monitor(metrics: Any, monitor: str) -> Any:
    """Return a list of metrics with the one that is monitored."""
    always = monitor in ("accuracy", "loss")
    return metrics if always or not isinstance(metrics, list) or monitor in metrics else [*metrics, monitor]


def _parts(setting: str, values: Mapping[str, Any]) -> list[Any]:
    """Return the parts that a setting lists; raise an error unless it is a list."""
    given = values.get(setting, [])
    if not isinstance(given, (list, tuple)):
        raise SettingError(f"{setting} must be a list, got {given!r}")
    return [LISTS[setting].get(part) if isinstance(part, str) else part for part in given]


def _method_tables(named: Mapping[str, Any], objects: Mapping[str, Any]) -> Any:
    """Return the tables of methods' options; a user's own class may be called by its bare name there."""
    tables, direct = named.get("options", {}), named.get("method_options", {})
    method, factory = named.get("method", Settings.method), _part("method", named, objects)
    short = label_of(factory)
    for name in tables:
        if not isinstance(name, str):
            raise SettingError(f"options must have strings as keys, got {name!r}")
        if name not in METHODS and ":" not in name and name[:1] != "<" and name not in (method, short):
            known = [*(known for known, _ in METHODS), method]
            raise unknown_name("method in options", name, known)
    own = tables.get(method, tables.get(short, {}))
    if not isinstance(own, Mapping):
        raise SettingError(f"options of method {method!r} must be a table, got {own!r}")
    for name in direct.keys() - options(factory).keys():
        check_not_setting(name)
    return {**tables, method: {**own, **direct}} if own or direct else tables


def _check_before_loading(named: Mapping[str, Any], objects: Mapping[str, Any], stale: set[str]) -> None:
    """Raise an error for what is wrong whatever the data is, before any of it is loaded or downloaded."""
    check_not_file(named.get("dataset"))
    late = {"method_options", *(() if "clients" in named else ("per_round",))}
    known = Settings.checked({name: value for name, value in named.items() if name not in late})
    parts = {name: _part(name, named, objects) for name in REGISTRIES}
    tables = _method_tables(named, objects)
    taken = [*options(parts["method"]), *OF_METHODS]
    for name in tables.get(known.method, {}):
        if name not in taken and name not in named.get("method_options", {}):
            raise unknown_name(f"option of {known.method}", name, taken)
    check_options("method", known.method, parts["method"], tables.get(known.method, {}))
    if "partition" in named and parts["partition"] is not None:
        partition_options(known.partition, parts["partition"], known.partition_options, stale)
    else:
        check_registered(known.partition_options)
    find_device(known.device)
    if known.data_dir and not expand_user(known.data_dir).is_dir():
        raise DataError(f"data_dir must be an existing directory, got {known.data_dir!r}")


def _complete_tables(complete: Mapping[str, Any], parts: Mapping[str, Any], stale: set[str]) -> dict[str, Any]:
    """Return the tables of options, checked, with every default filled in, and the absolute path of the data."""
    found: dict[str, Any] = {"partition_options": {}}
    if parts["partition"] is not None:
        name, given = complete.get("partition", Settings.partition), complete.get("partition_options", {})
        found["partition_options"] = partition_options(name, parts["partition"], given, stale)
    method = complete.get("method", Settings.method)
    tables = {
        name: {n: v.read() if isinstance(v, Typed) and name != method else v for n, v in table.items()}
        for name, table in complete["options"].items()
    }
    own = check_options("method", method, parts["method"], tables.get(method, {}))
    own = {**storable_options(parts["method"]), **own}
    found["options"] = {**tables, method: own} if own else tables
    optimizer = parts["server_optimizer"]
    default = declared(parts["method"], "default_server_optimizer", "")
    if optimizer is None and default:
        optimizer = SERVER_OPTIMIZERS.get(default)
    local = parts["optimizer"]
    name, given = complete.get("optimizer", Settings.optimizer), complete.get("optimizer_options", {})
    _check_takers("optimizer", given, local)
    found["optimizer_options"] = {
        **(storable_options(local) if name in OPTIMIZERS else {}),
        **check_options("optimizer", name, local, given, prefix="optimizer_"),
    }
    name, given = complete.get("aggregator", ""), complete.get("aggregator_options", {})
    if given and parts["aggregator"] is None:
        raise SettingError(f"aggregator_{next(iter(given))} needs an aggregator that takes it: set aggregator")
    if parts["aggregator"] is not None:
        checked = check_options("aggregator", name, parts["aggregator"], given, prefix="aggregator_")
        found["aggregator_options"] = checked
    given = complete.get("server_options", {})
    found["server_options"] = {n: v.read() if isinstance(v, Typed) else v for n, v in given.items()}
    if optimizer is not None:
        _check_takers("server_optimizer", given, optimizer)
        name = complete.get("server_optimizer") or default
        found["server_options"] = check_options("server_optimizer", name, optimizer, given, prefix="server_")
    folder = str(complete.get("data_dir", ""))
    return {**found, "data_dir": str(expand_user(folder).absolute()) if folder else ""}


def _check_takers(setting: str, given: Mapping[str, Any], part: Any) -> None:
    """Raise an error with the right part for an option that the chosen one does not have."""
    registry, prefix = REGISTRIES[setting], "server_" if setting == "server_optimizer" else f"{setting}_"
    for option in given.keys() - options(part).keys():
        takers = [name for name, _ in registry if option in options(registry.get(name))]
        if takers:
            raise SettingError(f"{prefix}{option} needs {setting} {' or '.join(takers)}")
