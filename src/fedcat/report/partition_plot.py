"""A plot of a partition: the samples per client and class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedcat.data.federation import Federation
from fedcat.report.files import check_plot, save

BUBBLES = 120
"""More clients than this are drawn as a heatmap, sorted by their most frequent class."""
LABELS = 62
"""More classes than this get no names on the axis."""
_INK = "#1f5f8b"


def draw_partition(federation: Federation, path: str | Path, title: str = "") -> None:
    """Plot a federation: samples per client above, samples per client and class below.

    Up to 120 clients are drawn as bubbles, with area proportional to the number of samples; more as a heatmap.

    Parameters
    ----------
    federation : Federation
        The federation to plot.
    path : path
        The file to write, a .png, .svg or .pdf.
    title : str
        The title; by default the federation's description.
    """
    target = Path(path)
    check_plot(target)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = federation.class_counts
    many = federation.clients > BUBBLES
    order = _by_main_class(counts) if many else np.arange(federation.clients)
    height = float(np.clip(1.9 + 0.24 * federation.classes, 3.8, 12))
    figure = Figure(figsize=(float(np.clip(2.2 + 0.1 * federation.clients, 7, 13)), height), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, max(2.2, 0.22 * federation.classes)))
    figure.suptitle(title or str(federation), x=0.01, ha="left", fontsize=11, parse_math=False)
    _sizes(above, federation.sizes[order])
    if many:
        _heatmap(figure, below, counts[order])
    else:
        _bubbles(below, counts)
    _axes(below, federation, many)
    save(figure, target)


def _sizes(axes: Any, sizes: np.ndarray) -> None:
    axes.bar(np.arange(len(sizes)), sizes, width=0.8 if len(sizes) <= BUBBLES else 1.0, color="#9db8c9")
    axes.set_ylabel("samples", fontsize=9)
    axes.tick_params(labelsize=8, bottom=False)
    axes.spines[["top", "right"]].set_visible(False)


def _bubbles(axes: Any, counts: np.ndarray) -> None:
    client, label = np.nonzero(counts)
    found = counts[client, label]
    largest = float(found.max())
    axes.scatter(client, label, s=150 * found / largest, color=_INK, alpha=0.75, linewidths=0)
    for share in (1.0, 0.25, 0.05):
        amount = max(1, round(share * largest))
        axes.scatter([], [], s=150 * amount / largest, color=_INK, alpha=0.75, linewidths=0, label=f"{amount:,}")
    axes.legend(
        title="samples", loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, title_fontsize=8
    )
    axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)


def _heatmap(figure: Any, axes: Any, counts: np.ndarray) -> None:
    shares = counts / counts.sum(axis=1, keepdims=True)
    image = axes.imshow(shares.T, aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="share of the client's samples", pad=0.01)


def _axes(axes: Any, federation: Federation, many: bool) -> None:
    order = ", sorted by most frequent class" if many else ""
    axes.set_xlabel(f"client ({federation.clients:,} in total{order})", fontsize=9)
    axes.set_ylabel("class", fontsize=9)
    axes.set_xlim(-1, federation.clients)
    axes.set_ylim(federation.classes - 0.4, -0.6)
    if federation.classes <= LABELS:
        names = federation.class_names or [str(label) for label in range(federation.classes)]
        axes.set_yticks(range(federation.classes), names, parse_math=False)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _by_main_class(counts: np.ndarray) -> np.ndarray:
    """Return the clients sorted by their most frequent class, then by its share (largest first)."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.lexsort((-shares.max(axis=1), shares.argmax(axis=1)))
