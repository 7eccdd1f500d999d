"""Layers of settings: how those of one layer lie over those of the layer below."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedcat.config.settings import Settings
from fedcat.data.dataset import NATURAL

OWNER_SETTINGS = ("partition", "clients", "min_samples")
"""Settings that follow from the owners of the samples if the partition is `natural`."""


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
    - Another method displaces the server optimizer, its options and further models to evaluate; another server
      optimizer, the options.
    - What the owners of the samples imply is displaced by other options of the dataset, and in a dataset's defaults by
      another partition.
    """
    gone = set()
    if "fraction" in above:
        gone.add("per_round")
    if above.get("dataset", same := below.get("dataset", Settings.dataset)) != same:
        gone.add("dataset_options")
    if above.get("method", same := below.get("method")) != same and same is not None:
        gone |= {"server_optimizer", "server_options", "evaluate"}
    if "server_optimizer" in above:
        gone.add("server_options")
    if below.get("partition") == NATURAL:
        if "dataset" not in below and above.get("partition", NATURAL) != NATURAL:  # a dataset's defaults
            gone |= set(OWNER_SETTINGS)
        elif "dataset" in below and above.get("dataset_options"):
            gone |= set(OWNER_SETTINGS) - {"partition"}
    return gone & below.keys()


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return settings with the entries of tables under names such as ``options.fedcat.epsilon``."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {above + name: value}
    return found
