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
    """Return for every row who the best rival is, and whether FedCat-Plus wins against it."""
    lines = []
    for row in rows:
        for text, held, reading, average in JUDGED:
            mine = row.get(NAME, held)
            found = best_rival(row, held, reading, average)
            if mine is None or found is None:
                continue
            rival, theirs = found
            paired = Paired.of(mine, rival, reading, theirs)
            name = f"{rival.case.label}{', average over rounds' if theirs is average else ''}"
            value = rival.text(theirs)
            lines.append([row.name, text, mine.text(reading), name, value, paired.text, WORDS[paired.verdict]])
    note = (
        "The best rival is the highest mean among all other methods, their variants, and their averages over rounds; "
        f"the difference to it is paired by seed. {SIGNIFICANT} A row is won or lost if it is significant, else a tie. "
        "The `chosen` of an average is its test accuracy when its model has the best validation accuracy."
    )
    columns = ["", "by", label_of(NAME), "best rival", "its accuracy", "difference", ""]
    return Sheet("Rows won", columns, lines, [note])


def best_rival(row: Row, held: bool, reading: Reading, average: Reading) -> tuple[Cell, Reading] | None:
    """Return the cell of the highest mean that is not FedCat-Plus's, and the reading by which it has it."""
    cells = [*row.held, *row.held_variants] if held else [*row.cells, *row.variants]
    usual = cells[0].case
    rivals = [
        (one.mean_std(read)[0], place, one, read)
        for place, one in enumerate(cells)
        for read in (reading, average)
        if one.case.method != NAME and (one.case.precision, one.case.exact) == (usual.precision, usual.exact)
    ]
    known = [rival for rival in rivals if rival[0] == rival[0]]
    _, _, cell, read = max(known, key=lambda rival: rival[:2], default=(None, None, None, None))
    return None if cell is None or read is None else (cell, read)


def early_sheet(rows: Sequence[Row]) -> Sheet:
    """Return FedCat-Plus's difference to FedAvg after few rounds."""
    lines = []
    for row in rows:
        mine, fedavg = row.get(NAME), row.get("fedavg")
        if mine is not None and fedavg is not None:
            reads = [readings.at_round(number) for number in EARLY]
            lines.append([row.name, *(Paired.of(mine, fedavg, read).text or EMPTY for read in reads)])
    note = f"Test accuracy after so many rounds minus FedAvg's, in points, paired by seed. {SIGNIFICANT}"
    return Sheet("Few rounds", ["", *(f"{number} rounds" for number in EARLY)], lines, [note])


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
