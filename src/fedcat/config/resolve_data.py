"""What the data adds to the settings: its defaults, its owners, and the options of the dataset and the partition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from fedcat.config.layers import as_layer, overlay
from fedcat.config.settings import Settings
from fedcat.core.errors import SettingError
from fedcat.core.options import check_options, options, storable_options
from fedcat.core.text import plural
from fedcat.data.dataset import DATASETS, NATURAL, RESERVED, Dataset, dataset_arguments
from fedcat.data.federation import Federation
from fedcat.data.files.locations import expand_user
from fedcat.data.partitions import PARTITIONS

GIVEN = "given"
"""The partition of a federation that the user divided."""

RESERVED_PARTITION = {"how", "labels", "clients", "partition", "seed", "min_samples", "tries"}
"""Names that an option of a partition cannot have."""

ARRAYS = ": make a dataset of arrays with fedcat.Dataset.from_arrays(x, y, test=(x_test, y_test))"

Loader = Callable[[Any, str, Mapping[str, Any]], "Dataset | Federation"]
"""Makes a dataset: (factory, name, arguments)."""


def check_not_file(dataset: object) -> None:
    """Raise an error with the right dataset if a file or directory was named instead of one."""
    if isinstance(dataset, Mapping):
        raise SettingError(f"dataset must be a name, a Dataset, a Federation or a function, got a dictionary{ARRAYS}")
    if not isinstance(dataset, str) or dataset in DATASETS or ":" in dataset:
        return
    kind = "npz" if dataset.endswith(".npz") else "folder" if expand_user(dataset).is_dir() else ""
    if kind:
        raise SettingError(
            f"dataset {dataset!r} is a path: choose the dataset {kind} with the option path={dataset} "
            f'(-d path={dataset}; in Python dataset_options={{"path": "{dataset}"}})'
        )


def load_data(factory: Any, named: Mapping[str, Any], load: Loader) -> tuple[Any, dict[str, Any]]:
    """Return the data, and the dataset's options with their defaults."""
    given = dict(named.get("dataset_options", {}))
    if isinstance(given.get("path"), str) and expand_user(given["path"]).exists():
        given["path"] = str(expand_user(given["path"]).absolute())  # a repeated run may start elsewhere
    if isinstance(factory, (Dataset, Federation)):
        if given:
            raise SettingError(f"dataset_options cannot be set: {factory.name!r} is a dataset already, got {given!r}")
        return factory, {}
    if not callable(factory):
        raise SettingError(
            "dataset must be a name, a Dataset, a Federation or a function, got an object of type "
            f"{type(factory).__name__}{_hint(factory)}"
        )
    name = named.get("dataset", Settings.dataset)
    known = Settings.checked({key: named[key] for key in ("data_dir", "seed", "data_seed") if key in named})
    place = str(expand_user(known.data_dir).absolute()) if known.data_dir else ""
    ready = dataset_arguments(factory, name, data_dir=place, seed=known.partition_seed, given=given)
    defaults = {key: value for key, value in storable_options(factory).items() if key not in RESERVED}
    return load(factory, name, ready), {**defaults, **check_options("dataset", name, factory, given)}


def _hint(data: object) -> str:
    """Return how to make a dataset of what a user has."""
    if isinstance(data, (tuple, list, np.ndarray, torch.Tensor)):
        return ARRAYS
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return ": make a dataset of a PyTorch dataset with fedcat.Dataset.from_torch(dataset)"
    return ""


def over_defaults(data: Dataset, named: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings over the dataset's defaults; `explicit` are those of the file and above."""
    complete = overlay(as_layer(data.defaults), named)
    if complete.get("partition") == NATURAL and data.owner is not None and "clients" not in named:
        least = complete.get("min_samples", Settings.min_samples)
        owners = data.owners_with(least) if isinstance(least, int) else ()
        complete["clients"] = len(owners) or int(data.owner.max()) + 1
    if complete.get("partition") == GIVEN:
        raise SettingError(f"partition {GIVEN!r} needs a federation that is divided already: {data.name!r} is not")
    asked = list(explicit.get("partition_options", {}))
    if asked and complete.get("partition") == NATURAL and "partition" not in explicit:
        raise SettingError(
            f"{asked[0]} has no effect on {data.name!r}, whose clients are the owners of its samples: "
            "choose a partition that takes it, such as dirichlet, or leave it out"
        )
    return complete


def of_federation(data: Federation, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for data that the user divided."""
    seeded = named.get("client_test") or named.get("validation")  # the data's seed draws what is held out
    dividing = ("partition", "min_samples", *(() if seeded else ("data_seed",)))
    fixed = [*named.get("partition_options", {}), *(name for name in dividing if name in named)]
    if fixed and named.get("partition") != GIVEN:
        raise SettingError(f"{fixed[0]} cannot be set: the federation {data.name!r} is already divided over clients")
    if named.get("clients", data.clients) != data.clients:
        raise SettingError(f"clients must be {data.clients} as in the federation, got {named['clients']}")
    return {"min_samples": int(data.sizes.min()), **named, "clients": data.clients, "partition": GIVEN}


def left_out(data: Dataset, settings: Settings) -> str:
    """Return a note on the owners that hold too few samples to take part, or an empty string."""
    if settings.partition != NATURAL or data.owner is None:
        return ""
    few = int(data.owner.max()) + 1 - settings.clients
    return f"left out: {plural(few, 'owner')} with fewer than min_samples = {settings.min_samples}" if few else ""


def stale_partition_options(*layers: Mapping[str, Any]) -> set[str]:
    """Return the partition's options that only layers below the one that names the partition set."""
    current: set[str] = set()
    for layer in layers:
        current |= layer.get("partition_options", {}).keys()
        if "partition" in layer:
            break
    return set(layers[-1].get("partition_options", {})) - current


def partition_options(name: str, partition: Any, given: Mapping[str, Any], stale: set[str]) -> dict[str, Any]:
    """Return all options of a partition; `stale` ones, and those that only other partitions take, are left out."""
    taken = options(partition)
    for option in RESERVED_PARTITION & taken.keys():
        raise SettingError(f"partition {name!r} must not have an option called {option!r}, which is a setting")
    foreign = {option: value for option, value in given.items() if option not in taken}
    known = check_registered(foreign)
    kept = {option: value for option, value in given.items() if option not in foreign or option not in known | stale}
    return {**storable_options(partition), **check_options("partition", name, partition, kept, prefix="")}


def check_registered(given: Mapping[str, Any]) -> set[str]:
    """Check options that registered partitions take, and return their names."""
    known: set[str] = set()
    for part, _ in PARTITIONS:
        factory = PARTITIONS.get(part)
        theirs = {option: value for option, value in given.items() if option in options(factory)}
        known |= check_options("partition", part, factory, theirs, prefix="").keys()
    return known
