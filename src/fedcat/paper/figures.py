"""Figures in the paper's form: test accuracy over rounds, or over bytes, one line for each method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedcat.paper.case import Case
from fedcat.paper.readings import Cell
from fedcat.paper.tables import Row
from fedcat.report.curves import Curve, draw_curves

SUFFIXES = (".png", ".pdf")
AGAINST = {"rounds": "round", "bytes": "training traffic, MB"}


def draw_rows(
    rows: Sequence[Row], folder: Path, name: str, methods: Sequence[str], against: str = "rounds"
) -> list[Path]:
    """Draw a figure for each row that has runs of these methods, as PNG and PDF; return the PNG files."""
    drawn = []
    for row in rows:
        known = [one for one in row.cells if one.runs and one.case.method in methods]
        if not known:
            continue
        curves = [_curve(one, against) for one in known]
        seeds = len(known[0].runs)
        title = f"{row.name}: mean over {seeds} seeds, band: one standard deviation" if seeds > 1 else row.name
        path = folder / f"{name}-{slug(known[0].case)}"
        for suffix in SUFFIXES:
            draw_curves(curves, path.with_name(path.name + suffix), AGAINST[against], "test accuracy, %", title)
        drawn.append(path.with_name(path.name + ".png"))
    return drawn


def slug(case: Case) -> str:
    """Return a name for files of a row."""
    words = [case.preset, case.dataset, *([] if case.alpha is None else [f"{case.alpha:g}"]), case.partition]
    return "-".join(filter(None, words))


def _curve(one: Cell, against: str) -> Curve:
    run = one.runs[0]
    places = run.rounds if against == "rounds" else [moved / 1e6 for moved in run.traffic]
    return Curve(one.case.label, [float(x) for x in places], [[100 * a for a in r.accuracy] for r in one.runs])
