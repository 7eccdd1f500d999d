"""A plot of metrics over rounds: one line per variant, the mean over its seeds, with a band of one deviation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.report.files import check_plot, save

COLORS = ("#1f5f8b", "#c8553d", "#588157", "#8e6c8a", "#d4a017", "#4a4e69", "#2a9d8f", "#9d4edd", "#6c584c", "#e07a5f")
DASHES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Curve:
    """One line: the values of several seeds at the same places.

    Attributes
    ----------
    label : str
        The label in the legend.
    x : sequence of float
        The places, such as rounds.
    values : sequence of sequence of float
        The values of each seed.
    """

    label: str
    x: Sequence[float]
    values: Sequence[Sequence[float]]


def draw_curves(curves: Sequence[Curve], path: str | Path, x_label: str, y_label: str, title: str = "") -> None:
    """Plot curves; a band shows one standard deviation over seeds where there are several."""
    target = Path(path)
    check_plot(target)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for number, curve in enumerate(curves):
        _draw(axes, curve, COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)])
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    if len(curves) > 1:
        beside = len(curves) > 8
        place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if beside else {"loc": "best"}
        for text in axes.legend(frameon=False, fontsize=8, **place).get_texts():
            text.set_parse_math(False)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    save(figure, target)


def _draw(axes: Any, curve: Curve, color: str, dashes: str) -> None:
    values = np.asarray(curve.values, float)
    mean = values.mean(axis=0)
    marker = "o" if len(mean) < 3 else None
    axes.plot(curve.x, mean, label=curve.label, color=color, linestyle=dashes, linewidth=1.5, marker=marker, ms=4)
    if len(values) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(curve.x, mean - spread, mean + spread, color=color, alpha=0.12, linewidth=0)
