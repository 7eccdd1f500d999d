import numpy as np
import pytest

from fedcat.data.federation import Federation
from fedcat.data.pool import Pool
from fedcat.data.skew import Skew


def made(labels, owner, classes):
    pool = Pool(np.zeros((len(labels), 1)), np.array(labels))
    return Federation(pool, pool, np.array(owner), classes)


def test_one_class_each_is_as_skewed_as_it_gets():
    skew = Skew.of(made([0, 0, 1, 1], [0, 0, 1, 1], 2))
    assert skew == Skew((2, 2, 2), (1, 1, 1), 1.0, 0.5, 1.0)


def test_clients_that_look_alike_have_no_skew():
    skew = Skew.of(made([0, 1, 0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 1, 1, 2, 2], 2))
    assert (skew.samples, skew.classes, skew.distance) == ((2, 2, 4), (2, 2, 2), 0.0)
    assert skew.effective_classes == pytest.approx(2.0)
    assert skew.largest_share == 0.5


def test_by_hand():
    """Shares (3/4, 1/4) and (0, 1) against the whole (1/2, 1/2); entropies by hand."""
    skew = Skew.of(made([0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1], 2))
    assert skew.distance == pytest.approx((0.25 + 0.5) / 2)
    assert skew.effective_classes == pytest.approx((np.exp(-0.75 * np.log(0.75) - 0.25 * np.log(0.25)) + 1) / 2)
    assert skew.largest_share == pytest.approx((0.75 + 1) / 2)
