"""FedCat-Plus against its rivals: which rows it wins, how it starts, and what each of its parts is worth."""

from __future__ import annotations

from collections.abc import Sequence

from fedcat.paper import readings
from fedcat.paper.case import label_of
from fedcat.paper.readings import Cell, Paired, Reading
from fedcat.paper.tables import EMPTY, SIGNIFICANT, Row
from fedcat.report.sheet import Sheet

NAME = "fedcat-plus"
EARLY = (50, 100, 200, 500)
"""Rounds after which it should not be far behind FedAvg."""
WORDS = {"ahead": "won", "behind": "lost", "open": "tie"}
JUDGED: tuple[tuple[str, bool, Reading, Reading], ...] = (
    ("last five", False, readings.last_five, readings.average_last_five),
    ("chosen", True, readings.chosen, readings.average_chosen),
)
"""What rows are judged by: the name, whether data is held out, and the readings of a model and of its average."""


def won_sheet(rows: Sequence[Row]) -> Sheet:
    """Return for every row whether FedCat-Plus wins, and the rival that decides."""
    lines = []
    for row in rows:
        for text, held, reading, average in JUDGED:
            mine = row.get(NAME, held)
            found = None if mine is None else deciding_rival(row, mine, held, (reading, average))
            if mine is None or found is None:
                continue
            rival, theirs, paired = found
            name = f"{rival.case.label}{', average over rounds' if theirs is average else ''}"
            value = rival.text(theirs)
            lines.append([row.name, text, mine.text(reading), name, value, paired.text, WORDS[paired.verdict]])
    note = (
        "Rivals are all other methods, their variants, and their averages over rounds, if they have the same seeds. "
        "A row is lost if a rival is significantly better. It is won if FedCat-Plus is significantly better than the "
        "rival with the highest mean. Else it is a tie. The difference to the rival that decides is paired by seed. "
        f"{SIGNIFICANT} The `chosen` of an average is its test accuracy where its model has the best validation "
        "accuracy."
    )
    columns = ["", "by", label_of(NAME), "rival", "its accuracy", "difference", ""]
    return Sheet("Rows won", columns, lines, [note])


def deciding_rival(
    row: Row, mine: Cell, held: bool, reads: tuple[Reading, Reading]
) -> tuple[Cell, Reading, Paired] | None:
    """Return the rival that is the furthest ahead significantly, else the one with the highest mean; None if alone."""
    cells = [*row.held, *row.held_variants] if held else [*row.cells, *row.variants]
    same = (mine.case.precision, mine.case.exact)
    rivals = [
        (one, read, Paired.of(mine, one, reads[0], read))
        for one in cells
        for read in reads
        if one.case.method != NAME and (one.case.precision, one.case.exact) == same
    ]
    known = [rival for rival in rivals if len(rival[2].differences) == len(mine.runs)]
    better = [rival for rival in known if rival[2].verdict == "behind"]
    return min(better or known, key=lambda rival: rival[2].mean, default=None)


def early_sheet(rows: Sequence[Row]) -> Sheet:
    """Return FedCat-Plus's difference to FedAvg in the first rounds."""
    lines = []
    for row in rows:
        mine, fedavg = row.get(NAME), row.get("fedavg")
        if mine is not None and fedavg is not None:
            reads = [readings.at_round(number) for number in EARLY]
            lines.append([row.name, *(Paired.of(mine, fedavg, read).text or EMPTY for read in reads)])
    note = (
        f"Test accuracy minus FedAvg's at the last evaluation up to a round, in points, paired by seed. {SIGNIFICANT}"
    )
    return Sheet("The first rounds", ["", *(f"{number} rounds" for number in EARLY)], lines, [note])


def parts_sheet(rows: Sequence[Row]) -> Sheet:
    """Return what FedCat-Plus loses without each of its parts."""
    without: dict[str, list[str]] = {}
    known = [row for row in rows if row.get(NAME) is not None and any(_parts(row))]
    for row in known:
        whole = row.get(NAME)
        assert whole is not None
        for one in _parts(row):
            without.setdefault(one.case.label, [""] * len(known))
            without[one.case.label][known.index(row)] = Paired.of(one, whole, readings.last_five).text
    whole_line = [label_of(NAME), *(mine.text(readings.last_five) for row in known if (mine := row.get(NAME)))]
    lines = [whole_line, *([label, *texts] for label, texts in without.items())] if known else []
    note = (
        "The first line is the mean of the last five accuracies, in %; the others are differences to it with an option "
        f"changed, paired by seed: without a part if the option is 0 or false. {SIGNIFICANT}"
    )
    return Sheet("Each part taken away", ["", *(row.name for row in known)], lines, [note])


def _parts(row: Row) -> list[Cell]:
    usual = row.cells[0].case
    same = (usual.precision, usual.exact)
    mine = [one for one in row.variants if one.case.method == NAME and one.runs]
    return [one for one in mine if (one.case.precision, one.case.exact) == same]
