"""The command line."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from fedcat.cli_options import assignments, with_settings
from fedcat.comparison import Comparison, Line
from fedcat.errors import SettingError, unknown
from fedcat.execute import Result, execute
from fedcat.experiment import parse, read_toml
from fedcat.federation.datasets import DATASETS
from fedcat.federation.partition import PARTITIONS
from fedcat.methods import METHODS, options
from fedcat.models.nets import NETS
from fedcat.progress import Watcher
from fedcat.registry import Registry
from fedcat.runs.folder import check_free
from fedcat.selection import SELECTORS
from fedcat.version import __version__
from fedcat.workshop import Workshop

app = typer.Typer(
    help="Federated learning on skewed data: FedCat and its rivals.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

File = Annotated[Path | None, typer.Argument(help="a TOML file of settings; options override it", show_default=False)]
OptionTexts = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="NAME=VALUE", help="an option of the method, such as epsilon=0.5"),
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
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="the run's folder [runs/METHOD-DATASET-1 and so on]", show_default=False),
    ] = None,
) -> None:
    """Run one method and write its folder."""
    settings = {**(read_toml(file) if file else {}), **given}
    method = settings.get("method", "fedcat")
    settings["options"] = _with_options(settings.get("options", {}), [method], option or [])
    prepared = Workshop().prepare(settings)
    path = out_folder or _free_folder(f"{method}-{prepared.settings.dataset}")
    check_free(path)
    _notes(prepared.notes)
    name, why = prepared.simulation.engine.name, prepared.engine_why
    out.print(f"{prepared.settings.method} on {prepared.federation!r}", markup=False, soft_wrap=True)
    out.print(f"engine {name} on {prepared.simulation.task.layout.device}: {why}", markup=False, soft_wrap=True)
    with Watcher(out, [prepared.settings.method], [prepared.settings.rounds]) as watcher:
        try:
            result = execute([prepared], [path], watcher)[0]
        except KeyboardInterrupt:
            _interrupted(watcher, path)
    _show(result)


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
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="the comparison's folder [runs/compare-DATASET-1 and so on]")
    ] = None,
) -> None:
    """Run several methods over several seeds side by side in one engine."""
    names = [name.strip() for name in methods.split(",") if name.strip()]
    settings = {**(read_toml(file) if file else {}), **given}
    if seed is not None:
        settings["seed"] = _whole("seed", seed)
    settings.pop("method", None)
    settings["options"] = _with_options(settings.get("options", {}), names, option or [])
    swept = {k: [parse(k, v.strip()) for v in t.split(",")] for k, t in assignments("sweep", sweep or []).items()}
    path = out_folder or _free_folder(f"compare-{settings.get('dataset', 'digits')}")
    comparison = Comparison(names, _whole("seeds", seeds), swept, path, **settings)
    _notes(comparison.notes)
    first = comparison.prepared[0]
    out.print(f"{len(comparison.prepared)} runs side by side on {first.federation!r}", markup=False, soft_wrap=True)
    labels = [label for label in comparison.labels for _ in comparison.seeds]
    rounds = [ready.settings.rounds for ready in comparison.prepared]
    with Watcher(out, labels, rounds) as watcher:
        try:
            lines = comparison.run(watcher)
        except KeyboardInterrupt:
            _interrupted(watcher, path)
    _show_lines(lines, path)


@app.command("methods")
def list_methods() -> None:
    """List the methods, their options, and the selectors."""
    table = _listing("method", METHODS, "options")
    for name, note in METHODS:
        words = ", ".join(f"{n}={_lower(v)}" for n, v in options(METHODS.get(name)).items())
        table.add_row(name, note, words)
    out.print(table)
    out.print(_listed("selector", SELECTORS))


@app.command("datasets")
def list_datasets() -> None:
    """List the datasets, the partitions and the nets."""
    out.print(_listed("dataset", DATASETS))
    out.print(_listed("partition", PARTITIONS))
    out.print(_listed("net", NETS))


def _listing(kind: str, registry: Registry[Any], *more: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify="left")
    for heading in (kind, "what it is", *more):
        table.add_column(heading, overflow="fold", no_wrap=heading == kind)
    return table


def _listed(kind: str, registry: Registry[Any]) -> Table:
    table = _listing(kind, registry)
    for name, note in registry:
        table.add_row(name, note)
    return table


def _lower(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(name: str, text: str) -> int:
    value = parse(name, text)
    if type(value) is not int:
        raise SettingError(f"{name} must be a whole number, got {text!r}")
    return value


def _with_options(tables: Mapping[str, Any], methods: Sequence[str], texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the methods' options with those of the command line, which go to every method that has them."""
    if not isinstance(tables, Mapping):
        raise SettingError(f"options must be a table of methods' options, got {tables!r}")
    merged = {name: dict(table) if isinstance(table, Mapping) else table for name, table in tables.items()}
    known = {name: options(METHODS.get(name)) for name in methods}
    for name, text in assignments("option", list(texts)).items():
        takers = [method for method in methods if name in known[method]]
        if not takers:
            every = {option for found in known.values() for option in found}
            raise (
                unknown(f"option of {', '.join(methods)}", name, every)
                if every
                else SettingError(f"method {', '.join(methods)} has no options, got {name!r}")
            )
        for method in takers:
            merged.setdefault(method, {})[name] = parse(name, text)
    return merged


def _free_folder(stem: str) -> Path:
    """Return the first of runs/STEM-1, runs/STEM-2, ... that is not there."""
    stem = stem.replace(":", "-").replace("/", "-")
    number = 1
    while (Path("runs") / f"{stem}-{number}").exists():
        number += 1
    return Path("runs") / f"{stem}-{number}"


def _notes(notes: Sequence[str]) -> None:
    for note in notes:
        err.print(f"note: {note}", markup=False, soft_wrap=True)


def _interrupted(watcher: Watcher, path: Path) -> NoReturn:
    err.print(
        f"interrupted after {watcher.done} rounds; kept in {path}: the settings, the history and traffic of those "
        "rounds, and the model as it was last aggregated",
        markup=False,
        soft_wrap=True,
    )
    raise typer.Exit(130)


def _show(result: Result) -> None:
    _notes([note for note in result.summary["notes"] if "hops did not arrive" in note])
    traffic = result.summary["bytes"]
    rows = {
        "accuracy": f"{100 * result.accuracy:.2f} % (best {100 * result.best:.2f} %, "
        f"mean of the last five evaluations {100 * result.last_five:.2f} %)",
        "traffic": f"{_megabytes(traffic['down'])} down, {_megabytes(traffic['up'])} up",
        "time": f"{result.summary['seconds']:.1f} s",
        "folder": str(result.folder),
    }
    for name, value in rows.items():
        out.print(f"{name:10}{value}", markup=False, soft_wrap=True)


def _show_lines(lines: Sequence[Line], path: Path) -> None:
    _notes(list(dict.fromkeys(n for line in lines for r in line.results for n in r.summary["notes"] if "arrive" in n)))
    seeds = len(lines[0].results)
    table = Table(title=f"test accuracy in %, mean ± standard deviation over {seeds} seeds", title_justify="left")
    table.add_column("run")
    for heading in ("best", "last five", "traffic", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for line in lines:
        scores = ["{:.2f} ± {:.2f}".format(*(100 * v for v in line.mean(figure))) for figure in ("best", "last_five")]
        table.add_row(line.label, *scores, _megabytes(line.traffic), f"{line.seconds:.1f} s")
    out.print(table)
    out.print(
        "last five: mean of the last five evaluations; traffic and time: of one run, its share",
        soft_wrap=True,
    )
    out.print(f"folder    {path}", markup=False, soft_wrap=True)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def main() -> None:
    """Run the command line; a user's mistake ends with one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except SettingError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        err.print("interrupted before the first round; nothing was written")
        sys.exit(130)
    except Exception as error:
        message = getattr(error, "format_message", None)  # the argument parser's own errors
        if message is None:
            raise
        _fail(message())
    sys.exit(code or 0)


def _fail(message: str) -> NoReturn:
    err.print(f"error: {message}", markup=False, soft_wrap=True)
    sys.exit(2)
