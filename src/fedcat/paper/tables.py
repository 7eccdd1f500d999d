"""The paper's tables beside ours, FedCat against each rival, and what becomes of the paper's claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedcat.core.text import plural
from fedcat.paper import readings
from fedcat.paper.archive import Archive, StoredRun
from fedcat.paper.case import Case, label_of
from fedcat.paper.printed import printed
from fedcat.paper.readings import Cell, Paired, Reading, cell, spread_text, within
from fedcat.paper.study import HELD_OUT
from fedcat.report.sheet import Sheet

EMPTY = "not run"
POINTS = 1.5
"""A difference to the paper that asks for a reason."""
FEMNIST_NOTE = (
    "The paper's sample of FEMNIST is not published. Accuracies depend on the writers and on how many of their "
    "characters are digits: those of another sample are not on the paper's scale."
)


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a table: the cells of all methods on one federation.

    Attributes
    ----------
    cells : list of Cell
        The cells with all training data, in the order of the methods.
    held : list of Cell
        The same with part of the data held out for choosing; without runs if there are none.
    variants, held_variants : list of Cell
        Cells with other options, precision or exact mode, but on the same federation; and those with data held out.
    """

    cells: list[Cell]
    held: list[Cell]
    variants: list[Cell] = field(default_factory=list)
    held_variants: list[Cell] = field(default_factory=list)

    @classmethod
    def of(cls, archive: Archive, cases: Sequence[Case], seeds: Sequence[int]) -> Row:
        """Return the row of these cases, with and without data held out, and their variants."""
        plain = [replace(case, validation=0.0) for case in cases]
        held = [replace(case, validation=case.validation or HELD_OUT) for case in cases]
        variants = [[other for case in some for other in _variants(case, archive)] for some in (plain, held)]
        return cls(*([cell(archive, case, seeds) for case in some] for some in (plain, held, *variants)))

    @property
    def plain(self) -> Row:
        """The row without its variants and its runs with data held out."""
        return Row(self.cells, [Cell(one.case, []) for one in self.held])

    @property
    def known(self) -> list[Cell]:
        """All cells that have runs."""
        return [one for one in (*self.cells, *self.held, *self.variants, *self.held_variants) if one.runs]

    @property
    def name(self) -> str:
        """The dataset and alpha."""
        return self.cells[0].case.row

    @property
    def file_parts(self) -> list[str]:
        """The options that differ from the preset's, as parts of a file's name."""
        return [part for one in self.cells for part in one.case.file_parts]

    @property
    def in_paper(self) -> bool:
        """Whether the paper has this row."""
        return any(paper_value(one.case) is not None for one in self.cells)

    def get(self, method: str, held: bool = False) -> Cell | None:
        """Return the cell of a method, or None if it has no runs."""
        known = [one for one in (self.held if held else self.cells) if one.case.method == method and one.runs]
        return known[0] if known else None

    def rivals(self, held: bool = False) -> list[Cell]:
        """Return the cells with runs of the methods besides FedCat."""
        return [one for one in (self.held if held else self.cells) if one.case.method != "fedcat" and one.runs]


def labels(rows: Sequence[Row], without: str = "") -> dict[str, str]:
    """Return the methods of a table, and what they are called in it."""
    return {one.case.method: one.case.label for one in rows[0].cells if one.case.method != without}


def paper_value(case: Case) -> float | None:
    """Return the paper's number for a case; another partition than the preset's has none.

    Other options have: the paper does not print all of its own.
    """
    return None if case.partition else printed(case.dataset, case.alpha, case.method)


def accuracy_sheet(rows: Sequence[Row], title: str, reading: Reading, note: str, paper: bool = False) -> Sheet:
    """Return a table in the paper's form: one column for each method; with `paper`, its number and the difference."""
    table = [row.held if reading is readings.chosen else row.cells for row in rows]
    lines = [
        [row.name, *(_accuracy(one, reading, paper) for one in cells)] for row, cells in zip(rows, table, strict=True)
    ]
    return Sheet(title, ["", *labels(rows).values()], lines, [note, *_seed_notes(table)])


def _seed_notes(table: Sequence[Sequence[Cell]]) -> list[str]:
    """Return a note that names the cells which have another number of seeds than most."""
    known = [one for cells in table for one in cells if one.runs]
    usual = statistics.mode(len(one.runs) for one in known) if known else 0
    others = [f"{one.case.row}, {one.case.label}: {len(one.runs)}" for one in known if len(one.runs) != usual]
    return [f"Means are over {plural(usual, 'seed')}, but for {'; '.join(others)}."] if others else []


def _accuracy(one: Cell, reading: Reading, paper: bool) -> str:
    mean, deviation = one.mean_std(reading)
    number = paper_value(one.case) if paper else None
    if not math.isfinite(mean):
        return EMPTY if number is None else f"{EMPTY} ({number:.2f})"
    text = spread_text(mean, deviation)
    return text if number is None else f"{text} ({number:.2f}, {mean - number:+.2f})"


def detail_sheet(row: Row) -> Sheet:
    """Return one row of a table as a table of its own, one line for each method."""
    paper, held = row.in_paper, any(one.runs for one in row.held)
    columns = [
        "method",
        "best",
        *(["paper", "difference"] if paper else []),
        "last five",
        *(["chosen"] if held else []),
    ]
    lines = []
    for one, other in zip(row.cells, row.held, strict=True):
        mean, _ = one.mean_std(readings.best)
        number = paper_value(one.case)
        difference = "" if number is None or not math.isfinite(mean) else f"{mean - number:+.2f}"
        theirs = ["" if number is None else f"{number:.2f}", difference] if paper else []
        line = [one.case.label, one.text(readings.best) or EMPTY, *theirs, one.text(readings.last_five)]
        line += [other.text(readings.chosen) or EMPTY] if held else []
        lines.append([*line, one.text(readings.average_best), one.text(readings.average_last_five)])
    counts = {len(one.runs) for one in row.cells if one.runs}
    seeds = plural(max(counts, default=0), "seed") if len(counts) < 2 else f"{min(counts)} to {max(counts)} seeds"
    rounds = f"{row.cells[0].case.rounds:,} rounds"
    return Sheet(f"{row.name}, {rounds}, {seeds}", [*columns, "average: best", "average: last five"], lines)


# Differences, paired by seed

SIGNIFICANT = (
    "Mean ± standard error. Bold: significant, two-sided 90 % (2.9 standard errors with three seeds, 2.1 with five); "
    "with so many comparisons a few will seem significant by chance."
)


def _equal_bytes(mine: Cell, rival: Cell) -> Paired:
    traffic = min(run.traffic[-1] for run in (*mine.runs, *rival.runs))
    return Paired.of(mine, rival, within(traffic))


COMPARISONS: tuple[tuple[str, Callable[[Cell, Cell], Paired], bool], ...] = (
    ("last five, equal rounds", lambda a, b: Paired.of(a, b, readings.last_five), False),
    ("last five, equal bytes", _equal_bytes, False),
    ("chosen, equal rounds", lambda a, b: Paired.of(a, b, readings.chosen), True),
    ("average over rounds, last five", lambda a, b: Paired.of(a, b, readings.average_last_five), False),
)
"""How a method is compared with its rivals: by what, and whether in the runs with data held out."""


def champion_sheets(rows: Sequence[Row], champion: str = "fedcat") -> list[Sheet]:
    """Return the difference of FedCat, or another method, to each rival, one table for each way to compare."""
    methods = labels(rows, without=champion)
    found = []
    for title, paired, held in COMPARISONS:
        pairs = [(row.name, [(row.get(champion, held), row.get(method, held)) for method in methods]) for row in rows]
        sheet = _paired_sheet(f"{label_of(champion)} minus rival: {title}", methods.values(), pairs, paired)
        found += [sheet] if sheet.rows else []
    return found


def fedavg_sheet(rows: Sequence[Row]) -> Sheet:
    """Return each method's difference to FedAvg."""
    methods = labels(rows, without="fedavg")
    pairs = [(row.name, [(row.get(method), row.get("fedavg")) for method in methods]) for row in rows]
    return _paired_sheet("Method minus FedAvg: last five, equal rounds", methods.values(), pairs, COMPARISONS[0][1])


def _paired_sheet(
    title: str,
    columns: Iterable[str],
    pairs: Sequence[tuple[str, Sequence[tuple[Cell | None, Cell | None]]]],
    paired: Callable[[Cell, Cell], Paired],
) -> Sheet:
    """Return a table of differences; rows without any are left out."""
    lines = []
    for name, cells in pairs:
        texts = [EMPTY if one is None or other is None else paired(one, other).text for one, other in cells]
        if any(text not in (EMPTY, "") for text in texts):
            lines.append([name, *texts])
    note = f"Difference in points between runs with the same seed. {SIGNIFICANT}"
    return Sheet(title, ["", *columns], lines, [note])


def differing_sheet(rows: Sequence[Row]) -> Sheet:
    """Return the cells whose best differs from the paper's by more than 1.5 points or two standard deviations."""
    lines = []
    for row in rows:
        for one in row.cells:
            (mean, deviation), number = one.mean_std(readings.best), paper_value(one.case)
            if number is None or not math.isfinite(mean):
                continue
            apart = abs(mean - number)
            if apart > POINTS or (deviation is not None and apart > 2 * deviation):
                seeds = ", ".join(f"{value:.2f}" for value in one.values(readings.best))
                lines.append([f"{row.name}, {one.case.label}", seeds, f"{number:.2f}", f"{mean - number:+.2f}"])
    note = f"Best, where our mean differs from the paper's number by more than {POINTS} points or two deviations."
    return Sheet("Cells that differ from the paper", ["", "best of each seed", "paper", "difference"], lines, [note])


def variants_sheet(rows: Sequence[Row], champion: str = "fedcat") -> Sheet:
    """Return cells that were also run with other options, precision or in exact mode, beside those of the tables."""
    lines = []
    for row in rows:
        for one in (one for one in row.variants if one.runs):
            usual = next(cell for cell in row.cells if cell.case.method == one.case.method)
            mine = row.get(champion) if one.case.method != champion else None
            figures = []
            for reading in (readings.best, readings.last_five):
                figures += [one.text(reading), Paired.of(one, usual, reading).text]
            figures.append(one.text(readings.average_last_five))
            figures.append("" if mine is None else Paired.of(mine, one, readings.last_five).text)
            lines.append([row.name, _variant(one.case, usual.case), *figures])
    name = label_of(champion)
    note = (
        f"Accuracy in %; the difference to the same method in the table, and {name}'s last five minus the variant's, "
        f"paired by seed. `its average`: the last five of the variant's average over rounds. {SIGNIFICANT}"
    )
    columns = ["", "variant", "best", "minus table", "last five", "minus table", "its average", f"{name} minus variant"]
    return Sheet("Variants of cells", columns, lines, [note])


def _variants(case: Case, archive: Archive) -> list[Case]:
    """Return the cases of an archive that differ from one in nothing but options, precision and exact mode."""
    same = {"options": case.options, "precision": case.precision, "exact": case.exact}
    found = {run.case for run in archive if replace(run.case, **same) == case} - {case}
    return sorted(found, key=lambda other: (other.label, other.precision, other.exact))


def _variant(case: Case, usual: Case) -> str:
    """Return what a variant is called."""
    precision = case.precision if case.precision != usual.precision else ""
    exact = "exact" if case.exact and not usual.exact else ""
    return ", ".join(filter(None, [case.label, precision, exact]))


def failed_sheet(rows: Sequence[Row]) -> Sheet:
    """Return the runs that reached an accuracy and lost it again, and those that learned nothing."""
    lines = []
    for run in (run for row in rows for one in row.known for run in one.runs):
        if readings.failed(run):
            lines.append([run.name, f"{readings.best(run):.2f}", _fall(run), f"{readings.last_five(run):.2f}"])
    note = (
        "Runs that end below half of their best accuracy, and the first evaluation after the best that is below it; "
        "and runs that learned nothing: never better than a model that always gives the same answer."
    )
    return Sheet("Runs that fell apart or learned nothing", ["", "best", "fell by round", "last five"], lines, [note])


def _fall(run: StoredRun) -> str:
    if readings.stuck(run):
        return "learned nothing"
    highest = max(value for value in run.accuracy if math.isfinite(value))
    after = range(run.accuracy.index(highest), len(run.accuracy))
    return f"{next(run.rounds[place] for place in after if not run.accuracy[place] >= highest / 2):,}"


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the figures of all cells as plain values."""
    found = []
    for row in rows:
        for one, other in zip(row.cells, row.held, strict=True):
            if one.runs or other.runs:
                figures = {name: one.mean_std(getattr(readings, name)) for name in FIGURES}
                figures["chosen"] = other.mean_std(readings.chosen)
                found.append(
                    {
                        **one.case.as_dict(),
                        "seeds": [run.seed for run in one.runs],
                        "paper": paper_value(one.case),
                        **{name: {"mean": mean, "std": deviation} for name, (mean, deviation) in figures.items()},
                        "runs": {str(run.seed): _figures(run) for run in one.runs},
                    }
                )
    return found


FIGURES = ("best", "last_five", "average_best", "average_last_five")


def _figures(run: Any) -> dict[str, float]:
    return {**{name: round(getattr(readings, name)(run), 3) for name in FIGURES}, "traffic": run.traffic[-1]}
