"""The commands that run: `fedcat run`, `fedcat compare` and `fedcat resume`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from fedcat.cli.options import (
    AggregatorOptions,
    DatasetOptions,
    MethodOptions,
    OptimizerOptions,
    PartitionOptions,
    ServerOptions,
    Trust,
    assignments,
    method_tables,
    with_settings,
)
from fedcat.cli.tables import describe, say, show_comparison, show_fields, show_notes, show_result
from fedcat.config.layers import SettingsFile
from fedcat.core.errors import SettingError
from fedcat.core.interrupt import Interrupt
from fedcat.core.options import Typed
from fedcat.core.text import plural
from fedcat.runs.build import Builder
from fedcat.runs.checkpoint import FOLDER, LAST
from fedcat.runs.comparison import Comparison
from fedcat.runs.folder import check_free, reserve
from fedcat.runs.progress import LastingConsole, ProgressDisplay
from fedcat.runs.result import Result
from fedcat.runs.resume import FREE, PARTS, Resumed, build_again, holding
from fedcat.runs.run import Run
from fedcat.runs.run_files import COMPARISON
from fedcat.runs.runner import execute, stored_result

out = LastingConsole(highlight=False, markup=False)
err = LastingConsole(stderr=True, highlight=False, markup=False)

File = Annotated[Path | None, typer.Argument(help="a TOML settings file; flags override it", show_default=False)]


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
    with _folder(out_folder, f"{built.settings.method}-{built.settings.dataset}") as path:
        _run(built, path, path)


def _run(built: Run, path: Path, place: Path | Resumed) -> None:
    """Run one run, and show its progress and its result."""
    settings, decisions = built.settings, built.decisions
    show_notes(err, built.early_notes)
    say(out, f"{settings.method} on {built.federation}")
    say(out, describe([settings]))
    say(out, f"engine {decisions.engine} on {decisions.device}: {decisions.reason}")
    if isinstance(place, Resumed):
        say(out, place.begins)
    progress = ProgressDisplay(out, [built], [settings.method])
    try:
        result = execute([built], [place], [progress], hold=path if place is path else None)[0]
    except KeyboardInterrupt as error:
        _interrupted(error, progress, path, [built])
    show_notes(err, built.late_notes)
    show_result(out, result, built.metrics)
    _exit([result])


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
    with _folder(out_folder, f"compare-{comparison.runs[0].settings.dataset}") as path:
        comparison.out = path
        _compare(comparison, path)


def _compare(comparison: Comparison, path: Path) -> None:
    """Run a comparison, and show its progress and its table."""
    runs, left = comparison.runs, comparison.pending
    show_notes(err, comparison.notes)
    federations = {str(one.federation): one.federation.name for one in runs}
    on = next(iter(federations)) if len(federations) == 1 else ", ".join(dict.fromkeys(federations.values()))
    say(out, f"{plural(len(runs), 'run')} side by side on {on}")
    if len(left) < len(runs):
        say(out, f"{plural(len(runs) - len(left), 'run')} of them complete")
    say(out, describe([one.settings for one in runs]))
    for line in comparison.begins:
        say(out, line)
    progress = ProgressDisplay(out, left, [comparison.label_of(run) for run in left]) if left else None
    try:
        found = comparison.run([progress] if progress else [])
    except KeyboardInterrupt as error:
        _interrupted(error, progress, path, runs)
    show_notes(err, comparison.late_notes)
    show_comparison(out, found, runs[0].metrics)
    results = [result for variant in found for result in variant.results]
    total = sum(result.summary.seconds for result in results)
    show_fields(out, {"time": f"{total:.1f} s for {plural(len(runs), 'run')}", "directory": str(path)})
    _exit(results, comparison.unwritten)


@with_settings(only=(*FREE, *PARTS), defaults=False)
def resume(
    given: Mapping[str, Any],
    folder: Annotated[Path, typer.Argument(help="the directory of a run or of a comparison", show_default=False)],
    trust: Trust = False,
) -> None:
    """Let a run or a comparison go on from its last checkpoint.

    It ends with the numbers that it would have without the interruption: bit for bit in exact mode on the same machine.
    `--rounds` may be raised. Options that name parts, such as `--net`, are for parts of your own: they are imported
    only if you name them again or trust the directory.
    """
    with holding(folder):
        if (folder / COMPARISON).exists():
            with _setting_up():
                comparison = Comparison.resume(folder, trust, **given)
            _compare(comparison, folder)
            return
        with _setting_up():
            again = build_again(Builder(), folder, given, trust)
        if not again.complete:
            _run(again.run, folder, again)
            return
        result = stored_result(again)
        say(out, f"complete after {plural(result.summary.rounds, 'round')}; --rounds lets it go on for more")
        show_result(out, result, again.run.metrics)
        _exit([result])


@contextmanager
def _setting_up() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted before the first round")
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


def _interrupted(
    error: KeyboardInterrupt, progress: ProgressDisplay | None, path: Path, runs: Sequence[Run]
) -> NoReturn:
    """Say where a run that a signal has ended can go on, and end with the code of that signal."""
    name = str(error) or "an interrupt"
    done = plural(0 if progress is None else progress.done, "round")
    saved = all(run.settings.checkpoint_every != "never" for run in runs) or any(path.rglob(f"{FOLDER}/{LAST}"))
    rest = f"`fedcat resume {path}` goes on" if saved else f"there is no checkpoint; what there is, is in {path}"
    say(err, f"ended by {name} after {done}; {rest}")
    raise typer.Exit(error.exit_code if isinstance(error, Interrupt) else 130)
