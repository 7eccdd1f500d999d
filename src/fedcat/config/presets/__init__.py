"""Presets: named settings, one TOML file each beside this module.

A file holds settings and, in a table ``[dataset.NAME]`` for each dataset that it covers, settings for that dataset.
With ``extends = "other"`` it says only what differs from another preset.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from fedcat.config.layers import merge_tables
from fedcat.core.errors import SettingError, unknown_name


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of the presets."""
    files = (path.name for path in resources.files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml")))


def preset_datasets(name: str) -> tuple[str, ...]:
    """Return the datasets that a preset covers."""
    return tuple(_read(name)["dataset"])


def preset(name: str, dataset: object) -> dict[str, Any]:
    """Return the settings of a preset for one of its datasets."""
    stored = _read(name)
    if not isinstance(dataset, str) or dataset not in stored["dataset"]:
        shown = repr(dataset) if isinstance(dataset, str) else "a dataset of your own"
        raise SettingError(
            f"preset {name!r} must be used with one of its datasets, {', '.join(stored['dataset'])}, got {shown}"
        )
    common = {key: value for key, value in stored.items() if key != "dataset"}
    return {"preset": name, "dataset": dataset, **merge_tables(common, stored["dataset"][dataset])}


@cache
def _read(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise unknown_name("preset", name, preset_names())
    stored = tomllib.loads(resources.files(__name__).joinpath(f"{name}.toml").read_text(encoding="utf-8"))
    extended = stored.pop("extends", None)
    return stored if extended is None else merge_tables(_read(extended), stored)
