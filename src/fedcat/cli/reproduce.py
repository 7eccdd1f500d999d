"""The command `fedcat reproduce`: the paper's tables and figures, ours beside the paper's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedcat.cli.options import Command, Group, method_tables, with_settings
from fedcat.cli.tables import say
from fedcat.config.presets import preset_datasets, preset_names
from fedcat.config.resolve import OF_METHODS
from fedcat.config.settings import Settings
from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.options import Typed, check_bounds, check_options, options
from fedcat.core.text import plural
from fedcat.methods import METHODS
from fedcat.paper import study
from fedcat.paper.archive import Archive
from fedcat.paper.case import Case
from fedcat.paper.case_runner import CaseRunner, commit
from fedcat.paper.choices import choices_sheet
from fedcat.paper.pages import choices_page, study_page, theorem_page
from fedcat.paper.tables import Row
from fedcat.paper.theorem import ROUNDS, measure
from fedcat.report.sheet import Sheet

app = typer.Typer(
    cls=Group,
    help="Reproduce the FedCat paper: its tables, curves, traffic, fairness and theorem, ours beside the paper's.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
out = Console(highlight=False, markup=False)


def _option(flag: str, metavar: str, help: str) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, show_default=False)


Datasets = Annotated[str, _option("--dataset", "A,B,...", "datasets [those of the paper]")]
Alphas = Annotated[str, _option("--alpha", "A,B,...", "alphas of the Dirichlet partition [those of the paper]")]
Methods = Annotated[str, _option("--methods", "A,B,...", "methods [those of the paper]")]
ChosenDatasets = Annotated[str, _option("--dataset", "A,B,...", "datasets [cifar10]")]
Chosen = Annotated[str, _option("--methods", "A,B,...", "methods whose numbers are chosen [fedcat,scaffold]")]
Seeds = Annotated[int, _option("--seeds", "NUMBER", "number of seeds [3]")]
FirstSeed = Annotated[int | None, _option("--seed", "NUMBER", "first seed [10; choices: 20]")]
Rounds = Annotated[
    int | None, _option("--rounds", "NUMBER", "number of rounds [1000; femnist 1008; preset paper 300; choices 500]")
]
Preset = Annotated[str, _option("--preset", "NAME", "lab or paper, see `fedcat presets` [lab]")]
Partition = Annotated[str, _option("--partition", "NAME", "another partition than the preset's")]
Validation = Annotated[
    float, _option("--validation", "NUMBER", "tables: fraction of each client's data to hold out, for `chosen` [0]")
]
Options = Annotated[
    list[str] | None,
    typer.Option(
        *("--option", "-o"),
        metavar="METHOD.NAME=VALUE",
        help="option of a method that differs from the preset's, such as scaffold.clip=10; repeatable",
        show_default=False,
    ),
]
Exact = Annotated[bool, _option("--exact", " ", "the same bits whatever runs beside a run; always on with a CPU")]
Minutes = Annotated[
    float | None, _option("--minutes", "NUMBER", "run the cells that fit into this time; 0: none, only show [no limit]")
]
Out = Annotated[Path, _option("--out", "DIRECTORY", "where runs are kept and pages are written [reproduce]")]

MACHINE = ("device", "data_dir", "precision", "memory", "threads", "workers")


def _study_command(name: str) -> Callable[..., None]:
    """Return the command of one of the studies."""

    @with_settings(only=MACHINE)
    def command(
        given: Mapping[str, Any],
        dataset: Datasets = "",
        alpha: Alphas = "0.1,0.5,1.0",
        methods: Methods = "",
        seeds: Seeds = 3,
        seed: FirstSeed = None,
        rounds: Rounds = None,
        preset: Preset = "lab",
        partition: Partition = "",
        validation: Validation = 0.0,
        option: Options = None,
        exact: Exact = False,
        minutes: Minutes = None,
        folder: Out = Path("reproduce"),
    ) -> None:
        chosen = study.STUDIES[name]
        _check_preset(preset)
        if validation and not chosen.table:
            tables = ", ".join(one.name for one in study.STUDIES.values() if one.table)
            raise SettingError(f"validation is for {tables}: {name} shows runs with all training data")
        names = _names("methods", methods, [name for name, _ in METHODS]) or chosen.methods
        rows = study.rows(
            _names("dataset", dataset, _datasets(preset)) or chosen.datasets,
            names,
            _numbers("alpha", alpha),
            preset,
            _rounds(rounds),
            _precision(given),
            partition=partition,
            validation=_validation(validation),
            exact=exact,
            options=_options(option, names),
        )
        numbers = _seeds(seeds, study.FIRST_SEED if seed is None else seed)
        wanted = [*rows, *study.variants(rows)] if chosen.varied else rows
        archive = _work(wanted, numbers, folder, minutes, given)
        _show(*study_page(name, [Row.of(archive, row, numbers) for row in rows], folder))

    return command


HELP = {
    "table1": "Compare six methods: accuracy beside the paper's, FedCat against each rival, and the paper's claims.",
    "table2": "Compare FedCat with its two ablations, accuracy beside the paper's.",
    "curves": "Plot the test accuracy of every method over the rounds.",
    "traffic": "Plot accuracy over bytes; rounds and bytes that each method needs to FedAvg's accuracy.",
    "fairness": "Show how evenly clients take part, and how accuracy spreads over them.",
    "plus": "Compare FedCat-Plus with all of its rivals: rows won, the first rounds, and each of its parts taken away.",
}
for _name, _help in HELP.items():
    app.command(_name, cls=Command, help=_help)(_study_command(_name))


@app.command(cls=Command)
@with_settings(only=MACHINE)
def choices(
    given: Mapping[str, Any],
    dataset: ChosenDatasets = "cifar10",
    alpha: Alphas = "0.1,1.0",
    methods: Chosen = "fedcat,scaffold",
    seeds: Seeds = 3,
    seed: FirstSeed = None,
    rounds: Rounds = None,
    minutes: Minutes = None,
    folder: Out = Path("reproduce"),
) -> None:
    """Choose numbers on validation data: what the paper leaves open, SCAFFOLD's clip, FedCat-Plus's options."""
    datasets = _names("dataset", dataset, _datasets("lab")) or ["cifar10"]
    names = _names("methods", methods, list(study.CHOICES)) or ["fedcat", "scaffold"]
    alphas, count, precision = _numbers("alpha", alpha), _rounds(rounds), _precision(given)
    rows = study.choices(datasets, alphas, "lab", count, precision, names)
    numbers = _seeds(seeds, study.FIRST_CHOOSING_SEED if seed is None else seed)
    archive = _work(rows, numbers, folder, minutes, given)
    runs = [run for row in rows for case in row for run in archive.runs(case, numbers)]
    if not runs:
        raise SettingError("no run of choices is there yet: leave out --minutes, or give more of them")
    sheet = choices_sheet(archive, rows, numbers)
    _show([sheet], choices_page(sheet, runs, folder, names))


@app.command(cls=Command)
def theorem(
    seeds: Seeds = 3,
    seed: FirstSeed = None,
    rounds: Annotated[int, _option("--rounds", "NUMBER", f"number of rounds [{ROUNDS}]")] = ROUNDS,
    folder: Out = Path("reproduce"),
) -> None:
    """Measure the convergence of FedAvg and FedCat on a strongly convex problem, beside the paper's bound."""
    check_bounds("rounds", rounds, at_least=2)
    numbers = _seeds(seeds, study.FIRST_SEED if seed is None else seed)
    say(out, f"softmax regression on digits, {rounds:,} rounds, {plural(seeds, 'seed')} of FedAvg and of FedCat")
    found = measure(numbers, rounds)
    about = f"`fedcat reproduce theorem --seed {numbers[0]} --seeds {seeds} --rounds {rounds}`, commit {commit()}."
    _show(*theorem_page(found, folder, about))


def _work(
    rows: Sequence[Sequence[Case]], seeds: Sequence[int], folder: Path, minutes: float | None, given: Mapping[str, Any]
) -> Archive:
    """Run what is missing and return all that is there."""
    if minutes is not None:
        check_bounds("minutes", minutes, at_least=0)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"out directory {str(folder)!r} cannot be created: {error.strerror}") from error
    archive = Archive(folder / "runs")
    machine = {name: value for name, value in given.items() if name != "precision"}
    CaseRunner(archive, machine, minutes, out).run(rows, seeds)
    return archive


def _show(sheets: Sequence[Sheet], files: Sequence[Path]) -> None:
    told: set[str] = set()
    for sheet in sheets:
        show_sheet(out, replace(sheet, notes=[note for note in sheet.notes if note not in told]))
        told.update(sheet.notes)
    out.print()
    for path in files:
        say(out, f"written: {path}")


def show_sheet(console: Console, sheet: Sheet) -> None:
    """Print a table."""
    console.print()
    say(console, sheet.title)
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(sheet.columns):
        words = all(row[place][:1].isalpha() for row in sheet.rows if row[place])
        table.add_column(heading, justify="left" if words else "right", no_wrap=not place)
    for row in sheet.rows:
        table.add_row(*(f"{text.strip('*')} *" if text.startswith("**") else text for text in row))
    console.print(table)
    for note in sheet.notes:
        say(console, note.replace("Bold:", "*:"))


def _datasets(preset: str) -> tuple[str, ...]:
    """Return the datasets that can be divided as the paper's are: those of the preset, and the digits."""
    return (*preset_datasets(preset), "digits")


def _names(label: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in known:
            raise unknown_name(label, name, known)
    return names


def _numbers(label: str, text: str) -> list[float]:
    found = []
    for word in text.split(","):
        value = Typed(word.strip()).read(float)
        if not isinstance(value, (int, float)):
            raise SettingError(f"{label} must be numbers such as 0.1,0.5, got {text!r}")
        check_bounds(label, value, above=0)
        found.append(float(value))
    return found


def _options(texts: list[str] | None, methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the options of single methods that were typed as METHOD.NAME=VALUE, checked."""
    tables = method_tables(texts)
    if "method_options" in tables:
        raise SettingError(f"option must have the form METHOD.NAME=VALUE, got {next(iter(tables['method_options']))!r}")
    found: dict[str, dict[str, Any]] = {}
    for name, table in tables.get("options", {}).items():
        factory = METHODS.get(name)
        if name not in methods:
            raise SettingError(f"option of {name} has no effect: the methods are {', '.join(methods)}")
        names = [option for option in table if option in OF_METHODS and option not in options(factory)]
        settings = Settings.checked({option: table[option] for option in names})
        rest = {option: value for option, value in table.items() if option not in names}
        found[name] = check_options("method", name, factory, rest)
        found[name] |= {option: getattr(settings, option) for option in names}
    return found


def _rounds(rounds: int | None) -> int | None:
    if rounds is not None:
        check_bounds("rounds", rounds, at_least=1)
    return rounds


def _validation(fraction: float) -> float:
    check_bounds("validation", fraction, at_least=0, below=1)
    return fraction


def _check_preset(name: str) -> None:
    if name not in preset_names():
        raise unknown_name("preset", name, preset_names())


def _precision(given: Mapping[str, Any]) -> str:
    value = given.get("precision", "fp32")
    return str(value.read(str)) if isinstance(value, Typed) else str(value)


def _seeds(count: int, first: int) -> list[int]:
    check_bounds("seeds", count, at_least=1)
    check_bounds("seed", first, at_least=0)
    return list(range(first, first + count))
