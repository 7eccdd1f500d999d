"""Named sets of settings for the datasets of the FedCat paper.

``lab`` is what the paper's tables come nearest to: the nets and the momentum of its authors' later code. ``paper`` is
what it prints: McMahan's nets and momentum 0.9. The rounds are printed nowhere; both run 1,000.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedcat.core.errors import SettingError, unknown
from fedcat.methods import paper_options

_COMMON: dict[str, Any] = {
    "fraction": 0.1,
    "rounds": 1000,
    "epochs": 5,
    "batch_size": 50,
    "lr": 0.01,
    "lr_schedule": "constant",
    "weight_decay": 0.0,
    "evaluate_every": 10,
}
_OF_PRESET: dict[str, dict[str, Any]] = {"lab": {"momentum": 0.5}, "paper": {"momentum": 0.9}}
_NETS = {
    "lab": {"mnist": "lab-mnist", "cifar10": "lab-cifar", "cifar100": "lab-cifar", "femnist": "lab-femnist"},
    "paper": {
        "mnist": "mcmahan-mnist",
        "cifar10": "mcmahan-cifar",
        "cifar100": "mcmahan-cifar",
        "femnist": "mcmahan-mnist",
    },
}
_DRAWN: dict[str, Any] = {"partition": "dirichlet", "devices": 100, "min_samples": 10}
_OF_DATASET: dict[str, dict[str, Any]] = {
    "mnist": {**_DRAWN, "dataset_options": {"mean": [0.1307], "std": [0.3081]}},
    "cifar10": {**_DRAWN, "dataset_options": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}},
    "cifar100": {
        **_DRAWN,
        "dataset_options": {"labels": "coarse", "mean": [0.4914, 0.4822, 0.4465], "std": [0.2023, 0.1994, 0.2010]},
    },
    "femnist": {
        "partition": "natural",
        "dataset_options": {"writers": 180, "keep": 100, "mean": [0.5], "std": [-0.5]},
    },
}
_TABLES = ("dataset_options", "options")

PRESETS = tuple(_OF_PRESET)
PRESET_DATASETS = tuple(_OF_DATASET)


def preset(name: str, dataset: str) -> dict[str, Any]:
    """Return the settings of a preset for a dataset, with the methods' options.

    Parameters
    ----------
    name : str
        One of `PRESETS`.
    dataset : str
        One of `PRESET_DATASETS`.
    """
    if name not in _OF_PRESET:
        raise unknown("preset", name, PRESETS)
    if not isinstance(dataset, str) or dataset not in _OF_DATASET:
        raise SettingError(
            f"preset {name!r} must be used with one of its datasets, {', '.join(PRESET_DATASETS)}, got {dataset!r}"
        )
    return {
        "preset": name,
        "dataset": dataset,
        "net": _NETS[name][dataset],
        **_OF_DATASET[dataset],
        **_COMMON,
        **_OF_PRESET[name],
        "options": paper_options(dataset),
    }


def covered(name: str, datasets: Iterable[str]) -> dict[str, Any]:
    """Return everything that a preset sets on these datasets."""
    merged: dict[str, Any] = {}
    for dataset in datasets:
        merged = lay_over(merged, preset(name, dataset))
    return merged


def flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return settings with the entries of tables under names such as ``options.fedcat.epsilon``."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {above + name: value}
    return found


def over_preset(given: Mapping[str, Any], default_dataset: str) -> dict[str, Any]:
    """Return what was given over the preset that it names, if any; tables of options are laid over each other.

    Parameters
    ----------
    given : mapping
        Settings by name.
    default_dataset : str
        The dataset where none is given.
    """
    name = given.get("preset")
    if not name or not isinstance(name, str):
        return dict(given)
    dataset = given.get("dataset", default_dataset)
    return lay_over(preset(name, dataset if isinstance(dataset, str) else "a dataset of your own"), given)


def lay_over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings `above` over those `below`; tables of options are merged entry by entry."""
    merged = {**below, **above}
    for name in below.keys() & above.keys():
        if isinstance(below[name], Mapping) and isinstance(above[name], Mapping):
            merged[name] = lay_over(below[name], above[name])
    return merged


def uncover(settings: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` without what `below` sets, so that it shows; of tables of options, without those entries."""
    shown = {*below, *(["per_round"] if "fraction" in below else [])} - {"dataset", *_TABLES}
    kept = {name: value for name, value in settings.items() if name not in shown}
    for name in _TABLES:
        if isinstance(kept.get(name), Mapping) and isinstance(below.get(name), Mapping):
            kept[name] = _without(kept[name], below[name])
    return kept


def _without(table: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in table.items():
        if isinstance(value, Mapping) and isinstance(below.get(name), Mapping):
            kept[name] = _without(value, below[name])
        elif name not in below:
            kept[name] = value
    return kept
