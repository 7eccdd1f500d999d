import numpy as np
import pytest
from helpers import federation, layout_of, small_net

from fedcat.engines.batch_order import batch_lengths, batches
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import Task


@pytest.fixture
def task():
    fed = federation([7, 3, 8])
    return Task(0, layout_of(small_net()), fed, fed.train, LocalRule(), batch_size=3)


def hop(task, client=0, **more):
    return Hop(0, more.pop("round", 0), client, task.layout.pack(task.layout.net), more.pop("epochs", 2), 0.1, **more)


@pytest.mark.parametrize(
    ("samples", "join", "expected"),
    [
        (7, False, [3, 3, 1]),
        (7, True, [3, 4]),
        (6, True, [3, 3]),
        (8, True, [3, 3, 2]),
        (1, True, [1]),
        (2, False, [2]),
    ],
)
def test_the_last_batch_is_short_and_never_dropped(samples, join, expected):
    assert batch_lengths(samples, 3, join) == expected


@pytest.mark.parametrize("client", [0, 1, 2])
def test_each_epoch_sees_each_sample_once(task, client):
    index, lengths = batches(task, hop(task, client, epochs=4))
    mine = sorted(task.federation.indices(client).tolist())
    assert (index >= 0).sum(1).tolist() == lengths.tolist()
    seen = index[index >= 0].reshape(4, -1)
    assert all(sorted(epoch.tolist()) == mine for epoch in seen)
    assert len({tuple(epoch.tolist()) for epoch in seen}) > 1


def test_the_order_depends_on_round_device_and_visit_and_on_nothing_else(task):
    first = batches(task, hop(task))[0]
    assert np.array_equal(first, batches(task, hop(task, copy=2))[0])
    assert not np.array_equal(first, batches(task, hop(task, round=1))[0])
    assert not np.array_equal(first, batches(task, hop(task, visit=1))[0])
