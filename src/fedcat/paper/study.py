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
PLUS = (*METHODS, "fedcross", "fedmr", "fedcm", "fedcat-plus")
EVERY = ("fedavg", "fedprox", "scaffold", "fedgen", "clusamp", "fedcat-gc", "fedcat-dc", "fedcat")
ALPHAS = (0.1, 0.5, 1.0)
FIRST_SEED, FIRST_CHOOSING_SEED = 10, 20
"""Tables and choices use different seeds."""
CHOOSING_ROUNDS, CHOOSING_ALPHAS, HELD_OUT = 500, (0.1, 1.0), 0.1

Options = tuple[tuple[str, float | str], ...]
"""Options of a case."""
CLIPPED: Options = (("clip", 10.0),)
FASTER: Options = (("lr", 0.015),)
"""FedCat-Plus takes longer steps at first; the rivals that come nearest may as well."""
NEAREST = ("scaffold", "fedcross", "fedmr")
"""Those rivals."""
LONGER: Options = (("average", 4.0),)
"""FedCat-Plus's average over rounds, for every rival."""
CHOICES: dict[str, list[Options]] = {
    "fedcat": [
        (("epsilon", epsilon), ("lambda", cycles)) for epsilon in (0.0, 0.5, 1.0) for cycles in (1.0, 2.0, 5.0, 10.0)
    ],
    "scaffold": [(), CLIPPED],
    "fedcat-plus": [
        (),
        *((("spread", value),) for value in (0.1, 0.2)),
        *((("own", value),) for value in (0.0, 0.5)),
        *((("gain", value),) for value in (0.0, 0.5)),
    ],
}
"""What is tried for each method whose numbers are chosen on validation data."""
PARTS: list[Options] = [
    *(((name, 0.0),) for name in ("spread", "lead", "own", "gain", "smoothing")),
    (("grouping", False),),
]
"""Each part of FedCat-Plus taken away."""
PARTED = ("cifar10", "femnist", "digits")
"""The datasets on which they are, and on which the nearest rivals take longer steps."""


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
    varied : bool
        Whether it also runs variants of its cells, see `variants`.
    """

    name: str
    title: str
    datasets: tuple[str, ...]
    methods: tuple[str, ...]
    table: bool = False
    varied: bool = False


STUDIES = {
    study.name: study
    for study in (
        Study("table1", "Table 1: test accuracy", ("cifar10", "femnist", "cifar100", "mnist"), METHODS, True),
        Study("table2", "Table 2: ablation", ("cifar10", "cifar100"), ABLATION, True),
        Study("curves", "Test accuracy over rounds", ("cifar10", "femnist", "cifar100", "mnist"), EVERY),
        Study("traffic", "Traffic", ("cifar10", "femnist", "cifar100", "mnist"), METHODS),
        Study("fairness", "Fairness", ("femnist", "cifar10"), EVERY),
        Study("plus", "FedCat-Plus", ("cifar10", "femnist", "cifar100", "mnist"), PLUS, True, True),
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


def variants(table: Sequence[Sequence[Case]]) -> list[list[Case]]:
    """Return variants of a table's cells: rivals with options, FedCat-Plus without each of its parts.

    Cases that have options of their own have no variants. Of those that hold data out, only SCAFFOLD has one.
    """
    found = []
    for row in table:
        plain = [case for case in row if not case.options]
        found.append([replace(case, options=one) for case in plain for one in _tried(case)])
    return [row for row in found if row]


def _tried(case: Case) -> list[Options]:
    parted = case.dataset in PARTED and not case.validation
    if case.method == "fedcat-plus":
        return PARTS if parted else []
    tried = [CLIPPED] if case.method == "scaffold" else []
    if parted and case.method in NEAREST:
        tried.append(FASTER)
    return tried if case.validation else [*tried, LONGER]


def choices(
    datasets: Sequence[str] = ("cifar10",),
    alphas: Sequence[float] = CHOOSING_ALPHAS,
    preset: str = "lab",
    rounds: int | None = None,
    precision: str = "fp32",
    methods: Sequence[str] = ("fedcat", "scaffold"),
) -> list[list[Case]]:
    """Return the cases by which numbers are chosen, one row for each dataset and alpha."""
    count = CHOOSING_ROUNDS if rounds is None else rounds
    return [
        [
            replace(case, options=options, validation=HELD_OUT, choosing=True)
            for case in row
            for options in CHOICES[case.method]
        ]
        for row in rows(datasets, methods, alphas, preset, count, precision)
    ]
