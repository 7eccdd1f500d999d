"""Plots of values over rounds, bytes or steps: one line per variant, the mean over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.report.files import check_plot, save

COLORS = ("#1f5f8b", "#c8553d", "#588157", "#8e6c8a", "#d4a017", "#4a4e69", "#2a9d8f", "#9d4edd", "#6c584c", "#e07a5f")
DASHES = ("-", "--", ":", "-.")
TICKS = (10, 50, 70, 80, 85, 90, 95, 98, 99, 99.5, 99.8, 99.9)
"""Where an axis in log error may have ticks, in %."""


@dataclass(frozen=True)
class Curve:
    """One line: the values of several seeds at the same places.

    Attributes
    ----------
    label : str
        The label in the legend; one that begins with an underscore is not shown.
    x : sequence of float
        The places, such as rounds.
    values : sequence of sequence of float
        The values of each seed.
    color, dashes : str
        Its color and style; by default the next ones.
    width : float
        The width of the line.
    """

    label: str
    x: Sequence[float]
    values: Sequence[Sequence[float]]
    color: str = ""
    dashes: str = ""
    width: float = 1.5


def draw_curves(curves: Sequence[Curve], path: str | Path, x_label: str, y_label: str, title: str = "") -> None:
    """Plot curves; a band shows one standard deviation over seeds where there are several."""
    draw_panels({"": curves}, path, x_label, y_label, title, bands=True)


def draw_panels(
    panels: dict[str, Sequence[Curve]],
    path: str | Path,
    x_label: str,
    y_label: str,
    title: str = "",
    *,
    bands: bool = False,
    log: bool = False,
    log_error: bool = False,
) -> None:
    """Plot curves in panels side by side, each with its title; one legend serves all.

    With `bands`, a band shows one standard deviation over seeds where there are several; with `log`, axes are
    logarithmic; with `log_error`, values are percentages near 100 and their axis is logarithmic in what they lack.
    """
    target = Path(path)
    check_plot(target)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = len(panels)
    figure = Figure(figsize=(7.5, 4.6) if count == 1 else (4.3 * count, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    every = np.atleast_1d(figure.subplots(1, count))
    for axes, (name, curves) in zip(every, panels.items(), strict=True):
        for number, curve in enumerate(curves):
            _draw(axes, curve, COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)], bands)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel(x_label, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#eeeeee", linewidth=0.8)
        axes.set_axisbelow(True)
        if log:
            axes.set_xscale("log")
            axes.set_yscale("log")
        if log_error:
            _stretch(axes)
    every[0].set_ylabel(f"{y_label}, log error" if log_error else y_label, fontsize=9)
    named = [sum(not curve.label.startswith("_") for curve in curves) for curves in panels.values()]
    _legend(every[-1], max(named), beside=count > 1)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10, parse_math=False)
    save(figure, target)


def _stretch(axes: Any) -> None:
    """Make the value axis logarithmic in 100 - value."""
    low, high = axes.get_ylim()[0], min(axes.dataLim.ymax, 99.98)
    axes.set_yscale("function", functions=(lambda y: -np.log(np.maximum(100 - y, 0.01)), lambda y: 100 - np.exp(-y)))
    axes.set_ylim(low, high + (100 - high) / 4)
    ticks = [tick for tick in TICKS if low <= tick <= axes.get_ylim()[1]]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])


def _legend(axes: Any, count: int, beside: bool) -> None:
    if count > 1:
        beside = beside or count > 8
        place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if beside else {"loc": "best"}
        for text in axes.legend(frameon=False, fontsize=8, **place).get_texts():
            text.set_parse_math(False)


def _draw(axes: Any, curve: Curve, color: str, dashes: str, bands: bool) -> None:
    values = np.asarray(curve.values, float)
    mean = values.mean(axis=0)
    marker = "o" if len(mean) < 3 else None
    color, style = curve.color or color, {"linestyle": curve.dashes or dashes, "linewidth": curve.width}
    axes.plot(curve.x, mean, label=curve.label, color=color, marker=marker, ms=4, **style)
    if bands and len(values) > 1:
        spread = values.std(axis=0, ddof=1)
        axes.fill_between(curve.x, mean - spread, mean + spread, color=color, alpha=0.12, linewidth=0)
