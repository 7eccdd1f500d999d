"""The paper's numbers."""

import itertools

from fedcat.paper.printed import printed
from fedcat.paper.study import ABLATION, ALPHAS, METHODS, STUDIES


def test_numbers_of_table_1():
    assert printed("cifar10", 0.1, "fedcat") == 56.16
    assert printed("cifar10", 0.5, "fedgen") == 53.4
    assert printed("mnist", 1.0, "scaffold") == 99.32
    assert printed("cifar100", 0.5, "clusamp") == 33.96
    assert printed("femnist", None, "fedprox") == 82.61
    assert printed("digits", 0.1, "fedavg") is None
    assert printed("cifar10", 0.2, "fedavg") is None


def test_every_cell_of_both_tables_is_there():
    rows = [(d, a) for d in ("mnist", "cifar10", "cifar100") for a in ALPHAS] + [("femnist", None)]
    assert all(printed(*row, method) is not None for row in rows for method in METHODS)
    ablated = itertools.product(STUDIES["table2"].datasets, ALPHAS, ABLATION)
    assert all(printed(*cell) is not None for cell in ablated)


def test_what_the_paper_claims_holds_in_its_own_numbers():
    rows = [(d, a) for d in ("mnist", "cifar10", "cifar100") for a in ALPHAS] + [("femnist", None)]
    assert all(max(METHODS, key=lambda m: printed(*row, m)) == "fedcat" for row in rows)
    for row in itertools.product(("cifar10", "cifar100"), ALPHAS):
        fedavg, gc, dc, fedcat = (printed(*row, method) for method in ABLATION)
        assert fedavg <= gc <= fedcat
        assert fedavg <= dc <= fedcat
