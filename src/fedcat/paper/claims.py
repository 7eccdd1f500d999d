"""The paper's claims: rounds and bytes to FedAvg's accuracy, traffic, and whether each claim holds in our runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from fedcat.paper import readings
from fedcat.paper.readings import Cell, Paired, Reading, reached
from fedcat.paper.tables import EMPTY, Row, labels
from fedcat.report.sheet import Sheet

ENOUGH = 10
"""Evaluations from which on it makes sense to ask when an accuracy was reached."""


def reach_sheet(rows: Sequence[Row]) -> Sheet:
    """Return the rounds and bytes that each method needs to reach the accuracy at which FedAvg ends."""
    methods = labels(rows)
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
    return Sheet("To the accuracy at which FedAvg ends", ["", "accuracy", *methods.values()], lines, [note])


def reach_targets(row: Row) -> dict[int, float]:
    """Return the mean of FedAvg's last five accuracies by seed; nothing if it was not run, or not for long."""
    fedavg = row.get("fedavg")
    if fedavg is None or any(len(run.accuracy) < ENOUGH for run in fedavg.runs):
        return {}
    return {run.seed: readings.last_five(run) for run in fedavg.runs}


def reach_by_seed(one: Cell, targets: Mapping[int, float]) -> dict[int, tuple[int, int]]:
    """Return the rounds and bytes to the target, by seed; seeds that do not reach it are left out."""
    places = [(run, reached(run, targets[run.seed])) for run in one.runs if run.seed in targets]
    return {run.seed: (run.rounds[place], run.traffic[place]) for run, place in places if place is not None}


def _reach(one: Cell, targets: Mapping[int, float]) -> str:
    found = list(reach_by_seed(one, targets).values())
    if not found:
        return "never"
    rounds, moved = (statistics.fmean(values) for values in zip(*found, strict=True))
    seeds = "" if len(found) == len(targets) else f" ({len(found)} of {len(targets)} seeds)"
    return f"{rounds:.0f}; {moved / 1e6:,.0f} MB{seeds}"


def traffic_sheet(rows: Sequence[Row]) -> Sheet:
    """Return each method's traffic, relative to FedAvg's."""
    methods = labels(rows)
    lines = []
    for row in rows:
        usual, cells = row.get("fedavg"), [row.get(method) for method in methods]
        if usual is not None:
            base = usual.runs[0].traffic[-1]
            shown = [EMPTY if one is None else f"{one.runs[0].traffic[-1] / base:.2f}" for one in cells]
            lines.append([row.name, f"{base / 1e6:,.0f} MB", *shown])
    note = "Training traffic of a run in both directions, relative to FedAvg's, and FedAvg's itself."
    return Sheet("Traffic of a run", ["", "FedAvg's", *methods.values()], lines, [note])


def claims_sheet(rows: Sequence[Row], claims: Sequence[str]) -> Sheet:
    """Return whether each of the paper's claims holds in the rows that were run."""
    lines = []
    for row in rows:
        for text, held, reading in (("last five", False, readings.last_five), ("chosen", True, readings.chosen)):
            fedcat = row.get("fedcat", held)
            if fedcat is not None and row.rivals(held):
                lines.append([row.name, text, *(CLAIMS[claim](row, fedcat, held, reading) for claim in claims)])
    note = (
        "Yes and no go by the mean of the differences with the same seed; in brackets what speaks against it, and "
        "which differences are not significant. To reach FedAvg's accuracy, a method must do so with every seed."
    )
    known = [place for place in range(2, 2 + len(claims)) if any(line[place] for line in lines)]
    lines = [[*line[:2], *(line[place] for place in known)] for line in lines] if known else []
    return Sheet("The paper's claims", ["", "by", *(claims[place - 2] for place in known)], lines, [note])


def _verdict(against: Sequence[str], ties: Sequence[str], unsure: Sequence[str], word: str) -> str:
    words = [f"{word}: {', '.join(against)}"] if against else []
    words += [f"equal: {', '.join(ties)}"] if ties else []
    words += [f"not significant: {', '.join(unsure)}"] if unsure else []
    return ("no" if against else "yes") + (f" ({'; '.join(words)})" if words else "")


def _best_claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
    pairs = {one.case.label: Paired.of(fedcat, one, reading) for one in row.rivals(held)}
    return _verdict(
        [label for label, paired in pairs.items() if paired.mean < 0],
        [label for label, paired in pairs.items() if paired.mean == 0],
        [label for label, paired in pairs.items() if paired.verdict == "open"],
        "higher",
    )


def _order_claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
    fedavg, gc, dc = (row.get(name, held) for name in ("fedavg", "fedcat-gc", "fedcat-dc"))
    if fedavg is None or gc is None or dc is None:
        return EMPTY
    steps = {
        "FedAvg, GC": (fedavg, gc),
        "FedAvg, DC": (fedavg, dc),
        "GC, FedCat": (gc, fedcat),
        "DC, FedCat": (dc, fedcat),
    }
    pairs = {label: Paired.of(upper, lower, reading) for label, (lower, upper) in steps.items()}
    return _verdict(
        [label.replace(", ", " > ") for label, paired in pairs.items() if paired.mean < 0],
        [],
        [label.replace(", ", " and ") for label, paired in pairs.items() if paired.verdict == "open"],
        "but",
    )


def _reach_claim(part: int) -> Callable[[Row, Cell, bool, Reading], str]:
    """Return the claim that FedCat needs the fewest rounds (part 0) or bytes (part 1)."""

    def claim(row: Row, fedcat: Cell, held: bool, reading: Reading) -> str:
        targets = reach_targets(row)
        if held or not targets:
            return ""
        mine = reach_by_seed(fedcat, targets)
        if len(mine) < len(targets):
            return "no (not with every seed)"
        pairs = {}
        for one in row.rivals():
            theirs = reach_by_seed(one, targets)
            if len(theirs) == len(targets):
                pairs[one.case.label] = Paired([theirs[seed][part] - mine[seed][part] for seed in mine])
        return _verdict(
            [label for label, paired in pairs.items() if paired.mean < 0],
            [label for label, paired in pairs.items() if paired.mean == 0],
            [label for label, paired in pairs.items() if paired.verdict == "open" and paired.mean != 0],
            "fewer",
        )

    return claim


BEST, ORDER, ROUNDS, TRAFFIC = (
    "FedCat is the best",
    "FedAvg ≤ GC, DC ≤ FedCat",
    "fewest rounds to FedAvg's accuracy",
    "least traffic to FedAvg's accuracy",
)
CLAIMS: dict[str, Callable[[Row, Cell, bool, Reading], str]] = {
    BEST: _best_claim,
    ORDER: _order_claim,
    ROUNDS: _reach_claim(0),
    TRAFFIC: _reach_claim(1),
}
