"""The paper's tables beside ours, FedCat against each rival, and what becomes of the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedcat.core.text import plural
from fedcat.paper import readings
from fedcat.paper.archive import Archive
from fedcat.paper.case import LABELS, Case
from fedcat.paper.printed import printed
from fedcat.paper.readings import Cell, Paired, Reading, cell, reached, spread_text, within
from fedcat.paper.study import HELD_OUT
from fedcat.report.sheet import Sheet

EMPTY = "not run"
FEMNIST_NOTE = (
    "The writers of FEMNIST are not the paper's: this sample of LEAF has more digits among its characters, so its "
    "accuracies are not on the paper's scale."
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
    """

    cells: list[Cell]
    held: list[Cell]

    @classmethod
    def of(cls, archive: Archive, cases: Sequence[Case], seeds: Sequence[int]) -> Row:
        """Return the row of these cases."""
        held = [cell(archive, replace(case, validation=case.validation or HELD_OUT), seeds) for case in cases]
        return cls([cell(archive, case, seeds) for case in cases], held)

    @property
    def name(self) -> str:
        """The dataset and alpha."""
        return self.cells[0].case.row

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


def paper_value(case: Case) -> float | None:
    """Return the paper's number for a case; another partition than the preset's has none."""
    return None if case.partition else printed(case.dataset, case.alpha, case.method)


def accuracy_sheet(rows: Sequence[Row], title: str, reading: Reading, note: str, paper: bool = False) -> Sheet:
    """Return a table in the paper's form: one column for each method; with `paper`, its number and the difference."""
    methods = [one.case.method for one in rows[0].cells]
    lines = []
    for row in rows:
        held = reading is readings.chosen
        cells = row.held if held else row.cells
        lines.append([row.name, *(_accuracy(one, reading, paper) for one in cells)])
    return Sheet(title, ["", *(LABELS.get(method, method) for method in methods)], lines, [note])


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


# FedCat against each rival

Comparison = tuple[str, Callable[[Cell, Cell], Paired], bool]


def _equal_bytes(fedcat: Cell, rival: Cell) -> Paired:
    traffic = min(run.traffic[-1] for run in fedcat.runs)
    return Paired.of(fedcat, rival, readings.last_five, within(traffic))


COMPARISONS: dict[str, Comparison] = {
    "rounds": ("last five, equal rounds", lambda a, b: Paired.of(a, b, readings.last_five), False),
    "bytes": ("last five, equal bytes", _equal_bytes, False),
    "chosen": ("chosen, equal rounds", lambda a, b: Paired.of(a, b, readings.chosen), True),
}


def paired_sheets(rows: Sequence[Row]) -> list[Sheet]:
    """Return FedCat's difference to each rival, paired by seed, one table for each way to compare."""
    found = []
    for title, paired, held in COMPARISONS.values():
        methods = [one.case.method for one in rows[0].cells if one.case.method != "fedcat"]
        lines = []
        for row in rows:
            fedcat = row.get("fedcat", held)
            texts = []
            for method in methods:
                rival = row.get(method, held)
                texts.append(EMPTY if fedcat is None or rival is None else paired(fedcat, rival).text)
            if any(text != EMPTY for text in texts):
                lines.append([row.name, *texts])
        note = (
            "By how many points FedCat exceeds each rival with the same seed: mean ± standard error. Bold: the "
            "difference counts, one-sided 95 % (2.9 standard errors with three seeds)."
        )
        if lines:
            found.append(Sheet(f"FedCat minus rival: {title}", ["", *map(_label, methods)], lines, [note]))
    return found


def _label(method: str) -> str:
    return LABELS.get(method, method)


# Rounds and bytes to FedAvg's accuracy


def reach_sheet(rows: Sequence[Row]) -> Sheet:
    """Return the rounds and bytes that each method needs to reach the accuracy at which FedAvg ends."""
    methods = [one.case.method for one in rows[0].cells]
    lines = []
    for row in rows:
        target = reach_target(row)
        if target is not None:
            cells = (row.get(method) for method in methods)
            lines.append([row.name, f"{target:.2f}", *(EMPTY if one is None else _reach(one, target) for one in cells)])
    note = (
        "Rounds, and MB in both directions, until the mean of the last five evaluations first reaches the one at which "
        "FedAvg ends: means over the seeds that reach it."
    )
    return Sheet("To the accuracy at which FedAvg ends", ["", "accuracy", *map(_label, methods)], lines, [note])


def reach_target(row: Row) -> float | None:
    """Return the mean of FedAvg's last five accuracies, or None if it was not run."""
    fedavg = row.get("fedavg")
    return None if fedavg is None else fedavg.mean_std(readings.last_five)[0]


def reach_means(one: Cell, target: float) -> tuple[float, float, int]:
    """Return mean rounds and bytes over the seeds that reach a target, and how many do."""
    places = [(run, reached(run, target)) for run in one.runs]
    known = [(run.rounds[place], run.traffic[place]) for run, place in places if place is not None]
    if not known:
        return math.nan, math.nan, 0
    return sum(r for r, _ in known) / len(known), sum(b for _, b in known) / len(known), len(known)


def _reach(one: Cell, target: float) -> str:
    rounds, moved, count = reach_means(one, target)
    if not count:
        return "never"
    seeds = "" if count == len(one.runs) else f" ({count} of {len(one.runs)} seeds)"
    return f"{rounds:.0f}; {moved / 1e6:,.0f} MB{seeds}"


def traffic_sheet(rows: Sequence[Row]) -> Sheet:
    """Return each method's traffic, relative to FedAvg's."""
    methods = [one.case.method for one in rows[0].cells]
    lines = []
    for row in rows:
        usual, cells = row.get("fedavg"), [row.get(method) for method in methods]
        if usual is not None:
            base = usual.runs[0].traffic[-1]
            shown = [EMPTY if one is None else f"{one.runs[0].traffic[-1] / base:.2f}" for one in cells]
            lines.append([row.name, f"{base / 1e6:,.0f} MB", *shown])
    note = "Training traffic of a run in both directions, relative to FedAvg's, and FedAvg's itself."
    return Sheet("Traffic of a run", ["", "FedAvg's", *map(_label, methods)], lines, [note])


def precision_sheet(rows: Sequence[Row], archive: Archive) -> Sheet:
    """Return cells that were also run in another precision or in exact mode, beside those of the tables."""
    lines = []
    for row in rows:
        for one in row.cells:
            case = one.case
            found = [run for run in archive if replace(run.case, precision=case.precision, exact=case.exact) == case]
            others = {run.case for run in found if run.case != case}
            for other in sorted(others, key=lambda other: (other.precision, other.exact)):
                mine = Cell(other, [run for run in found if run.case == other])
                words = f"{other.precision}{', exact' if other.exact else ''} instead of {case.precision}"
                figures = [mine.text(reading) for reading in (readings.best, readings.last_five)]
                change = Paired.of(mine, one, readings.last_five)
                lines.append([f"{row.name}, {case.label}", words, *figures, change.text])
    note = "Accuracy in %, and the difference of the last five to the cell in the table, paired by seed."
    return Sheet("Cells in another precision", ["", "", "best", "last five", "difference"], lines, [note])


# Claims


def claims_sheet(rows: Sequence[Row]) -> Sheet:
    """Return whether each of the paper's claims holds in the rows that were run."""
    lines = []
    for row in rows:
        for text, held, reading in (("last five", False, readings.last_five), ("chosen", True, readings.chosen)):
            fedcat = row.get("fedcat", held)
            if fedcat is not None and row.rivals(held):
                lines.append([row.name, text, *(claim(row, fedcat, held, reading) for claim in CLAIMS.values())])
    note = "yes and no go by the means over seeds; in brackets what stands against or beside it."
    kept = [0, 1, *(place for place in range(2, 2 + len(CLAIMS)) if any(line[place] != EMPTY for line in lines))]
    lines = [[line[place] for place in kept] for line in lines]
    return Sheet("The paper's claims", [["", "by", *CLAIMS][place] for place in kept], lines, [note])


def _best_claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
    mine = fedcat.mean_std(reading)[0]
    ahead = [one.case.label for one in row.rivals(held) if one.mean_std(reading)[0] > mine]
    open_to = [one.case.label for one in row.rivals(held) if Paired.of(fedcat, one, reading).verdict == "open"]
    if ahead:
        return f"no (higher: {', '.join(ahead)})"
    return "yes" + (f" (does not count: {', '.join(open_to)})" if open_to else "")


def _order_claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
    names = ("fedavg", "fedcat-gc", "fedcat-dc")
    cells = [row.get(name, held) for name in names]
    if any(one is None for one in cells):
        return EMPTY
    fedavg, gc, dc = (one.mean_std(reading)[0] for one in cells if one is not None)
    last = fedcat.mean_std(reading)[0]
    steps = {"GC < FedAvg": gc < fedavg, "DC < FedAvg": dc < fedavg, "FedCat < GC": last < gc, "FedCat < DC": last < dc}
    wrong = [text for text, is_wrong in steps.items() if is_wrong]
    return f"no ({', '.join(wrong)})" if wrong else "yes"


def _reach_claim(part: int) -> Callable[[Row, Cell, bool, Reading], str]:
    """Return the claim that FedCat needs the fewest rounds (part 0) or bytes (part 1)."""

    def claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
        target = reach_target(row)
        if held or target is None:
            return ""
        mine = reach_means(fedcat, target)[part]
        if math.isnan(mine):
            return "no (never)"
        theirs = {one.case.label: reach_means(one, target)[part] for one in row.rivals()}
        faster = [label for label, value in theirs.items() if value < mine]
        return f"no (fewer: {', '.join(faster)})" if faster else "yes"

    return claim


CLAIMS: dict[str, Callable[[Row, Cell, bool, Reading], str]] = {
    "FedCat is the best": _best_claim,
    "FedAvg ≤ GC, DC ≤ FedCat": _order_claim,
    "fewest rounds to FedAvg's accuracy": _reach_claim(0),
    "least traffic to FedAvg's accuracy": _reach_claim(1),
}


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
