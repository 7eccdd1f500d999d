"""The command `fedcat plot`: a metric over the rounds of a run or of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedcat.cli.tables import say
from fedcat.core.errors import SettingError, unknown_name
from fedcat.models.metrics import METRICS
from fedcat.report.curves import Curve, draw_curves
from fedcat.report.files import check_plot
from fedcat.runs.history import Record
from fedcat.runs.resume import read_plan
from fedcat.runs.run_files import COMPARISON, SUMMARY, read_history, read_summary

AGAINST = {
    "rounds": "round",
    "bytes": "training traffic, MB",
    "seconds": "seconds",
    "simulated": "seconds of the simulated clock",
}
"""What a metric can be plotted against, and the labels of the axis."""

out = Console(highlight=False, markup=False)


def plot(
    folder: Annotated[Path, typer.Argument(help="the directory of a run or of a comparison", show_default=False)],
    metric: Annotated[str, typer.Option(metavar="NAME", help="the metric [the one that was monitored]")] = "",
    against: Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(AGAINST)}")] = "rounds",
    file: Annotated[
        Path | None, typer.Option("--out", help="the file, .png, .svg or .pdf [DIRECTORY/METRIC.png]")
    ] = None,
) -> None:
    """Plot a metric on the test data over the rounds.

    Lines of a comparison are means over seeds; bands show one standard deviation. Of a single run, the other models
    that were evaluated are drawn too, and the metric on the clients' validation data.
    """
    if against not in AGAINST:
        raise unknown_name("against", against, AGAINST)
    runs = _runs(folder)
    first = read_summary(next(iter(runs.values()))[0])
    name = metric or first.monitor
    if name not in first.metrics["global"]:
        raise unknown_name("metric", name, first.metrics["global"])
    target = file or folder / f"{name}.png"
    check_plot(target)
    scale = 100 if name in METRICS and METRICS.get(name).percent else 1
    histories = {label: [read_history(one) for one in folders] for label, folders in runs.items()}
    if len(histories) == 1 and len(next(iter(histories.values()))) == 1:
        curves = _models(next(iter(histories.values()))[0], name, against, scale)
    else:
        curves = _variants(histories, name, against, scale)
    draw_curves(curves, target, AGAINST[against], f"test {name}{', %' if scale == 100 else ''}", folder.absolute().name)
    say(out, f"plot: {target}")


def _variants(
    histories: Mapping[str, Sequence[Sequence[Record]]], metric: str, against: str, scale: float
) -> list[Curve]:
    """Return a curve for each variant, without the runs that were never evaluated."""
    curves = []
    for label, found in histories.items():
        known = [history for history in found if _values(history, metric)]
        if len(known) < len(found):
            say(out, f"note: left out: {len(found) - len(known)} of {len(found)} runs of {label}, never evaluated")
        if known:
            curves.append(_curve(label, [_values(history, metric) for history in known], known[0], against, scale))
    if not curves:
        raise SettingError("no run was ever evaluated: there is nothing to plot")
    return curves


def _runs(folder: Path) -> dict[str, list[Path]]:
    """Return the directories of the runs by label."""
    if (folder / COMPARISON).exists():
        found = {label: [path for _, path in runs] for label, runs in read_plan(folder)}
        if all((path / SUMMARY).exists() for paths in found.values() for path in paths):
            return found
        raise SettingError(f"the comparison in {str(folder)!r} is not finished: plot one of its runs")
    if not (folder / SUMMARY).exists():
        raise SettingError(f"{str(folder)!r} holds neither a finished run nor a comparison")
    return {folder.name: [folder]}


Points = dict[int, float]
"""Values by round."""


def _values(history: Sequence[Record], metric: str, model: str = "global") -> Points:
    found = {r.round: (r.metrics if model == "global" else r.others.get(model, {})) for r in history}
    return {round: metrics[metric] for round, metrics in found.items() if metric in metrics}


def _curve(label: str, seeds: Sequence[Points], like: Sequence[Record], against: str, scale: float) -> Curve:
    """Return the curve of the rounds at which every seed was evaluated."""
    rounds = [round for round in seeds[0] if all(round in seed for seed in seeds)]
    if not rounds:
        raise SettingError(f"{label} was never evaluated: there is nothing to plot")
    places = {record.round: _place(record, against) for record in like}
    values = [[scale * seed[round] for round in rounds] for seed in seeds]
    return Curve(label, [places[round] for round in rounds], values)


def _place(record: Record, against: str) -> float:
    """Return where a round stands on the axis."""
    bytes, seconds, simulated = (record.up + record.down) / 1e6, record.seconds, record.simulated_seconds
    return {"rounds": float(record.round), "bytes": bytes, "seconds": seconds, "simulated": simulated}[against]


def _models(history: Sequence[Record], metric: str, against: str, scale: float) -> list[Curve]:
    """Return the curves of a single run: of each model on the test data, and of the clients' validation data."""
    others = dict.fromkeys(name for record in history for name in record.others if not name.startswith("copy "))
    found = {"global model": _values(history, metric)}
    found |= {name: _values(history, metric, name) for name in others}
    held = {r.round: r.validation[metric]["weighted_mean"] for r in history if metric in r.validation}
    if held:
        found["clients' validation data"] = held
    return [_curve(label, [points], history, against, scale) for label, points in found.items()]
