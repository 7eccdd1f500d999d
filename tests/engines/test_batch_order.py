from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from helpers import federation, layout_of, philox, small_net
from torch import nn

from fedcat.engines import SequentialEngine, StackedEngine
from fedcat.engines.batch_order import batch_lengths, batches, steps_of
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import Task


@pytest.fixture
def task():
    fed = federation([7, 3, 8])
    return Task(0, layout_of(small_net()), fed, fed.train, LocalRule(), batch_size=3)


def hop(task, client=0, **more):
    return Hop(more.pop("round", 0), client, task.layout.pack(task.layout.net), more.pop("epochs", 2), 0.1, **more)


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


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("client", [0, 1, 2])
def test_every_epoch_is_the_next_permutation_of_the_hops_own_stream(task, client, join):
    """Purpose 5, by round, client and visit; batches are cut from the permutation in order."""
    task = replace(task, seed=4, join_lone=join)
    one = hop(task, client, round=5, visit=3, epochs=3)
    index, lengths = batches(task, one)
    rng, mine = philox(4, 5, round=5, client=client, visit=3), task.federation.indices(client)
    wanted = np.concatenate([mine[rng.permutation(len(mine))] for _ in range(3)])
    assert index[index >= 0].tolist() == wanted.tolist()
    assert lengths.tolist() == batch_lengths(len(mine), 3, join) * 3
    assert steps_of(task, one) == len(index) == len(lengths)
    for row, length in zip(index, lengths, strict=True):
        assert (row[:length] >= 0).all()
        assert (row[length:] == -1).all()


@dataclass(frozen=True)
class Drawing(LocalRule):
    """A loss of its own that notes the random numbers it is given."""

    seen = []  # noqa: RUF012

    def draw(self, rng, task, hop, steps):
        self.seen.append((hop.id, rng.integers(2**63), steps))
        return {"noise": torch.zeros(steps, 1)}

    def loss(self, net, batch, inputs):
        return super().loss(net, batch, inputs)


@pytest.mark.parametrize("engine", [SequentialEngine(), StackedEngine()])
def test_a_rule_draws_from_the_hops_own_stream(task, engine):
    """Purpose 6, by round, client and visit."""
    task = replace(task, seed=4, rule=Drawing())
    Drawing.seen.clear()
    hops = [replace(hop(task, client, round=5, visit=3), copy=client) for client in (2, 0)]
    engine.train([(task, one) for one in hops])
    assert Drawing.seen[-len(hops) :] == [
        (one.id, philox(4, 6, round=5, client=one.client, visit=3).integers(2**63), steps_of(task, one)) for one in hops
    ]


@pytest.mark.usefixtures("captured")
def test_a_rule_draws_from_the_hops_own_stream_also_in_captured_steps(task):
    test_a_rule_draws_from_the_hops_own_stream(task, StackedEngine())


def test_a_net_draws_from_the_hops_own_stream(task):
    """Purpose 7, by round, client and visit; PyTorch's generator is seeded with the first number below 2**63."""
    seeds = []

    class Noisy(nn.Linear):
        def forward(self, x):
            seeds.append(torch.initial_seed())
            return super().forward(x)

    net = nn.Sequential(nn.Flatten(), Noisy(64, 10), nn.Dropout(0.5))
    task = replace(task, seed=4, layout=layout_of(net))
    before = torch.initial_seed()
    for client in (2, 0):
        one = hop(task, client, round=5, visit=3)
        SequentialEngine().train([(task, one)])
        assert set(seeds[-steps_of(task, one) :]) == {
            int(philox(4, 7, round=5, client=client, visit=3).integers(2**63))
        }
    assert torch.initial_seed() == before


def test_batches_with_replacement_are_independent_draws_of_the_clients_samples():
    fed = federation([7, 30])
    plain = Task(0, layout_of(small_net()), fed, fed.train, LocalRule(), batch_size=8)
    long = hop(plain, client=1, epochs=50)
    index, lengths = batches(replace(plain, replacement=True), long)
    shuffled, same = batches(plain, long)
    assert lengths.tolist() == same.tolist() == [8, 8, 8, 6] * 50
    mine = fed.indices(1)
    epoch = [row[row >= 0] for row in index[:4]]
    assert set(np.concatenate(epoch)) < set(mine)  # some samples are drawn twice, and others not at all
    assert set(shuffled[:4][shuffled[:4] >= 0]) == set(mine)
    counts = np.bincount(np.searchsorted(np.sort(mine), index[index >= 0]), minlength=30)
    assert counts.sum() == 1500
    assert 25 <= counts.min() < counts.max() <= 80  # a mean of 50, a deviation of 7
