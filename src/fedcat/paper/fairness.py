"""Fairness: how evenly clients take part, and how accuracy spreads over them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from fedcat.paper.archive import StoredRun
from fedcat.paper.readings import Cell, Paired, Reading
from fedcat.paper.tables import SIGNIFICANT, Row
from fedcat.report.sheet import Sheet
from fedcat.runs.variant_result import SPREAD

SELECTIONS = {
    "fedavg": "uniform (FedAvg)",
    "clusamp": "clustered (CluSamp)",
    "fedcat-gc": "groups and counts (w/ GC)",
    "fedcat-dc": "uniform in chains (w/ DC)",
    "fedcat": "groups and counts in chains (FedCat)",
}
"""The selections, by a method that uses them."""
DRAWN = {"fedavg": "uniform", "clusamp": "clustered", "fedcat": "groups and counts"}
"""Those that a figure shows: chains do not change who takes part."""
CHAINS = ("fedcat-dc", "fedcat")
"""The methods whose copies walk."""
SPREADS = {name: SPREAD[name] for name in ("mean", "worst_decile", "std")}
"""What is shown of how accuracy spreads over the clients."""
COMPARED = ("mean", "worst_decile")
"""In which of them FedCat is compared with the others."""
EARLY = (1, 5)
"""The evaluations at which coverage is shown: all clients have soon taken part."""


def participation_sheets(rows: Sequence[Row]) -> list[Sheet]:
    """Return how evenly each selection lets the clients take part, one table for each row."""
    found = []
    for row in rows:
        cells = [one for method in SELECTIONS if (one := row.get(method)) is not None]
        lines = [[SELECTIONS[one.case.method], *_participation(one)] for one in cells]
        note = (
            "Coverage: clients that have taken part, in %, after so many rounds. Least and most: how often the clients "
            "that took part least and most often did so in the whole run, over all seeds. Entropy of the counts over "
            "its maximum: 1 is perfectly even. Distinct: how many different clients a copy of the model met in a cycle "
            "of K rounds, K at most. All but least and most are means over seeds."
        )
        if cells:
            rounds = _early(cells[0].runs[0])
            columns = ["", *(f"coverage, {r} rounds" for r in rounds), "least", "most", "entropy", "distinct"]
            found.append(Sheet(f"Participation: {row.name}", columns, lines, [note]))
    return found


def _early(run: StoredRun) -> list[int]:
    """Return the rounds at which coverage is shown."""
    return [run.rounds[place - 1] for place in EARLY if place <= len(run.rounds)]


def _participation(one: Cell) -> list[str]:
    def mean(value: Callable[[StoredRun], float]) -> float:
        return statistics.fmean(value(run) for run in one.runs)

    early = [
        f"{100 * mean(lambda run, r=r: run.participation.coverage[run.rounds.index(r)]):.1f}"  # type: ignore[misc]
        for r in _early(one.runs[0])
    ]
    return [
        *early,
        f"{min(min(run.participation.counts) for run in one.runs)}",
        f"{max(max(run.participation.counts) for run in one.runs)}",
        f"{mean(lambda run: run.participation.entropy[-1]):.4f}",
        f"{mean(lambda run: run.participation.distinct):.2f}" if one.case.method in CHAINS else "",
    ]


def client_sheets(rows: Sequence[Row]) -> list[Sheet]:
    """Return how the final model's accuracy spreads over the clients' own test data, for data that has owners."""
    found = []
    for row in rows:
        cells = [one for one in row.cells if one.runs and all(run.clients for run in one.runs)]
        fedcat = next((one for one in cells if one.case.method == "fedcat"), None)
        lines = [[one.case.label, *(one.text(of_clients(name)) for name in SPREADS)] for one in cells]
        columns = ["", *SPREADS.values()]
        notes = [
            "Accuracy of the final model on each client's own test data, in %: mean over the clients, mean over the "
            "worst tenth of them, and deviation over the clients; each ± standard deviation over seeds."
        ]
        if fedcat is not None:
            notes.append(f"FedCat minus it: difference in points between runs with the same seed. {SIGNIFICANT}")
            columns += [f"FedCat minus it: {SPREADS[name]}" for name in COMPARED]
            for line, one in zip(lines, cells, strict=True):
                line += ["" if one is fedcat else Paired.of(fedcat, one, of_clients(name)).text for name in COMPARED]
        if cells:
            found.append(Sheet(f"Accuracy per client: {row.name}", columns, lines, notes))
    return found


def of_clients(name: str) -> Reading:
    """Return the reading of how the final accuracy spreads over the clients."""
    return lambda run: 100 * run.clients[name]
