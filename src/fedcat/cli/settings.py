"""What a command's options and its settings file come to."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcat.cli.options import assignments, dataset_table, typed
from fedcat.config.presets import covered, flat, uncover
from fedcat.config.settings import Settings, read_toml
from fedcat.core.errors import SettingError, unknown
from fedcat.core.options import options
from fedcat.data.dataset import DATASETS, NATURAL, dataset_options
from fedcat.methods import METHODS


def settings_of(
    file: Path | None,
    given: Mapping[str, Any],
    dataset_texts: list[str],
    swept: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Return a file's settings under those of the command line, and what the user should know of that.

    A fraction that is given there beats a file's K.

    Presets that are named on the command line, or swept there, beat the file as well; datasets that are named or swept
    there leave the options of the file's behind.
    """
    swept, notes = swept or {}, []
    stored = read_toml(file) if file else {}
    if "fraction" in given:
        stored.pop("per_round", None)
    another = given.get("method", stored.get("method")) != stored.get("method")
    if another or "server" in given or "server" in swept:  # another step has other numbers
        left = [n for n in stored if n.startswith("server_") or (n == "server" and another and stored[n])]
        stored = {n: value for n, value in stored.items() if n not in left}
        notes += [f"left behind in {file}: {', '.join(left)}"] if left else []
    datasets = swept.get("dataset", [given.get("dataset", stored.get("dataset", Settings.dataset))])
    if list(datasets) != [stored.get("dataset", Settings.dataset)]:
        stored.pop("dataset_options", None)
    if dataset_texts and stored.get("partition") == NATURAL:  # the owners may be others
        stored = {name: value for name, value in stored.items() if name not in ("devices", "min_samples")}
    for name in [given["preset"]] if given.get("preset") else swept.get("preset", ()):
        cover = covered(name, datasets)
        shown = uncover(stored, cover)
        gone = {n: value for n, value in flat(stored).items() if n not in flat(shown) and n not in (*given, "preset")}
        replaced = [f"{n} {value}" for n, value in gone.items() if value != flat(cover).get(n)]
        if replaced:
            notes.append(f"preset {name!r} replaces what {file} says of: {', '.join(replaced)}")
        stored = shown
    stored["dataset_options"] = dataset_table(datasets, stored.get("dataset_options", {}), dataset_texts)
    return {**stored, **given}, notes


def typed_sweep(
    texts: Mapping[str, str], swept: Mapping[str, list[Any]], methods: Sequence[str], settings: Mapping[str, Any]
) -> dict[str, list[Any]]:
    """Return swept values; those of an option whose default is a text stay as they were typed."""
    datasets = swept.get("dataset", [settings.get("dataset", Settings.dataset)])
    known: dict[str, Any] = {}
    for dataset in datasets:
        known |= dataset_options(DATASETS.get(dataset))
    for method in methods:
        known |= options(METHODS.get(method))
    as_typed = {name: [value.strip() for value in text.split(",")] for name, text in texts.items()}
    return {name: as_typed[name] if isinstance(known.get(name), str) else values for name, values in swept.items()}


def without_effect(given: Collection[str], settings: Sequence[Settings]) -> list[str]:
    """Return what was given though no partition of these settings takes it."""
    partitions = {one.partition for one in settings}
    takers = {"alpha": "dirichlet", "shards": "shards"}
    vain = [name for name in takers if name in given and not any(p.startswith(takers[name]) for p in partitions)]
    return [f"{name} has no effect in the partition {', '.join(sorted(partitions))}" for name in vain]


def with_options(tables: Mapping[str, Any], methods: Sequence[str], texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the methods' options with those of the command line, which go to every method that has them."""
    if not isinstance(tables, Mapping):
        raise SettingError(f"options must be a table of methods' options, got {tables!r}")
    merged = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    known = {name: options(METHODS.get(name)) for name in methods}
    for name, text in assignments("option", list(texts)).items():
        takers = [method for method in methods if name in known[method]]
        if not takers:
            every = {option for found in known.values() for option in found}
            if not every:
                raise SettingError(f"method {', '.join(methods)} has no options, got {name!r}")
            raise unknown(f"option of {', '.join(methods)}", name, every)
        for method in takers:
            merged.setdefault(method, {})[name] = typed(name, text, known[method][name])
    return merged
