"""The paper's claims: rounds and bytes to FedAvg's accuracy, traffic, and whether each claim holds in our runs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from fedcat.paper import readings
from fedcat.paper.readings import Cell, Paired, Reading, reached
from fedcat.paper.tables import EMPTY, Row, label_of
from fedcat.report.sheet import Sheet


def reach_sheet(rows: Sequence[Row]) -> Sheet:
    """Return the rounds and bytes that each method needs to reach the accuracy at which FedAvg ends."""
    methods = [one.case.method for one in rows[0].cells]
    lines = []
    for row in rows:
        targets = reach_targets(row)
        if targets:
            cells = (row.get(method) for method in methods)
            shown = [EMPTY if one is None else _reach(one, targets) for one in cells]
            lines.append([row.name, f"{statistics.fmean(targets.values()):.2f}", *shown])
    note = (
        "Rounds, and MB in both directions, until the mean of the last five evaluations first reaches the one at which "
        "FedAvg ends with the same seed: means over the seeds that reach it."
    )
    return Sheet("To the accuracy at which FedAvg ends", ["", "accuracy", *map(label_of, methods)], lines, [note])


def reach_targets(row: Row) -> dict[int, float]:
    """Return the mean of FedAvg's last five accuracies by seed; nothing if it was not run."""
    fedavg = row.get("fedavg")
    return {} if fedavg is None else {run.seed: readings.last_five(run) for run in fedavg.runs}


def reach_means(one: Cell, targets: Mapping[int, float]) -> tuple[float, float, int]:
    """Return mean rounds and bytes over the seeds that reach their target, and how many do."""
    places = [(run, reached(run, targets.get(run.seed, math.inf))) for run in one.runs]
    known = [(run.rounds[place], run.traffic[place]) for run, place in places if place is not None]
    if not known:
        return math.nan, math.nan, 0
    return sum(r for r, _ in known) / len(known), sum(b for _, b in known) / len(known), len(known)


def _reach(one: Cell, targets: Mapping[int, float]) -> str:
    rounds, moved, count = reach_means(one, targets)
    if not count:
        return "never"
    seeds = "" if count == len(one.runs) else f" ({count} of {len(one.runs)} seeds)"
    return f"{rounds:.0f}; {moved / 1e6:,.0f} MB{seeds}"


def traffic_sheet(rows: Sequence[Row]) -> Sheet:
    """Return each method's traffic, relative to FedAvg's."""
    methods = [one.case.method for one in rows[0].cells]
    lines = []
    for row in rows:
        usual, cells = row.get("fedavg"), [row.get(method) for method in methods]
        if usual is not None:
            base = usual.runs[0].traffic[-1]
            shown = [EMPTY if one is None else f"{one.runs[0].traffic[-1] / base:.2f}" for one in cells]
            lines.append([row.name, f"{base / 1e6:,.0f} MB", *shown])
    note = "Training traffic of a run in both directions, relative to FedAvg's, and FedAvg's itself."
    return Sheet("Traffic of a run", ["", "FedAvg's", *map(label_of, methods)], lines, [note])


def claims_sheet(rows: Sequence[Row]) -> Sheet:
    """Return whether each of the paper's claims holds in the rows that were run."""
    lines = []
    for row in rows:
        for text, held, reading in (("last five", False, readings.last_five), ("chosen", True, readings.chosen)):
            fedcat = row.get("fedcat", held)
            if fedcat is not None and row.rivals(held):
                lines.append([row.name, text, *(claim(row, fedcat, held, reading) for claim in CLAIMS.values())])
    note = (
        "Yes and no go by the means over seeds; in brackets what stands against it, and which differences do not "
        "count. A method reaches FedAvg's accuracy if it does so with every seed."
    )
    kept = [0, 1, *(place for place in range(2, 2 + len(CLAIMS)) if any(line[place] != EMPTY for line in lines))]
    lines = [[line[place] for place in kept] for line in lines]
    return Sheet("The paper's claims", [["", "by", *CLAIMS][place] for place in kept], lines, [note])


def _best_claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
    mine = fedcat.mean_std(reading)[0]
    ahead = [one.case.label for one in row.rivals(held) if one.mean_std(reading)[0] > mine]
    open_to = [one.case.label for one in row.rivals(held) if Paired.of(fedcat, one, reading).verdict == "open"]
    words = [f"higher: {', '.join(ahead)}"] if ahead else []
    words += [f"the difference does not count: {', '.join(open_to)}"] if open_to else []
    return ("no" if ahead else "yes") + (f" ({'; '.join(words)})" if words else "")


def _order_claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
    names = ("fedavg", "fedcat-gc", "fedcat-dc")
    cells = [row.get(name, held) for name in names]
    if any(one is None for one in cells):
        return EMPTY
    fedavg, gc, dc = (one.mean_std(reading)[0] for one in cells if one is not None)
    last = fedcat.mean_std(reading)[0]
    steps = {"GC < FedAvg": gc < fedavg, "DC < FedAvg": dc < fedavg, "FedCat < GC": last < gc, "FedCat < DC": last < dc}
    wrong = [text for text, is_wrong in steps.items() if is_wrong]
    return f"no ({', '.join(wrong)})" if wrong else "yes"


def _reach_claim(part: int) -> Callable[[Row, Cell, bool, Reading], str]:
    """Return the claim that FedCat needs the fewest rounds (part 0) or bytes (part 1)."""

    def claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
        targets = reach_targets(row)
        if held or not targets:
            return ""
        found = {one.case.label: (reach_means(one, targets), len(one.runs)) for one in (fedcat, *row.rivals())}
        means = {label: reach[part] for label, (reach, seeds) in found.items() if reach[2] == seeds}
        if fedcat.case.label not in means:
            return "no (not with every seed)"
        fewer = [label for label, value in means.items() if value < means[fedcat.case.label]]
        return f"no (fewer: {', '.join(fewer)})" if fewer else "yes"

    return claim


CLAIMS: dict[str, Callable[[Row, Cell, bool, Reading], str]] = {
    "FedCat is the best": _best_claim,
    "FedAvg ≤ GC, DC ≤ FedCat": _order_claim,
    "fewest rounds to FedAvg's accuracy": _reach_claim(0),
    "least traffic to FedAvg's accuracy": _reach_claim(1),
}
