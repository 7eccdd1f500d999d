"""What faults cost: six methods on the digits with clients that drop out, send NaN, or turn the sign of their change.

    python benchmarks/faults.py [--seeds 3] [--rounds 100] [--alpha 0.5] [--out docs/results]

All runs train side by side: about ten minutes on two cores. It writes faults.json, faults.md and figures/faults.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import fedcat
from fedcat.report.sheet import Sheet
from fedcat.runs.build import Builder
from fedcat.runs.progress import ProgressDisplay
from fedcat.runs.result import Result
from fedcat.runs.runner import execute

METHODS = ("fedavg", "fedprox", "scaffold", "fedgen", "clusamp", "fedcat")
FLIP = {"flip": 0.2}
LOST: dict[str, dict[str, Any]] = {
    "no faults": {},
    "10 % dropout": {"dropout": 0.1},
    "30 % dropout": {"dropout": 0.3},
    "50 % dropout": {"dropout": 0.5},
    "10 % NaN": {"corrupt": 0.1, "corrupt_kinds": ["nan"]},
}
LIES: dict[str, dict[str, Any]] = {
    "mean": FLIP,
    "clipped": {**FLIP, "aggregator": "clipped"},
    "median": {**FLIP, "aggregator": "median"},
    "trimmed mean": {**FLIP, "aggregator": "trimmed-mean"},
    "krum": {**FLIP, "aggregator": "krum"},
    "guard": {**FLIP, "guard": True},
    "guard, ban after 3": {**FLIP, "guard": True, "ban_after": 3},
    "guard, no liars": {"guard": True},
}
NAMES = {"fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "fedgen": "FedGen", "clusamp": "CluSamp"}
NAMES["fedcat"] = "FedCat"


COLLAPSED = (
    "Cells in which the training loss of a run fell back to chance (see docs/robustness.md). "
    "They count in the means above."
)


def main() -> None:
    """Run, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--per-round", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument(
        "--page", action="store_true", help="write only the page and the figure again, from faults.json"
    )
    words = parser.parse_args()
    stored = words.out / "faults.json"
    if not words.page:
        (words.out / "figures").mkdir(parents=True, exist_ok=True)
        stored.write_text(json.dumps(_study(words), indent=1) + "\n")
    found = json.loads(stored.read_text())
    cells = {(line["method"], line["faults"]): line for line in found["cells"]}
    page = _page(cells, found["about"])
    (words.out / "faults.md").write_text(page, encoding="utf-8")
    _draw(cells, words.out / "figures" / "faults.png")
    print(page)


def _study(words: argparse.Namespace) -> dict[str, Any]:
    """Run all cells side by side."""
    given = {name: getattr(words, name) for name in ("alpha", "rounds", "per_round", "lr")} | {"dataset": "digits"}
    cells = [(method, name, more) for method in METHODS for name, more in {**LOST, **LIES}.items()]
    builder, begin = Builder(), time.perf_counter()
    runs = [
        builder.build({**given, **more, "method": method, "seed": seed}, name=f"{method} {name} {seed}")
        for method, name, more in cells
        for seed in range(words.seeds)
    ]
    labels = [name for _, name, _ in cells for _ in range(words.seeds)]
    results = execute(runs, None, [ProgressDisplay(Console(), runs, labels, scores=False)])
    groups = [results[i : i + words.seeds] for i in range(0, len(results), words.seeds)]
    about = {
        "fedcat": fedcat.__version__,
        "commit": _commit(),
        "torch": str(torch.__version__),
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor(),
        "seconds": round(time.perf_counter() - begin, 1),
        "settings": {**given, "seeds": words.seeds},
    }
    lines = [{"method": m, "faults": n, **_figures(found)} for (m, n, _), found in zip(cells, groups, strict=True)]
    return {"about": about, "cells": lines}


def _figures(results: Sequence[Result]) -> dict[str, Any]:
    """Return what several seeds gave."""
    last = [result.last_five or 0.0 for result in results]
    hops = [hop for result in results for record in result.history for hop in record.hops]
    sound = all(torch.isfinite(p).all() for result in results for p in result.model().parameters())
    return {
        "status": sorted({result.status for result in results}),
        "finite": bool(sound),
        "last_five": last,
        "mean": statistics.fmean(last),
        "std": statistics.stdev(last) if len(last) > 1 else 0.0,
        "lost": sum(not hop.arrived for hop in hops) / len(hops),
        "collapsed": [any("collapsed" in note for note in result.summary.notes) for result in results],
    }


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip()


def _page(cells: Mapping[tuple[str, str], Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """Return the tables as Markdown."""

    def sheet(title: str, names: Sequence[str], notes: Sequence[str]) -> str:
        rows = [[NAMES[m], *(_cell(cells[m, name]) for name in names)] for m in METHODS]
        return Sheet(title, ["method", *names], rows, notes).markdown()

    settings = about["settings"]
    words = (
        f"Digits, 50 clients, {settings['per_round']} per round, alpha {settings['alpha']:g}, "
        f"learning rate {settings['lr']:g}, {settings['rounds']} "
        f"rounds, {settings['seeds']} seeds. Test accuracy in %, mean of the last five ± standard deviation."
    )
    place = f"at commit {about['commit']}, PyTorch {about['torch']}, {about['machine']}"
    made = f"Made by `python benchmarks/faults.py` {place}."
    count, sound = len(cells) * settings["seeds"], all(cell["finite"] for cell in cells.values())
    ended = {status for cell in cells.values() for status in cell["status"]}
    end = f"{count} runs, ended as {', '.join(sorted(ended))}; "
    end += "every number of every model is finite." if sound else "A MODEL HAS NUMBERS THAT ARE NOT FINITE."
    lost = ["The probability is per hop: a client that drops out has got the model and sends nothing."]
    lies = [
        "A fifth of the clients always sends its change with the sign turned. `guard`: hops are judged against the "
        "others of their round, client by client. The last column is what the guard costs if nobody lies."
    ]
    fallen = [(cell, key) for key, cell in cells.items() if any(cell["collapsed"])]
    rows = [[f"{NAMES[method]}, {name}", ", ".join(_seeds(cell["last_five"]))] for cell, (method, name) in fallen]
    third = (
        Sheet("Runs that collapsed", ["cell", "last five of each seed, %"], rows, [COLLAPSED]).markdown()
        if rows
        else ""
    )
    first, second = sheet("Clients that are lost", [*LOST], lost), sheet("Clients that lie", [*LIES], lies)
    head = f"# Faults\n\n{words}\n\n{end} {made}\n\n![Accuracy with faults](figures/faults.png)\n\n"
    return f"{head}{first}\n{second}\n{third}"


def _seeds(values: Sequence[float]) -> list[str]:
    return [f"{100 * value:.1f}" for value in values]


def _cell(cell: Mapping[str, Any]) -> str:
    return f"{100 * cell['mean']:.1f} ± {100 * cell['std']:.1f}"


def _draw(cells: Mapping[tuple[str, str], Mapping[str, Any]], path: Path) -> None:
    """Draw accuracy over dropout, and bars for the defenses against liars."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fedcat.report.curves import COLORS

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.8))
    shares = [more.get("dropout", 0.0) for name, more in LOST.items() if "NaN" not in name]
    names = [name for name in LOST if "NaN" not in name]
    bars = ["no faults", *LIES]
    low = 75
    for number, method in enumerate(METHODS):
        means = [100 * cells[method, name]["mean"] for name in names]
        left.plot([100 * s for s in shares], means, "o-", ms=4, color=COLORS[number], label=NAMES[method])
        places = [bar + 0.13 * (number - 2.5) for bar in range(len(bars))]
        heights = [100 * cells[method, name]["mean"] for name in bars]
        right.bar(places, heights, 0.12, color=COLORS[number])
        for place, name in zip(places, bars, strict=True):
            seeds = [100 * value for value in cells[method, name]["last_five"]]
            right.plot([place] * len(seeds), seeds, "o", ms=2, color="black", mew=0)
    left.set_xlabel("dropout per hop, %", fontsize=9)
    left.set_ylabel("test accuracy, %", fontsize=9)
    right.set_xticks(range(len(bars)), [name.replace(" ", "\n", 1) for name in bars], fontsize=8)
    left.set_title("Clients that drop out", fontsize=9, loc="left")
    right.set_title(
        "20 % of the clients turn the sign of their change, but for the first and last group", fontsize=9, loc="left"
    )
    for axes in (left, right):
        axes.set_ylim(low, 100)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.grid(axis="y", color="#eeeeee", linewidth=0.8)
        axes.set_axisbelow(True)
    figure.legend(frameon=False, fontsize=8, loc="outside right center")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
