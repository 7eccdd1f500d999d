"""Layers of settings: what a layer is, and how the settings of one lie over those of the layer below."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedcat.config.settings import TABLES, Settings, value_type
from fedcat.config.toml import read_toml
from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.options import Typed, options, plain_values
from fedcat.core.registry import Registry, import_path, label_of
from fedcat.data.augment import AUGMENTATIONS
from fedcat.data.dataset import DATASETS, NATURAL
from fedcat.data.partitions import PARTITIONS
from fedcat.methods import METHODS
from fedcat.methods.aggregation import AGGREGATORS
from fedcat.methods.selection import SELECTORS
from fedcat.methods.server_optimizer import SERVER_OPTIMIZERS
from fedcat.models.losses import LOSSES
from fedcat.models.metrics import METRICS
from fedcat.models.nets import NETS
from fedcat.protocol.local_optimizer import OPTIMIZERS

REGISTRIES: dict[str, Registry[Any]] = {
    "method": METHODS,
    "dataset": DATASETS,
    "net": NETS,
    "loss": LOSSES,
    "partition": PARTITIONS,
    "optimizer": OPTIMIZERS,
    "selector": SELECTORS,
    "aggregator": AGGREGATORS,
    "server_optimizer": SERVER_OPTIMIZERS,
}
"""Settings that name a part; the part may also be given as an object."""

LISTS: dict[str, Registry[Any]] = {"metrics": METRICS, "augment": AUGMENTATIONS}
"""Settings that name several parts; each may also be given as an object."""

RENAMED = {
    "devices": "clients",
    "per_device": "per_client",
    "server": "server_optimizer",
    "on_round": "callbacks",
}
"""Former names of settings."""

ELSEWHERE = {
    "learning_rate": "lr",
    "k": "per_round",
    "clients_per_round": "per_round",
    "num_clients": "clients",
    "num_rounds": "rounds",
    "local_epochs": "epochs",
    "batch": "batch_size",
    "model": "net",
    "algorithm": "method",
}
"""Names that settings have in papers and in other simulators."""

OPTION_TABLES = (
    ("partition", "partition_options", ""),
    ("optimizer", "optimizer_options", "optimizer_"),
    ("aggregator", "aggregator_options", "aggregator_"),
    ("server_optimizer", "server_options", "server_"),
)
"""Parts whose options are settings as well: the setting that names the part, the table, and the options' prefix."""

PLAIN = (str, int, float, list, dict, type(None))
"""Types of what a settings file can hold; anything else is an object."""

OWNER_SETTINGS = ("partition", "clients", "min_samples")
"""Settings that follow from the owners of the samples if the partition is `natural`."""


@dataclass(frozen=True)
class SettingsFile:
    """The settings of a file as a layer, and the file's name."""

    name: str = ""
    layer: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: str | Path | None, trust: bool = False, given: Mapping[str, Any] | None = None) -> SettingsFile:
        """Read a file; without a path, return an empty layer.

        Parameters
        ----------
        path : path, optional
            The file.
        trust : bool
            Whether a ``module:attribute`` that stands in the file may be imported, which runs the module's code.
        given : mapping, optional
            Settings that the user gave besides the file. They stand above it, and modules that they name may be
            imported.
        """
        if path is None:
            return cls()
        stored = read_toml(Path(path))
        try:
            if not trust:
                stored = _without_strangers(stored, given or {})
            return cls(str(path), as_layer(stored))
        except SettingError as error:
            raise SettingError(f"settings file {str(path)!r}: {error}") from error


def _without_strangers(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a file's settings without what the user replaces; raise an error for modules that the user did not name.

    A part of a module that the user named must be defined there: what the module itself imports is not meant.
    """
    parts = [part for value in given.values() for part in (value if isinstance(value, list) else [value])]
    named = {module_of(part) for part in parts}
    found = _imports(stored)
    replaced = {setting for setting, _, _ in found if setting in given}
    found = [one for one in found if one[0] not in replaced]
    tables = stored.get("options")
    for table in tables.values() if isinstance(tables, Mapping) else ():  # a method's own may hold an optimizer
        found += _imports(table) if isinstance(table, Mapping) else []
    for setting, registry, name in found:
        if module_of(name) not in named or import_path(registry.get(name)) != name:
            flag = f"--{setting.replace('_', '-')} {name}"
            raise untrusted(
                setting, name, f"name it yourself ({flag}), or trust the file: --trust, in Python trust=True"
            )
    return {name: value for name, value in stored.items() if name not in replaced}


def _imports(stored: Mapping[str, Any]) -> list[tuple[str, Registry[Any], str]]:
    """Return the parts that a table names as ``module:attribute``: the setting, its registry and the name."""
    return [
        (setting, registry, name)
        for setting, registry in {**REGISTRIES, **LISTS}.items()
        for name in _listed(stored.get(setting))
        if isinstance(name, str) and module_of(name) is not None
    ]


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def untrusted(setting: str, name: str, remedy: str) -> SettingError:
    """Return the error for a module that a file names and that must not be imported without the user's consent."""
    return SettingError(
        f"{setting} {name!r} would import the module {module_of(name)!r} and run its code; if you know what it does, "
        f"{remedy}"
    )


def module_of(part: object) -> str | None:
    """Return the module that a ``module:attribute`` names, or that an object comes from; None for other names."""
    path = part if isinstance(part, str) else import_path(part)
    return path.partition(":")[0] if path and ":" in path else None


def as_layer(values: Mapping[str, Any], parts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return settings as a layer: names are known, values plain, and options in their tables.

    Options of the partition and of the server optimizer that are named in `parts`, or else in `values`, are known.
    """
    known = {entry.name for entry in fields(Settings)}
    nested = option_settings(values if parts is None else parts)
    layer: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    for name, value in plain_values(values).items():
        if name in (*TABLES, "method_options") and not isinstance(value, Mapping):
            raise SettingError(f"{name} must be a table of options, got {value!r}")
        if name == "options" and isinstance(value, Mapping):
            for option, entry in value.items():
                if not isinstance(entry, Mapping):
                    check_not_option(option, entry, values.get("method"))
                    check_not_setting(option)
        if name in known or name == "method_options":
            layer[name] = value.read(value_type(name)) if isinstance(value, Typed) else value
        elif name in nested:
            table, option, _ = nested[name]
            if value is not None:
                tables.setdefault(table, {})[option] = value
        else:
            check_renamed(name)
            check_not_option(name, value, values.get("method"))
            raise unknown_name("setting", name, known | nested.keys() | {"method_options"})
    return overlay(layer, tables)


def check_renamed(name: str) -> None:
    """Raise an error if a setting has another name now, or is known by another name elsewhere."""
    if name in RENAMED:
        raise SettingError(f"setting {name!r} is now called {RENAMED[name]!r}")
    if name.lower() in ELSEWHERE:
        raise SettingError(f"unknown setting {name!r}: it is called {ELSEWHERE[name.lower()]!r} here")


def check_not_option(name: object, value: object, method: object = None) -> None:
    """Raise an error if a name that is no setting is an option of the method or of a registered method or dataset."""
    shown = repr(value.read() if isinstance(value, Typed) else value)
    chosen = Settings.method if method is None else method
    takers = [part for part, _ in METHODS if name in options(METHODS.get(part))]
    if takers:
        mine = isinstance(chosen, str) and chosen in takers
        part = chosen if mine else takers[0]
        name_of = chosen if isinstance(chosen, str) else label_of(chosen)
        other = "" if mine or method is None else f" and not of {name_of}"
        right = f'options={{"{part}": {{"{name}": {shown}}}}}'
        raise SettingError(f"{name!r} is not a setting but an option of the method {part}{other}: pass {right}")
    for part, _ in DATASETS:
        if name in options(DATASETS.get(part)):
            right = f'dataset_options={{"{name}": {shown}}}'
            raise SettingError(f"{name!r} is not a setting but an option of the dataset {part}: pass {right}")


def check_not_setting(name: str) -> None:
    """Raise an error if a name that is no option of a method is a setting."""
    if name in Settings.__dataclass_fields__ or name in option_settings():
        flag = name.replace("_", "-")
        raise SettingError(
            f"{name} is a setting, not an option: use --{flag}, in Python {name}=..., or for one method "
            f"-o METHOD.{name}=..."
        )


def option_settings(parts: Mapping[str, Any] | None = None) -> dict[str, tuple[str, str, type]]:
    """Return the options that are settings as well, with their table, name there and type: ``alpha``, ``server_lr``.

    They are those of the registered parts of `OPTION_TABLES`, and of the ones that are named in `parts`.
    """
    found = {}
    for setting, table, prefix in OPTION_TABLES:
        registry, chosen = REGISTRIES[setting], (parts or {}).get(setting)
        factories = [registry.get(name) for name, _ in registry]
        if chosen is not None and not isinstance(chosen, PLAIN):
            factories.append(chosen)
        elif isinstance(chosen, str) and ":" in chosen:
            factories.append(registry.get(chosen))
        for factory in factories:
            for option, default in options(factory).items():
                found[f"{prefix}{option}"] = (table, option, type(default))
    return {name: place for name, place in found.items() if name not in Settings.__dataclass_fields__}


def merge_tables(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values `above` over those `below`; tables are merged entry by entry, at any depth."""
    merged = {name: merge_tables(value, {}) if isinstance(value, Mapping) else value for name, value in below.items()}
    for name, value in above.items():
        if isinstance(value, Mapping):
            value = merge_tables(merged[name] if isinstance(merged.get(name), Mapping) else {}, value)
        merged[name] = value
    return merged


def overlay(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of one layer over those of the layer below, without those that the upper layer displaces."""
    gone = displaced(below, above)
    return merge_tables({name: value for name, value in below.items() if name not in gone}, above)


def displaced(below: Mapping[str, Any], above: Mapping[str, Any]) -> set[str]:
    """Return the settings of the lower layer that lose their meaning through what the upper layer sets.

    - ``fraction`` displaces ``per_round``.
    - Another dataset displaces the options of the dataset.
    - Another method displaces the server optimizer, its options and further models to evaluate; another optimizer,
      aggregator or server optimizer, the options.
    - What the owners of the samples imply is displaced by other options of the dataset, and in a dataset's defaults by
      another partition.
    """
    gone = set()
    if "fraction" in above:
        gone.add("per_round")
    if _differ(above.get("dataset", same := below.get("dataset", Settings.dataset)), same):
        gone.add("dataset_options")
    if _differ(above.get("method", same := below.get("method")), same) and same is not None:
        gone |= {"server_optimizer", "server_options", "evaluate"}
    for part, table, _ in OPTION_TABLES:
        if part in above and part != "partition" and _other_part(above[part], below.get(part)):
            gone.add(table)
    if below.get("partition") == NATURAL and "min_samples" in above:  # owners with fewer are left out
        gone.add("clients")
    if below.get("partition") == NATURAL:
        if "dataset" not in below and above.get("partition", NATURAL) != NATURAL:  # a dataset's defaults
            gone |= set(OWNER_SETTINGS)
        elif "dataset" in below and above.get("dataset_options"):
            gone |= set(OWNER_SETTINGS) - {"partition"}
    return gone & below.keys()


def _other_part(part: object, other: object) -> bool:
    """Return whether a part is not the one that another layer names; an object may be named by its import path."""
    path = part if isinstance(part, str) else import_path(part)
    return other is None or (path or part) != other


def _differ(part: object, other: object) -> bool:
    """Return whether two parts differ: names by value, objects by identity, since arrays have no single answer."""
    return part != other if isinstance(part, str) and isinstance(other, str) else part is not other


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return settings with the entries of tables under names such as ``options.fedcat.epsilon``."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {above + name: value}
    return found
