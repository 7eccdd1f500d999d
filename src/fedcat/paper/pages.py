"""Pages: a study's tables as Markdown with its figures, and its numbers as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedcat.core.errors import SettingError
from fedcat.core.files import replacing
from fedcat.core.text import json_text
from fedcat.paper import readings, tables
from fedcat.paper.figures import draw_rows
from fedcat.paper.study import ABLATION, METHODS, STUDIES
from fedcat.paper.tables import Row
from fedcat.report.sheet import Sheet

BEST = "Best: the largest of the test accuracies, in %, mean ± standard deviation over seeds"
READINGS = (
    ("Mean of the last five evaluations", readings.last_five, "The figure by which claims are judged."),
    (
        "Average over rounds: best",
        readings.average_best,
        "Ours, not the paper's: an exponential average of the model over rounds (decay 0.95), kept on the server "
        "without traffic.",
    ),
    (
        "Average over rounds: last five",
        readings.average_last_five,
        "The same average, mean of its last five evaluations.",
    ),
)


def write_pages(name: str, rows: Sequence[Row], folder: Path) -> tuple[list[Sheet], list[Path]]:
    """Write a study's page, JSON and figures; return the tables to show and the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingError(f"directory {str(folder)!r} cannot be created: {error.strerror}") from error
    known = [row for row in rows if any(one.runs for one in (*row.cells, *row.held))]
    if not known:
        return [], []
    shown, page = STUDY_SHEETS[name](known)
    figures = _figures(name, known, folder)
    text = [f"# {STUDIES[name].title}", "", *_about(known), ""]
    text += [line for path in figures for line in (f"![{path.stem}]({path.name})", "")]
    text += [sheet.markdown() for sheet in page]
    text += _commands(known)
    markdown, data = folder / f"{name}.md", folder / f"{name}.json"
    with replacing(markdown) as temporary:
        temporary.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    with replacing(data) as temporary:
        temporary.write_text(json_text(tables.as_json(known), indent=1) + "\n", encoding="utf-8")
    return shown, [markdown, data, *figures]


def _figures(name: str, rows: Sequence[Row], folder: Path) -> list[Path]:
    if name == "traffic":
        return draw_rows(rows, folder, name, METHODS, "bytes")
    if name == "curves":
        return draw_rows(rows, folder, "curves", METHODS) + draw_rows(rows, folder, "ablation", ABLATION)
    if name == "fairness":
        return []
    return draw_rows(rows, folder, name, [one.case.method for one in rows[0].cells])


def _table(rows: Sequence[Row]) -> tuple[list[Sheet], list[Sheet]]:
    """Return what a terminal shows of table 1 or 2, and what its page shows."""
    paper = any(row.in_paper for row in rows)
    brackets = "; in brackets the paper's number and our difference to it." if paper else "."
    form = [tables.accuracy_sheet(rows, "Best", readings.best, BEST + brackets, paper)]
    form += [tables.accuracy_sheet(rows, title, reading, note) for title, reading, note in READINGS]
    held = [row for row in rows if any(one.runs for one in row.held)]
    if held:
        note = "A tenth of each client's data was held out: the test accuracy at the best validation accuracy."
        form.insert(2, tables.accuracy_sheet(held, "Chosen on validation data", readings.chosen, note))
    rest = [*tables.paired_sheets(rows), tables.reach_sheet(rows), tables.claims_sheet(rows)]
    rest = [sheet for sheet in rest if sheet.rows]
    return [*(tables.detail_sheet(row) for row in rows), *rest], [*form, *rest]


def _traffic(rows: Sequence[Row]) -> tuple[list[Sheet], list[Sheet]]:
    sheets = [tables.reach_sheet(rows), *tables.paired_sheets(rows)[1:2]]
    return sheets, sheets


def _curves(rows: Sequence[Row]) -> tuple[list[Sheet], list[Sheet]]:
    return [], []


STUDY_SHEETS = {"table1": _table, "table2": _table, "traffic": _traffic, "curves": _curves, "fairness": _curves}


def _about(rows: Sequence[Row]) -> list[str]:
    """Return what made the runs: settings, machine, commits and time."""
    runs = [run for row in rows for one in (*row.cells, *row.held) for run in one.runs]
    machines = sorted({f"{run.machine.device}, PyTorch {run.machine.torch}" for run in runs})
    commits = sorted({run.machine.commit or "unknown" for run in runs})
    first = runs[0].case
    lines = [
        f"Preset `{first.preset}`, precision {first.precision}, {len(runs)} runs, "
        f"{sum(run.seconds for run in runs) / 60:.0f} minutes together on {'; '.join(machines)}.",
        f"Commits: {', '.join(commits)}; canaries: {', '.join(sorted({run.machine.canary for run in runs}))}.",
    ]
    if any(run.case.dataset == "femnist" for run in runs):
        lines.append(tables.FEMNIST_NOTE)
    bad = [f"{run.case.row}, {run.case.label}, seed {run.seed}: {note}" for run in runs for note in run.notes]
    return [*lines, *(["", "Notes of the runs:", ""] if bad else []), *(f"- {line}" for line in dict.fromkeys(bad))]


def _commands(rows: Sequence[Row]) -> list[str]:
    """Return the command of every cell."""
    lines = ["## Every cell again", "", "One command runs a cell with all of its seeds:", "", "```sh"]
    for row in rows:
        lines += [one.case.command([run.seed for run in one.runs]) for one in (*row.cells, *row.held) if one.runs]
    return [*lines, "```", ""]
