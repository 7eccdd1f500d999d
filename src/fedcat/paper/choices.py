"""Choices: numbers that the paper leaves open, chosen on validation data."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from fedcat.config.presets import preset
from fedcat.paper.archive import Archive
from fedcat.paper.case import Case
from fedcat.paper.readings import Cell, Paired, cell, spread_text, validation_last_five
from fedcat.report.sheet import Sheet


def choices_sheet(archive: Archive, rows: Sequence[Sequence[Case]], seeds: Sequence[int]) -> Sheet:
    """Return the validation accuracy of every choice, and its gain over the default, paired by seed."""
    several = len({row[0].dataset for row in rows}) > 1
    names = [row[0].row if several or row[0].alpha is None else f"alpha {row[0].alpha}" for row in rows]
    lines = []
    for cases in zip(*rows, strict=True):
        cells = [cell(archive, case, seeds) for case in cases]
        usual = [
            next(cell(archive, one, seeds) for one in row if _is_default(one) and one.method == cases[0].method)
            for row in rows
        ]
        gain = _gain(cells, usual)
        scores = [spread_text(*one.mean_std(validation_last_five)) or "not run" for one in cells]
        text = "the default" if _is_default(cases[0]) else gain.text
        counts = "" if _is_default(cases[0]) or not gain.differences else f"{gain.needed:.2f}"
        lines.append([cases[0].label, *scores, text, counts])
    note = (
        "Mean of the last five accuracies on the clients' validation data, in %; the test data was not looked at. The "
        "gain is that over the default, averaged over the columns and paired by seed: mean ± standard error. A default "
        "changes only if the gain exceeds what is needed (2.9 standard errors with three seeds)."
    )
    return Sheet("Choices", ["", *names, "gain", "needed"], lines, [note])


def _is_default(case: Case) -> bool:
    """Tell whether a case has the numbers of the preset."""
    usual = preset("lab", "cifar10")["options"].get(case.method, {})
    return dict(case.options) == {name: float(value) for name, value in usual.items()}


def _gain(cells: Sequence[Cell], usual: Sequence[Cell]) -> Paired:
    """Return the gains by seed, each averaged over the rows; only seeds that every row has."""
    by_row = []
    for one, other in zip(cells, usual, strict=True):
        theirs = {run.seed: validation_last_five(run) for run in other.runs}
        by_row.append({r.seed: validation_last_five(r) - theirs[r.seed] for r in one.runs if r.seed in theirs})
    seeds = [seed for seed in by_row[0] if all(seed in row for row in by_row)]
    gains = [statistics.fmean(row[seed] for row in by_row) for seed in seeds]
    return Paired([gain for gain in gains if math.isfinite(gain)])
