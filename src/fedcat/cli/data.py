"""The data commands: list, get, show."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from fedcat.cli.options import Command, DatasetOptions, Group, PartitionOptions, Trust, assignments, with_settings
from fedcat.cli.tables import describe_partition, say, show_datasets, show_notes, show_partition, show_parts
from fedcat.config.layers import SettingsFile
from fedcat.config.settings import Settings
from fedcat.core.errors import SettingError, unknown_name
from fedcat.data.dataset import DATASETS
from fedcat.data.federation import Federation
from fedcat.data.files import locations
from fedcat.data.files.catalog import SOURCES
from fedcat.data.partitions import PARTITIONS
from fedcat.data.skew import Skew
from fedcat.report.files import check_plot
from fedcat.report.partition_plot import draw_partition
from fedcat.runs.build import Builder

app = typer.Typer(cls=Group, help="List, download and inspect data.", no_args_is_help=True, rich_markup_mode="markdown")
out = Console(highlight=False, markup=False)

DATA_SETTINGS = (
    *("preset", "data_dir", "partition", "alpha", "shards", "min_samples", "partition_tries", "data_seed"),
    *("clients", "seed"),
)
DataDir = Annotated[
    str,
    typer.Option("--data-dir", metavar="DIRECTORY", help="directory to search first, before FEDCAT_DATA and the cache"),
]


@app.command("list", cls=Command)
def list_datasets(data_dir: DataDir = "") -> None:
    """List the datasets, where their files were found, their options, and the partitions."""
    found = {}
    for name, source in SOURCES.items():
        here = source.find(data_dir)
        found[name] = "not found, will be downloaded" if here is None else _location(here[1])
    show_datasets(out, found)
    show_parts(out, PARTITIONS)


@app.command(cls=Command)
def get(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="mnist, cifar10, cifar100, femnist")],
    data_dir: DataDir = "",
) -> None:
    """Download datasets that are not found, verify them, and cache a decoded copy."""
    for name in names:
        if name not in SOURCES:
            if name in DATASETS:
                raise SettingError(f"dataset {name!r} cannot be downloaded; available: {', '.join(SOURCES)}")
            raise unknown_name("dataset to download", name, SOURCES)
    for directory in locations.search_paths(data_dir, must_exist=False):
        _make(directory)
    for name in names:
        content = SOURCES[name].content(data_dir)
        layout, files = SOURCES[name].get(data_dir)
        counts = ", ".join(f"{len(content.arrays[f'{part}_y']):,} {part}" for part in ("train", "test"))
        how = "verified" if layout.verified else "read (no published checksum)"
        say(out, f"{name}: {counts} samples, {how}, from {_location(files)}")


@app.command(cls=Command)
@with_settings(only=DATA_SETTINGS)
def show(
    given: Mapping[str, Any],
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="the dataset, module:function, or a settings file that ends in .toml")
    ],
    dataset_option: DatasetOptions = None,
    partition_option: PartitionOptions = None,
    rows: Annotated[int, typer.Option(metavar="NUMBER", help="how many clients to list; 0 for all")] = 20,
    plot: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="plot file, .png, .svg or .pdf [runs/DATASET-PARTITION-....png]"),
    ] = None,
    no_plot: Annotated[bool, typer.Option("--no-plot", metavar=" ", help="only print")] = False,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="also write samples by client and class to a CSV file")
    ] = None,
    trust: Trust = False,
) -> None:
    """Show how a dataset is divided over clients: sizes, classes, skew, and a plot."""
    if plot is not None:
        check_plot(plot)
    if table is not None and not table.parent.is_dir():
        raise SettingError(f"csv file {str(table)!r} cannot be written: no directory {str(table.parent)!r}")
    if rows < 0:
        raise SettingError(f"rows must be at least 0, got {rows}")
    options = assignments("dataset-option", dataset_option)
    partition_options = assignments("partition-option", partition_option)
    tables = {"dataset_options": options, "partition_options": partition_options}
    parts = ("method", "net", "loss", "optimizer", "selector", "aggregator", "server_optimizer", "metrics", "augment")
    not_needed = dict.fromkeys(parts, "")
    file = SettingsFile.read(name if name.endswith(".toml") else None, trust, {**not_needed, **given})
    named = {} if file.name else {"dataset": name}
    chosen = {**given, **named, **{table: found for table, found in tables.items() if found}}
    settings, federation, notes = Builder().divide(chosen, file)
    show_notes(out, notes)
    if not federation.classes:
        sizes = federation.sizes
        spread = f"{sizes.min():,} to {sizes.max():,}, median {np.median(sizes):,.0f}"
        say(out, f"{federation}; samples per client: {spread}")
        return
    show_partition(out, federation, Skew.of(federation), rows or federation.clients)
    if not no_plot:
        target = plot or Path("runs") / _plot_name(settings, federation, options)
        _make(target.parent)
        title = f"{federation}\npartition {describe_partition(settings)}, seed {settings.partition_seed}"
        draw_partition(federation, target, title)
        say(out, f"plot: {target}")
    if table is not None:
        _write_csv(federation, table)
        say(out, f"table: {table}")


def _plot_name(settings: Settings, federation: Federation, options: Mapping[str, Any]) -> str:
    """Return a file name that distinguishes partitions of one dataset."""
    chosen = [f"{name}-{value}" for name, value in options.items() if name not in ("path", "owners")]
    values = [f"{value:g}" if isinstance(value, float) else str(value) for value in settings.partition_options.values()]
    seed = f"seed{settings.partition_seed}"
    words = [federation.name, *chosen, settings.partition, *values, str(federation.clients), seed]
    return re.sub(r"[^\w.=-]+", "-", "-".join(words)) + ".png"


def _write_csv(federation: Federation, path: Path) -> None:
    names = federation.class_names or [str(label) for label in range(federation.classes)]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["client", "name", "samples", *names])
            for client, counts in enumerate(federation.class_counts):
                known = federation.client_names[client] if federation.client_names else ""
                writer.writerow([client, known, federation.sizes[client], *counts])
    except OSError as error:
        raise SettingError(f"csv file {str(path)!r} cannot be written: {error.strerror}") from error


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"directory {str(directory)!r} cannot be created: {error.strerror}") from error


def _location(files: Mapping[str, Path]) -> str:
    """Return the directory of the files, or the path of a single file."""
    paths = list(files.values())
    return str(paths[0]) if len(paths) == 1 else os.path.commonpath([path.parent for path in paths])
