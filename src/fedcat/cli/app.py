"""The commands: run, compare, and the lists."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from fedcat.cli import bench, data, plot, reproduce
from fedcat.cli.options import (
    AggregatorOptions,
    Command,
    DatasetOptions,
    Group,
    MethodOptions,
    OptimizerOptions,
    PartitionOptions,
    ServerOptions,
    Trust,
    assignments,
    method_tables,
    with_settings,
)
from fedcat.cli.tables import (
    describe,
    say,
    show_comparison,
    show_fields,
    show_notes,
    show_parts,
    show_registry,
    show_result,
)
from fedcat.config.layers import RENAMED, SettingsFile
from fedcat.config.presets import preset, preset_datasets, preset_names
from fedcat.config.toml import toml
from fedcat.core.errors import SettingError
from fedcat.core.options import Typed, options
from fedcat.core.text import plural
from fedcat.data.augment import AUGMENTATIONS
from fedcat.data.dataset import DATASETS
from fedcat.methods import METHODS
from fedcat.methods.aggregation import AGGREGATORS
from fedcat.methods.selection import SELECTORS
from fedcat.methods.server_optimizer import SERVER_OPTIMIZERS
from fedcat.models.losses import LOSSES
from fedcat.models.metrics import METRICS
from fedcat.models.nets import NETS
from fedcat.protocol.local_optimizer import OPTIMIZERS
from fedcat.runs.build import Builder
from fedcat.runs.comparison import Comparison
from fedcat.runs.folder import check_free, reserve
from fedcat.runs.progress import ProgressDisplay
from fedcat.runs.result import Result
from fedcat.runs.runner import execute
from fedcat.version import __version__

app = typer.Typer(
    cls=Group,
    help="Federated learning on skewed data: FedCat and its baselines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(data.app, name="data")
app.command(cls=Command)(bench.bench)
app.command(cls=Command)(plot.plot)
app.add_typer(reproduce.app, name="reproduce")
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)

File = Annotated[Path | None, typer.Argument(help="a TOML settings file; flags override it", show_default=False)]


def _version(asked: bool) -> None:
    if asked:
        out.print(f"fedcat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar=" ", help="print the version")
    ] = False,
) -> None:
    pass


@app.command(cls=Command)
@with_settings()
def run(
    given: Mapping[str, Any],
    file: File = None,
    option: MethodOptions = None,
    dataset_option: DatasetOptions = None,
    partition_option: PartitionOptions = None,
    optimizer_option: OptimizerOptions = None,
    aggregator_option: AggregatorOptions = None,
    server_option: ServerOptions = None,
    out_folder: Annotated[
        Path | None,
        typer.Option("--out", help="directory of the run [runs/METHOD-DATASET-1, ...]", show_default=False),
    ] = None,
    trust: Trust = False,
) -> None:
    """Run one method and write its results to a directory.

    Defaults are in brackets. A dataset may have its own, see `fedcat data list`; those of digits are 50 clients, 100
    rounds, batch size 10, lr 0.05 and min-samples 1.
    """
    if out_folder is not None:
        check_free(out_folder)
    tables = _tables(option, dataset_option, partition_option, optimizer_option, aggregator_option, server_option)
    with _setting_up():
        built = Builder().build({**given, **tables}, SettingsFile.read(file, trust, given))
    settings, decisions = built.settings, built.decisions
    show_notes(err, built.early_notes)
    say(out, f"{settings.method} on {built.federation}")
    say(out, describe([settings]))
    say(out, f"engine {decisions.engine} on {decisions.device}: {decisions.reason}")
    progress = ProgressDisplay(out, [built], [settings.method])
    with _folder(out_folder, f"{settings.method}-{settings.dataset}") as path:
        try:
            result = execute([built], [path], [progress])[0]
        except KeyboardInterrupt:
            _interrupted(progress, path)
    show_notes(err, built.late_notes)
    show_result(out, result, built.metrics)
    _exit([result])


@app.command(cls=Command)
@with_settings(without=("method", "seed"))
def compare(
    given: Mapping[str, Any],
    file: File = None,
    methods: Annotated[str, typer.Option(metavar="A,B,...", help="methods to compare")] = "fedavg,fedcat",
    seeds: Annotated[str, typer.Option(metavar="NUMBER", help="number of seeds per method")] = "3",
    seed: Annotated[str | None, typer.Option(metavar="NUMBER", help="first seed [0]")] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A,B,...", help="values of a setting or option to try; repeatable"),
    ] = None,
    option: MethodOptions = None,
    dataset_option: DatasetOptions = None,
    partition_option: PartitionOptions = None,
    optimizer_option: OptimizerOptions = None,
    aggregator_option: AggregatorOptions = None,
    server_option: ServerOptions = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="directory of the comparison [runs/compare-DATASET-1, ...]")
    ] = None,
    trust: Trust = False,
) -> None:
    """Run several methods over several seeds side by side.

    Defaults are in brackets. A dataset may have its own, see `fedcat data list`; those of digits are 50 clients, 100
    rounds, batch size 10, lr 0.05 and min-samples 1.
    """
    names = [name.strip() for name in methods.split(",") if name.strip()]
    texts = assignments("sweep", sweep, "NAME=A,B,...")
    swept = {name: [Typed(value.strip()) for value in text.split(",")] for name, text in texts.items()}
    settings = {
        **given,
        **_tables(option, dataset_option, partition_option, optimizer_option, aggregator_option, server_option),
    }
    if seed is not None:
        settings["seed"] = _integer("seed", seed)
    with _setting_up():
        comparison = Comparison(names, _integer("seeds", seeds), swept, out_folder, file, trust, **settings)
    runs = comparison.runs
    show_notes(err, comparison.notes)
    federations = {str(one.federation): one.federation.name for one in runs}
    on = next(iter(federations)) if len(federations) == 1 else ", ".join(dict.fromkeys(federations.values()))
    say(out, f"{plural(len(runs), 'run')} side by side on {on}")
    say(out, describe([one.settings for one in runs]))
    labels = [label for label in comparison.labels for _ in comparison.seeds]
    progress = ProgressDisplay(out, runs, labels)
    with _folder(out_folder, f"compare-{runs[0].settings.dataset}") as path:
        comparison.out = path
        try:
            found = comparison.run([progress])
        except KeyboardInterrupt:
            _interrupted(progress, path)
    show_notes(err, comparison.late_notes)
    show_comparison(out, found, runs[0].metrics)
    total = sum(one.seconds for one in runs)
    show_fields(out, {"time": f"{total:.1f} s for {plural(len(runs), 'run')}", "directory": str(path)})
    _exit([result for variant in found for result in variant.results], comparison.unwritten)


@app.command("methods", cls=Command)
def list_methods() -> None:
    """List the methods and their options, the selectors, the aggregators and the server optimizers."""
    show_parts(out, METHODS)
    out.print()
    show_registry(out, SELECTORS)
    out.print()
    show_parts(out, AGGREGATORS)
    out.print()
    show_parts(out, SERVER_OPTIMIZERS)


@app.command("training", cls=Command)
def list_training() -> None:
    """List what clients train with: the losses, the local optimizers and their options, and the augmentations."""
    show_registry(out, LOSSES)
    out.print()
    show_parts(out, OPTIMIZERS)
    out.print()
    show_registry(out, AUGMENTATIONS)


@app.command("nets", cls=Command)
def list_nets() -> None:
    """List the nets."""
    show_registry(out, NETS)


@app.command("metrics", cls=Command)
def list_metrics() -> None:
    """List the metrics."""
    show_registry(out, METRICS)


@app.command("presets", cls=Command)
def show_presets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="lab or paper; default: both")] = None,
    dataset: Annotated[
        str | None, typer.Argument(metavar="[DATASET]", help="one of its datasets; default: all")
    ] = None,
) -> None:
    """Print presets as TOML; `fedcat presets lab cifar10 > mine.toml` is a settings file to start from."""
    texts = [
        f"# fedcat presets {one} {each}\n{toml(preset(one, each))}"
        for one in ([name] if name else preset_names())
        for each in ([dataset] if dataset else preset_datasets(one))
    ]
    out.print("\n".join(texts), end="", markup=False, soft_wrap=True)


@contextmanager
def _setting_up() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted before the first round; nothing was written")
        raise typer.Exit(130) from None


def _tables(*texts: list[str] | None) -> dict[str, Any]:
    """Return the options that were typed for the method and for the parts that have a table of options."""
    of_method, *others = texts
    kinds = ("dataset", "partition", "optimizer", "aggregator", "server")
    found = {f"{k}_options": assignments(f"{k}-option", typed) for k, typed in zip(kinds, others, strict=True)}
    return {**method_tables(of_method), **{name: table for name, table in found.items() if table}}


def _integer(name: str, text: str) -> int:
    value = Typed(text).read(int)
    if type(value) is not int:
        raise SettingError(f"{name} must be an integer, got {text!r}")
    return value


@contextmanager
def _folder(chosen: Path | None, stem: str) -> Iterator[Path]:
    """Yield the directory that the user chose, or reserve a new one, which is removed again if it stays empty."""
    path = chosen or reserve(stem)
    try:
        yield path
    finally:
        if chosen is None and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _exit(results: Sequence[Result], unwritten: str = "") -> None:
    """End with exit code 1 if a run failed or trained nothing, or if something could not be written."""
    if unwritten or any(result.status in ("untrained", "failed") or result.unwritten for result in results):
        raise typer.Exit(1)


def _interrupted(progress: ProgressDisplay, path: Path) -> NoReturn:
    say(
        err,
        f"interrupted after {plural(progress.done, 'round')}; kept in {path}: the settings, the history and traffic of "
        "those rounds, and the model as it was last aggregated",
    )
    raise typer.Exit(130)


def main() -> None:
    """Run the command line; a user's mistake ends with one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name that the terminal cannot show must not stop a run
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
        if not message():  # the help was shown for lack of a command
            sys.exit(2)
        _fail(_flag_hint(error) or message())
    sys.exit(code or 0)


def _flag_hint(error: Exception) -> str:
    """Return what to type instead of an unknown flag, or an empty text if there is nothing to say."""
    flag = str(getattr(error, "option_name", ""))
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    if name in RENAMED:
        return f"option {flag} is now called --{RENAMED[name].replace('_', '-')}"
    for kind, letter, registry in (("method", "o", METHODS), ("dataset", "d", DATASETS)):
        takers = [part for part, _ in registry if name in options(registry.get(part))]
        if takers:
            return f"no such option: {flag}; {name} is an option of the {kind} {takers[0]}: use -{letter} {name}=VALUE"
    return ""


def _show_warning(others: Callable[..., None], message: Warning | str, kind: Any, file: str, *where: Any) -> None:
    """Print fedcat's own warnings as lines without source locations, and others as they are."""
    if Path(file).is_relative_to(Path(__file__).parents[1]):
        say(err, f"note: {message}")
    else:
        others(message, kind, file, *where)


def _fail(message: str) -> NoReturn:
    say(err, f"error: {message}")
    sys.exit(2)
