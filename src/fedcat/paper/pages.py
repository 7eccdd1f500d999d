"""Pages: a study's tables as Markdown with its figures, and its numbers as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedcat.core.errors import SettingError
from fedcat.core.files import replacing
from fedcat.core.text import json_text, plural
from fedcat.paper import claims, figures, plus, readings, tables
from fedcat.paper.archive import StoredRun
from fedcat.paper.case import label_of
from fedcat.paper.fairness import DRAWN, client_sheets, participation_sheets
from fedcat.paper.readings import Cell
from fedcat.paper.study import ABLATION, METHODS, STUDIES
from fedcat.paper.tables import Row
from fedcat.paper.theorem import Measured, theorem_sheets
from fedcat.report.sheet import Sheet, wrapped

ACCURACY = "test accuracy, %"
BEST = "The largest of the test accuracies, in %, mean ± standard deviation over seeds"
LINES = "Lines are means over seeds; if a run fell apart or learned nothing, there is a thin line for each seed."
READINGS = (
    ("Mean of the last five evaluations", readings.last_five, "In %; the figure by which claims are judged."),
    (
        "Average over rounds: best",
        readings.average_best,
        "Ours, not the paper's: an average of the model over rounds, kept on the server without traffic; exponential "
        "with decay 0.95, unless a method's name says otherwise.",
    ),
    (
        "Average over rounds: mean of the last five",
        readings.average_last_five,
        "The same average, mean of its last five evaluations.",
    ),
)


def study_page(name: str, rows: Sequence[Row], folder: Path) -> tuple[list[Sheet], list[Path]]:
    """Write a study's page, JSON and figures; return the tables that a terminal shows, and the files."""
    study = STUDIES[name]
    rows = rows if study.table else [row.plain for row in rows]
    known = [row for row in rows if any(one.runs for one in (*row.cells, *row.held))]
    if not known:
        raise SettingError(f"no run of {name} is there yet: leave out --minutes, or give more of them")
    shown, page = SHEETS[name](known, rows)
    drawn = _figures(name, known, folder / "figures")
    cells = [one for row in known for one in row.known]
    lines = [LINES, ""] if drawn and name != "fairness" else []
    text = [
        *_about(cells),
        "",
        *_links(drawn, folder),
        *lines,
        *(sheet.markdown() for sheet in page),
        *_commands(cells),
    ]
    data = {"cells": tables.as_json(known), "tables": [asdict(sheet) for sheet in page]}
    files = _write(folder, _stem(name, known), study.title, text, data)
    return shown, [*files, *drawn]


def theorem_page(found: Measured, folder: Path, about: str) -> tuple[list[Sheet], list[Path]]:
    """Write the theorem's page, JSON and figure; return its tables and the files."""
    drawn = [figures.draw_theorem(found, folder / "figures" / "theorem")]
    sheets = theorem_sheets(found)
    text = [about, "", *_links(drawn, folder), *(sheet.markdown() for sheet in sheets)]
    return sheets, [*_write(folder, "theorem", "The theorem, measured", text, found.as_dict()), *drawn]


def choices_page(sheet: Sheet, runs: Sequence[StoredRun], folder: Path, methods: Sequence[str]) -> list[Path]:
    """Write the page of the choices; return the files."""
    paper = set(methods) <= {"fedcat", "scaffold"}
    stem = "choices" if paper else "-".join(["choices", *methods])
    title = "Choosing what the paper leaves open" if paper else "Choosing on validation data"
    return _write(folder, stem, title, [*_machines(runs), "", sheet.markdown()])


def _stem(name: str, rows: Sequence[Row]) -> str:
    """Return the name of a study's files: presets, partitions and options that differ have pages of their own."""
    cases = [row.cells[0].case for row in rows]
    presets, partitions = {case.preset for case in cases} - {"lab"}, {case.partition for case in cases} - {""}
    return "-".join([name, *sorted(presets), *sorted(partitions), *rows[0].file_parts])


def _write(folder: Path, name: str, title: str, text: Sequence[str], data: Any = None) -> list[Path]:
    files = [folder / f"{name}.md", *([] if data is None else [folder / f"{name}.json"])]
    contents = ["\n".join([f"# {title}", "", *text]).rstrip() + "\n", json_text(data, indent=1) + "\n"]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(files, contents, strict=False):
            with replacing(path) as temporary:
                temporary.write_text(content, encoding="utf-8")
    except OSError as error:
        raise SettingError(f"directory {str(folder)!r} cannot be written: {error.strerror}") from error
    return files


def _links(drawn: Sequence[Path], folder: Path) -> list[str]:
    return [line for path in drawn for line in (f"![{path.stem}]({path.relative_to(folder).as_posix()})", "")]


def _figures(name: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    over_rounds = (figures.accuracy_over_rounds, "round", ACCURACY)
    others = [one.case.method for one in rows[0].cells if one.case.method not in ABLATION]  # also a user's choice
    drawn: list[Path] = []
    if name in ("table1", "curves"):
        drawn += figures.draw_rows(rows, folder / "methods", {*METHODS, *others}, *over_rounds)
    if name in ("table2", "curves"):
        ablated = [row for row in rows if any(row.get(method) for method in ABLATION if method not in METHODS)]
        drawn += figures.draw_rows(ablated, folder / "ablation", ABLATION, *over_rounds)
    if name == "plus":
        drawn += figures.draw_rows(rows, folder / "plus", {*METHODS, *others}, *over_rounds)
    if name in ("traffic", "plus"):
        line = (figures.accuracy_over_bytes, "training traffic, MB", ACCURACY)
        stem = folder / ("traffic" if name == "traffic" else "plus-traffic")
        drawn += figures.draw_rows(rows, stem, {*METHODS, *others}, *line)
    if name == "fairness":
        drawn += figures.draw_participation(rows, folder / "participation", DRAWN)
    return drawn


Sheets = tuple[list[Sheet], list[Sheet]]
"""What a terminal shows of a study, and what its page shows."""


def _forms(known: Sequence[Row], rows: Sequence[Row], paper: bool) -> list[Sheet]:
    """Return the accuracies by every reading."""
    brackets = "; in brackets the paper's number and our difference to it." if paper else "."
    form = [tables.accuracy_sheet(rows, "Best", readings.best, BEST + brackets, paper)]
    form += [tables.accuracy_sheet(rows, title, reading, note) for title, reading, note in READINGS]
    held = [row for row in known if any(one.runs for one in row.held)]
    if held:
        part = held[0].held[0].case.validation
        note = f"A fraction {part:g} of each client's data was held out. Test accuracy at the best validation accuracy."
        form.insert(2, tables.accuracy_sheet(held, "Chosen on validation data", readings.chosen, note))
    return form


def _table(known: Sequence[Row], rows: Sequence[Row], checked: Sequence[str]) -> Sheets:
    form = _forms(known, rows, any(row.in_paper for row in known))
    rest = [*tables.champion_sheets(known), tables.fedavg_sheet(known)]
    rest += [claims.reach_sheet(known), claims.claims_sheet(known, checked)]
    rest += [tables.differing_sheet(known), tables.variants_sheet(known), tables.failed_sheet(known)]
    rest = [sheet for sheet in rest if sheet.rows]
    return [*(tables.detail_sheet(row) for row in known), *rest], [*form, *rest]


def _table1(known: Sequence[Row], rows: Sequence[Row]) -> Sheets:
    return _table(known, rows, (claims.BEST, claims.ROUNDS, claims.TRAFFIC))


def _table2(known: Sequence[Row], rows: Sequence[Row]) -> Sheets:
    return _table(known, rows, (claims.ORDER,))


def _plus(known: Sequence[Row], rows: Sequence[Row]) -> Sheets:
    sheets = [plus.won_sheet(known), plus.early_sheet(known), plus.parts_sheet(known)]
    rest = [*tables.champion_sheets(known, plus.NAME), tables.fedavg_sheet(known), claims.traffic_sheet(known)]
    rest += [claims.reach_sheet(known), tables.variants_sheet(known, plus.NAME), tables.failed_sheet(known)]
    sheets, rest = ([sheet for sheet in some if sheet.rows] for some in (sheets, rest))
    return [*(tables.detail_sheet(row) for row in known), *sheets], [*sheets, *_forms(known, rows, False), *rest]


def _traffic(known: Sequence[Row], rows: Sequence[Row]) -> Sheets:
    sheets = [claims.traffic_sheet(known), claims.reach_sheet(known), *tables.champion_sheets(known)[1:2]]
    return sheets, sheets


def _curves(known: Sequence[Row], rows: Sequence[Row]) -> Sheets:
    return [], []


def _fairness(known: Sequence[Row], rows: Sequence[Row]) -> Sheets:
    sheets = [*participation_sheets(known), *client_sheets(known)]
    return sheets, sheets


SHEETS: dict[str, Callable[[Sequence[Row], Sequence[Row]], Sheets]] = {
    "table1": _table1,
    "table2": _table2,
    "curves": _curves,
    "traffic": _traffic,
    "fairness": _fairness,
    "plus": _plus,
}


def _about(cells: Sequence[Cell]) -> list[str]:
    """Return what made the runs: settings, machine, commits and time, and what the runs noted."""
    runs = [run for one in cells for run in one.runs]
    lines = _machines(runs)
    if any(run.case.dataset == "femnist" for run in runs):
        lines += ["", wrapped(tables.FEMNIST_NOTE)]
    bad = [f"- {run.name}: {note}" for run in runs for note in run.notes]
    return [*lines, *(["", "Notes of the runs:", ""] if bad else []), *(wrapped(line, "  ") for line in bad)]


def _machines(runs: Sequence[StoredRun]) -> list[str]:
    case, used = runs[0].case, runs[0].settings.get("preset", "")
    datasets: dict[str, dict[str, None]] = {}
    for run in runs:
        words = f"{run.case.rounds:,} rounds, evaluated every {run.rounds[0]}"
        datasets.setdefault(words, {})[label_of(run.case.dataset)] = None
    seeds, minutes = sorted({run.seed for run in runs}), round(sum(run.seconds for run in runs) / 60)
    machines = sorted({f"{run.machine.device}, PyTorch {run.machine.torch}" for run in runs})
    sentences = [
        *([f"Preset `{used}`"] if used else []),
        *([f"Partition `{case.partition}`"] if case.partition else []),
        "; ".join(f"{', '.join(names)}: {words}" for words, names in datasets.items()),
        f"Precision {case.precision}, {'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}",
        f"{plural(len(runs), 'run')}, {plural(minutes, 'minute')} on {'; '.join(machines)}",
        f"Commits: {', '.join(sorted({run.machine.commit or 'unknown' for run in runs}))}",
        f"Canaries: {', '.join(sorted({f'{r.case.dataset} {r.case.precision} {r.machine.canary}' for r in runs}))}",
    ]
    return [wrapped(". ".join(sentences) + ".")]


def _commands(cells: Sequence[Cell]) -> list[str]:
    """Return the command of every cell."""
    lines = ["## Every cell again", "", "One command runs a cell with all of its seeds:", "", "```sh"]
    commands = [command for one in cells for command in one.case.commands([run.seed for run in one.runs])]
    lines += [wrapped(command, "    ").replace("\n", " \\\n") for command in commands]
    return [*lines, "```", ""]
