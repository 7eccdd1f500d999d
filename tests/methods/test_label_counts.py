import pytest
import torch
from helpers import federation, layout_of, simulate, small_net

from fedcat.data.skew import Skew
from fedcat.methods.fedcat_plus import FedCatPlus
from fedcat.methods.label_counts import LabelCounts

FED = federation([3, 9, 5, 12])


def counts_of(context=None):
    return LabelCounts(context or simulate(FedCatPlus, FED, layout_of(small_net()), k=2).method.context)


def told(counts):
    return {"labels": torch.tensor(counts)}


def test_the_skew_by_hand():
    """Shares 1 and 0.5 of a class are each 0.25 from those of all, 6 of 8; a client without samples has none."""
    labels = counts_of()
    assert labels.skew() is None
    labels.add(3, told([0, 0]))
    assert labels.skew() is None
    labels.add(0, told([4, 0]))
    assert labels.skew() == 0
    labels.add(1, told([2, 2]))
    assert labels.skew() == pytest.approx(0.25)
    labels.add(2, told([-(10**6), 8]))  # a liar's: no client holds fewer than none
    assert labels.skew() == pytest.approx((0.625 + 0.125 + 0.375) / 3)


def test_it_does_not_depend_on_the_order_of_the_replies_and_is_that_of_the_data():
    found = set()
    for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 2, 1, 0]):
        labels = counts_of()
        for client in order:
            labels.add(client, told(FED.class_counts[client].tolist()))
        found.add(labels.skew())
    assert found == {Skew.of(FED).distance}


def test_a_client_is_asked_once_also_after_a_restore():
    labels, again = counts_of(), counts_of()
    assert labels.uploads(1)["labels"].shape == (10,)
    assert not labels.memory(1)["told"]
    labels.add(1, told(FED.class_counts[1].tolist()))
    labels.add(1, {})
    again.restore(labels.state())
    for one in (labels, again):
        assert (one.uploads(1), one.uploads(2).keys()) == ({}, {"labels"})
        assert one.memory(1)["told"]
        assert not one.memory(2)["told"]
        assert one[1].tolist() == FED.class_counts[1].tolist()
        assert one.skew() == 0
