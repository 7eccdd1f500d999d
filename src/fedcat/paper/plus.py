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
SEEDS_IN_COMMON = 3
"""How many seeds a rival must share, so that rows that are close can have more seeds than rivals far behind."""
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
            name = f"{rival.case.label}{', average' if theirs is average else ''}"
            ours, value = mine.common(rival).text(reading), rival.common(mine).text(theirs)
            judged = [ours, name, value, paired.text, WORDS[paired.verdict]]
            lines.append([row.name, text, str(len(paired.differences)), *judged])
    note = (
        "Rivals are all other methods, their variants, and their averages over rounds, if they have at least three "
        "seeds in common with FedCat-Plus. "
        "A row is lost if a rival is significantly better. It is won if FedCat-Plus is significantly better than the "
        "rival that comes nearest in the mean. Else it is a tie. All figures are those of the seeds that both have. "
        "The difference to the rival that decides is paired by seed. "
        f"{SIGNIFICANT} `average`: that over rounds; its `chosen` is its test accuracy where its model has the best "
        "validation accuracy."
    )
    columns = ["", "by", "seeds", label_of(NAME), "rival", "its accuracy", "difference", ""]
    return Sheet("Rows won", columns, lines, [note])


def deciding_rival(
    row: Row, mine: Cell, held: bool, reads: tuple[Reading, Reading]
) -> tuple[Cell, Reading, Paired] | None:
    """Return the rival that is the furthest ahead significantly, else the one that is nearest; None if alone."""
    cells = [*row.held, *row.held_variants] if held else [*row.cells, *row.variants]
    rivals = [
        (one, read, Paired.of(mine, one, reads[0], read))
        for one in cells
        for read in reads
        if one.case.method != NAME and _alike(one, mine)
    ]
    known = [rival for rival in rivals if len(rival[2].differences) >= min(len(mine.runs), SEEDS_IN_COMMON)]
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
    known = [(row.name, whole, _parts(row, whole)) for row in rows if (whole := row.get(NAME)) is not None]
    known = [(name, whole, parts) for name, whole, parts in known if parts]
    lines = [[label_of(NAME), *(whole.text(readings.last_five) for _, whole, _ in known)]] if known else []
    for label in dict.fromkeys(label for *_, parts in known for label in parts):
        pairs = [
            Paired.of(parts[label], whole, readings.last_five) if label in parts else None for _, whole, parts in known
        ]
        lines.append([label, *("" if pair is None else pair.text for pair in pairs)])
    note = (
        "The first line is the mean of the last five accuracies, in %; the others are differences to it with an option "
        f"changed, paired by seed: without a part if the option is 0 or false. {SIGNIFICANT}"
    )
    return Sheet("Each part taken away", ["", *(name for name, *_ in known)], lines, [note])


def _parts(row: Row, whole: Cell) -> dict[str, Cell]:
    mine = [one for one in row.variants if one.case.method == NAME and one.runs and _alike(one, whole)]
    return {one.case.label: one for one in mine}


def _alike(one: Cell, other: Cell) -> bool:
    return (one.case.precision, one.case.exact) == (other.case.precision, other.case.exact)
