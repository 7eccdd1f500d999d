"""Studies: which cases each of the paper's tables and figures needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedcat.core.options import options as options_of
from fedcat.data.partitions import PARTITIONS
from fedcat.paper.case import Case, default_rounds, has_alpha

METHODS = ("fedavg", "fedprox", "scaffold", "fedgen", "clusamp", "fedcat")
ABLATION = ("fedavg", "fedcat-gc", "fedcat-dc", "fedcat")
EVERY = ("fedavg", "fedprox", "scaffold", "fedgen", "clusamp", "fedcat-gc", "fedcat-dc", "fedcat")
ALPHAS = (0.1, 0.5, 1.0)
FIRST_SEED, FIRST_CHOOSING_SEED = 10, 20
"""Tables and choices use different seeds."""
CHOOSING_ROUNDS, CHOOSING_ALPHAS, HELD_OUT = 500, (0.1, 1.0), 0.1


@dataclass(frozen=True)
class Study:
    """What one of the paper's tables or figures needs.

    Attributes
    ----------
    name, title : str
        The command, and what it shows.
    datasets, methods : tuple of str
        Those of the paper.
    table : bool
        Whether it is a table, which also shows runs with data held out, and variants of its cells.
    """

    name: str
    title: str
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    table: bool = False


STUDIES = {
    study.name: study
    for study in (
        Study("table1", "Table 1: test accuracy", ("cifar10", "femnist", "cifar100", "mnist"), METHODS, True),
        Study("table2", "Table 2: ablation", ("cifar10", "cifar100"), ABLATION, True),
        Study("curves", "Test accuracy over rounds", ("cifar10", "femnist", "cifar100", "mnist"), EVERY),
        Study("traffic", "Traffic", ("cifar10", "femnist", "cifar100", "mnist"), METHODS),
        Study("fairness", "Fairness", ("femnist", "cifar10"), EVERY),
    )
}


def rows(
    datasets: Sequence[str],
    methods: Sequence[str],
    alphas: Sequence[float] = ALPHAS,
    preset: str = "lab",
    rounds: int | None = None,
    precision: str = "fp32",
    partition: str = "",
    validation: float = 0.0,
    exact: bool = False,
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[list[Case]]:
    """Return the cases of a table, row by row: each dataset with each alpha, if it is divided by one.

    `options` are those of single methods that differ from the preset's.
    """
    changed = {method: tuple(sorted(table.items())) for method, table in (options or {}).items()}
    takes_alpha = not partition or "alpha" in options_of(PARTITIONS.get(partition))
    return [
        [
            Case(
                *(dataset, method, alpha, preset, default_rounds(dataset, preset) if rounds is None else rounds),
                precision,
                partition=partition if has_alpha(dataset, preset) else "",
                validation=validation,
                options=changed.get(method, ()),
                exact=exact,
            )
            for method in methods
        ]
        for dataset in datasets
        for alpha in (alphas if has_alpha(dataset, preset) and takes_alpha else (None,))
    ]


def choices(
    dataset: str = "cifar10",
    alphas: Sequence[float] = CHOOSING_ALPHAS,
    preset: str = "lab",
    rounds: int | None = None,
    precision: str = "fp32",
) -> list[list[Case]]:
    """Return the cases by which the numbers that the paper leaves open are chosen, one row for each alpha."""
    fedcat = [
        (("epsilon", epsilon), ("lambda", cycles)) for epsilon in (0.0, 0.5, 1.0) for cycles in (1.0, 2.0, 5.0, 10.0)
    ]
    scaffold: list[tuple[tuple[str, float], ...]] = [(), (("clip", 10.0),)]
    found = []
    for alpha in alphas:
        base = Case(
            *(dataset, "fedcat", alpha, preset, CHOOSING_ROUNDS if rounds is None else rounds, precision),
            validation=HELD_OUT,
            choosing=True,
        )
        found.append([replace(base, options=chosen) for chosen in fedcat])
        found[-1] += [replace(base, method="scaffold", options=chosen) for chosen in scaffold]
    return found
