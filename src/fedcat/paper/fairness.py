"""Fairness: how evenly clients take part, and how accuracy spreads over them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from fedcat.paper.archive import StoredRun
from fedcat.paper.readings import Cell, spread_text
from fedcat.paper.tables import Row
from fedcat.report.sheet import Sheet
from fedcat.runs.comparison import mean_std

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
        names = {"mean": "mean", "worst_decile": "worst tenth", "std": "deviation"}
        lines = [[one.case.label, *(_spread(one, name) for name in names)] for one in cells]
        note = "Accuracy of the final model on each client's own test data, in %: mean ± standard deviation over seeds."
        if cells:
            found.append(Sheet(f"Accuracy per client: {row.name}", ["", *names.values()], lines, [note]))
    return found


def _spread(one: Cell, name: str) -> str:
    return spread_text(*mean_std([100 * run.clients[name] for run in one.runs]))
