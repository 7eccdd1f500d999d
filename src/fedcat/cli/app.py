"""The command line."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from fedcat.cli import bench, data
from fedcat.cli.options import assignments, with_settings
from fedcat.cli.progress import Watcher
from fedcat.cli.settings import settings_of, typed_sweep, with_options, without_effect
from fedcat.cli.tables import (
    described,
    say,
    show_comparison,
    show_fields,
    show_notes,
    show_parts,
    show_registry,
    show_result,
)
from fedcat.config.presets import PRESET_DATASETS, PRESETS, preset
from fedcat.config.settings import Settings, parse, toml
from fedcat.core.errors import SettingError, unknown
from fedcat.methods import METHODS
from fedcat.methods.selection.base import SELECTORS
from fedcat.methods.server_optimizer import SERVER_STEPS
from fedcat.models.nets import NETS
from fedcat.runs.build import Workshop
from fedcat.runs.comparison import Comparison
from fedcat.runs.folder import check_free
from fedcat.runs.runner import execute
from fedcat.version import __version__

app = typer.Typer(
    help="Federated learning on skewed data: FedCat and its rivals.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(data.app, name="data")
app.command()(bench.bench)
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)

File = Annotated[Path | None, typer.Argument(help="a TOML file of settings; options override it", show_default=False)]
OptionTexts = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="an option of the method, such as epsilon=0.5"),
]
DatasetOptionTexts = Annotated[
    list[str] | None,
    typer.Option("--dataset-option", "-d", metavar="NAME=VALUE", help="an option of the dataset, such as labels=fine"),
]


def _version(asked: bool) -> None:
    if asked:
        out.print(f"fedcat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    pass


@app.command()
@with_settings()
def run(
    given: Mapping[str, Any],
    file: File = None,
    option: OptionTexts = None,
    dataset_option: DatasetOptionTexts = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="the run's folder [runs/METHOD-DATASET-1 and so on]", show_default=False),
    ] = None,
) -> None:
    """Run one method and write its folder.

    Defaults stand in brackets; a dataset has its own for some of them, see `fedcat data list`.
    """
    settings, notes = settings_of(file, given, dataset_option or [])
    show_notes(err, notes)
    method = settings.get("method", "fedcat")
    settings["options"] = with_options(settings.get("options", {}), [method], option or [])
    if out_folder is not None:
        check_free(out_folder)
    with _setting_up():
        prepared = Workshop().prepare(settings)
    path = out_folder or _free_folder(f"{method}-{prepared.settings.dataset}")
    check_free(path)
    show_notes(err, [note for note in prepared.notes if prepared.engine_why not in note])
    show_notes(err, without_effect(given, [prepared.settings]))
    name, why = prepared.simulation.engine.name, prepared.engine_why
    say(out, f"{prepared.settings.method} on {prepared.federation}")
    say(out, described([prepared.settings]))
    say(out, f"engine {name} on {prepared.simulation.task.layout.device}: {why}")
    watcher = Watcher(out, [prepared.settings.method], [prepared.settings.rounds])
    try:
        with watcher:
            result = execute([prepared], [path], watcher)[0]
    except KeyboardInterrupt:
        _interrupted(watcher, path)
    show_notes(err, [note for note in result.summary["notes"] if note not in prepared.notes])
    show_result(out, result)


@app.command()
@with_settings(without=("method", "seed"))
def compare(
    given: Mapping[str, Any],
    file: File = None,
    methods: Annotated[str, typer.Option(metavar="A,B,...", help="the methods to compare")] = "fedavg,fedcat",
    seeds: Annotated[str, typer.Option(metavar="NUMBER", help="how many seeds each is run with")] = "3",
    seed: Annotated[str | None, typer.Option(metavar="NUMBER", help="the first seed [0]")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A,B,...", help="values of a setting or option to go through; may be repeated"),
    ] = None,
    option: OptionTexts = None,
    dataset_option: DatasetOptionTexts = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="the comparison's folder [runs/compare-DATASET-1 and so on]")
    ] = None,
) -> None:
    """Run several methods over several seeds side by side in one engine.

    Defaults stand in brackets; a dataset has its own for some of them, see `fedcat data list`.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    texts = assignments("sweep", sweep or [], "NAME=A,B,...")
    swept = {name: [parse(name, value.strip()) for value in text.split(",")] for name, text in texts.items()}
    settings, notes = settings_of(file, given, dataset_option or [], swept)
    show_notes(err, notes)
    swept = typed_sweep(texts, swept, names, settings)
    if seed is not None:
        settings["seed"] = _whole("seed", seed)
    settings.pop("method", None)
    settings["options"] = with_options(settings.get("options", {}), names, option or [])
    named = {*assignments("dataset-option", dataset_option or []), *assignments("option", option or [])}
    for name in swept.keys() & {*given, *named}:
        raise SettingError(f"{name} must be set or swept, got both")
    if "fraction" in swept and "per_round" not in given:
        settings.pop("per_round", None)
    known = {field.name for field in fields(Settings)}
    for name in settings.keys() - known:
        raise unknown("setting", name, known)
    path = out_folder or _free_folder(f"compare-{settings.get('dataset', 'digits')}")
    with _setting_up():
        comparison = Comparison(names, _whole("seeds", seeds), swept, path, **settings)
    show_notes(err, comparison.notes)
    federations = {str(ready.federation): ready.federation.name for ready in comparison.prepared}
    on = next(iter(federations)) if len(federations) == 1 else ", ".join(dict.fromkeys(federations.values()))
    say(out, f"{len(comparison.prepared)} runs side by side on {on}")
    every = [ready.settings for ready in comparison.prepared]
    show_notes(err, without_effect({*given, *swept}, every))
    say(out, described(every))
    labels = [label for label in comparison.labels for _ in comparison.seeds]
    rounds = [ready.settings.rounds for ready in comparison.prepared]
    watcher = Watcher(out, labels, rounds)
    try:
        with watcher:
            lines = comparison.run(watcher)
    except KeyboardInterrupt:
        _interrupted(watcher, path)
    found = [note for line in lines for result in line.results for note in result.summary["notes"]]
    show_notes(err, [note for note in found if note not in comparison.notes])
    show_comparison(out, lines)
    total = sum(ready.simulation.seconds for ready in comparison.prepared)
    show_fields(out, {"time": f"{total:.1f} s for all {len(comparison.prepared)} runs", "folder": str(path)})


@app.command("methods")
def list_methods() -> None:
    """List the methods, their options, the selectors and the server's steps."""
    show_parts(out, METHODS)
    show_registry(out, SELECTORS)
    show_parts(out, SERVER_STEPS)


@app.command("nets")
def list_nets() -> None:
    """List the nets."""
    show_registry(out, NETS)


@app.command("presets")
def show_presets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="lab or paper; by default both")] = None,
    dataset: Annotated[
        str | None, typer.Argument(metavar="[DATASET]", help="one of its datasets; by default all")
    ] = None,
) -> None:
    """Print presets as TOML; `fedcat presets lab cifar10 > mine.toml` is a settings file to start from."""
    names, datasets = [name] if name else PRESETS, [dataset] if dataset else PRESET_DATASETS
    texts = {f"{which} {data}": toml(preset(which, data)) for which in names for data in datasets}
    headed = [f"# fedcat presets {title}\n{text}" for title, text in texts.items()]
    out.print("\n".join(headed), end="", markup=False, soft_wrap=True)


@contextmanager
def _setting_up() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted before the first round; nothing was written")
        raise typer.Exit(130) from None


def _whole(name: str, text: str) -> int:
    value = parse(name, text)
    if type(value) is not int:
        raise SettingError(f"{name} must be a whole number, got {text!r}")
    return value


def _free_folder(stem: str) -> Path:
    """Return the first of runs/STEM-1, runs/STEM-2, ... that is not there."""
    stem = stem.replace(":", "-").replace("/", "-")
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return Path("runs") / f"{stem}-{number}"


def _interrupted(watcher: Watcher, path: Path) -> NoReturn:
    say(
        err,
        f"interrupted after {watcher.done} rounds; kept in {path}: the settings, the history and traffic of those "
        "rounds, and the model as it was last aggregated",
    )
    raise typer.Exit(130)


def main() -> None:
    """Run the command line; a user's mistake ends with one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name that the terminal cannot show is no reason to stop
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    try:
        code = app(standalone_mode=False)
    except SettingError as error:
        _fail(str(error))
    except (KeyboardInterrupt, typer.Abort):
        err.print("interrupted")
        sys.exit(130)
    except Exception as error:
        message = getattr(error, "format_message", None)  # the argument parser's own errors
        if message is None:
            raise
        if not message():  # the help was shown for want of a command
            sys.exit(2)
        _fail(message())
    sys.exit(code or 0)


def _show_warning(others: Callable[..., None], message: Warning | str, kind: Any, file: str, *where: Any) -> None:
    """Print fedcat's own warnings as lines without places in the code, and others' as they are."""
    if Path(file).is_relative_to(Path(__file__).parent):
        say(err, f"note: {message}")
    else:
        others(message, kind, file, *where)


def _fail(message: str) -> NoReturn:
    say(err, f"error: {message}")
    sys.exit(2)
