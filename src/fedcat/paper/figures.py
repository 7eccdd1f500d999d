"""Figures in the paper's form: one panel for each alpha, one line for each method."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from fedcat.paper.archive import StoredRun
from fedcat.paper.readings import Cell, failed
from fedcat.paper.tables import Row
from fedcat.paper.theorem import Measured
from fedcat.report.curves import COLORS, Curve, draw_panels

SUFFIXES = (".png", ".pdf")
NEAR = 80
"""From this accuracy on, in %, lines are told apart on a logarithmic axis of errors only."""
METHOD_COLORS = dict(zip(("fedavg", "fedprox", "scaffold", "fedgen", "clusamp"), COLORS, strict=False)) | {
    "fedcat": "#111111",
    "fedcat-gc": COLORS[6],
    "fedcat-dc": COLORS[7],
    "fedcross": COLORS[6],
    "fedmr": COLORS[8],
    "fedcm": COLORS[7],
    "fedcat-plus": "#d00000",
}
"""Each method has one color in all figures; FedCat is black, FedCat-Plus red, and both are thicker."""
THICK = ("fedcat", "fedcat-plus")

Line = Callable[[StoredRun], tuple[Sequence[float], Sequence[float]]]
"""Returns the places and values of a run's line."""


def accuracy_over_rounds(run: StoredRun) -> tuple[Sequence[float], Sequence[float]]:
    """Return the test accuracies in % over rounds."""
    return run.rounds, [100 * value for value in run.accuracy]


def accuracy_over_bytes(run: StoredRun) -> tuple[Sequence[float], Sequence[float]]:
    """Return the test accuracies in % over the MB moved so far."""
    return [moved / 1e6 for moved in run.traffic], [100 * value for value in run.accuracy]


def draw_rows(
    rows: Sequence[Row], path: Path, methods: Collection[str], line: Line, x_label: str, y_label: str
) -> list[Path]:
    """Draw a figure for each dataset, a panel for each of its rows, as PNG and PDF; return the PNG files."""
    panels: dict[Row, list[Curve]] = {row: [] for row in rows}
    for row, curves in panels.items():
        for number, one in enumerate(cell for cell in row.cells if cell.case.method in methods):
            curves += _curves(one, line, METHOD_COLORS.get(one.case.method, COLORS[number % len(COLORS)]))
    return _draw(panels, path, x_label, y_label)


def draw_participation(rows: Sequence[Row], path: Path, labels: Mapping[str, str]) -> list[Path]:
    """Draw how often the clients that took part most and least often had done so, over what is even."""
    panels: dict[Row, list[Curve]] = {}
    for row in rows:
        panels[row] = []
        for one in (cell for cell in row.cells if cell.runs and cell.case.method in labels):
            color, run = METHOD_COLORS[one.case.method], one.runs[0]
            even = [r / run.rounds[-1] * statistics.fmean(run.participation.counts) for r in run.rounds]
            for name, dashes in (("most", "-"), ("least", "--")):
                counts = [getattr(each.participation, name) for each in one.runs]
                values = [[count / mean for count, mean in zip(mine, even, strict=True)] for mine in counts]
                label = labels[one.case.method] if name == "most" else "_"
                panels[row].append(Curve(label, run.rounds, values, color, dashes))
    return _draw(panels, path, "round", "participations / mean: most (solid), least")


def _draw(panels: Mapping[Row, list[Curve]], path: Path, x_label: str, y_label: str) -> list[Path]:
    """Draw a figure for each dataset, a panel for each row that has lines."""
    by_dataset: dict[str, dict[str, list[Curve]]] = {}
    for row, curves in panels.items():
        if curves:
            by_dataset.setdefault(_slug(row), {})[row.name] = curves
    return [
        _save(mine, path.with_name(f"{path.name}-{name}"), x_label, y_label, log_error=_near(mine))
        for name, mine in by_dataset.items()
    ]


def _near(panels: Mapping[str, list[Curve]]) -> bool:
    """Tell whether most lines end so high that a linear axis would not tell them apart."""
    return statistics.median(v[-1] for curves in panels.values() for curve in curves for v in curve.values) > NEAR


def draw_theorem(found: Measured, path: Path) -> Path:
    """Draw the measured gaps and the bounds over SGD steps on log axes."""
    curves = []
    for label, gaps in found.gaps.items():
        method, _, shuffled = label.partition(", ")
        color = METHOD_COLORS[method.lower()]
        curves.append(Curve(f"{label}, measured", found.steps, gaps, color, ":" if shuffled else "-"))
        if not shuffled:
            bounds = [found.constants.bound(t, found.constants.chain(label)) for t in found.steps]
            curves.append(Curve(f"{label}, bound", found.steps, [bounds], color, "--"))
    return _save({"": curves}, path, "SGD steps t", "F(mean of the copies) - F*", log=True)


def _save(
    panels: dict[str, list[Curve]], path: Path, x_label: str, y_label: str, log: bool = False, log_error: bool = False
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    for suffix in SUFFIXES:
        draw_panels({**panels}, path.with_name(path.name + suffix), x_label, y_label, log=log, log_error=log_error)
    return path.with_name(path.name + ".png")


def _slug(row: Row) -> str:
    """Return a name for the files of a dataset."""
    case = row.cells[0].case
    return "-".join(filter(None, [case.preset, case.dataset, case.partition, *row.file_parts]))


def _curves(one: Cell, line: Line, color: str) -> list[Curve]:
    """Return a cell's line, the mean over its seeds; a thin one for each seed if a run failed."""
    lines = [line(run) for run in one.runs]
    method = one.case.method
    width, dashes = 2.2 if method in THICK else 1.2, "--" if method == "fedprox" else "-"
    if lines and not any(map(failed, one.runs)):
        return [Curve(one.case.label, lines[0][0], [values for _, values in lines], color, dashes, width)]
    labels = [one.case.label, *["_"] * len(lines)]
    return [
        Curve(label, x, [values], color, dashes, width / 2) for label, (x, values) in zip(labels, lines, strict=False)
    ]
