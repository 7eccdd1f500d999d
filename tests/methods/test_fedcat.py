from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import federation, layout_of, simulate, small_net

from fedcat.core.errors import SettingError
from fedcat.methods import FedAvg, FedCat
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context
from fedcat.protocol.reply import Reply, Status

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

LAYOUT = layout_of(small_net())


def context(clients=12, k=3, seed=0, layout=LAYOUT):
    return Context(seed, layout, layout.pack(layout.net), np.full(clients, 5), k, 1, lambda r: 0.1)


def answer(hop, add=1.0, samples=5):
    """Reply as a client that adds a number to the row."""
    return Reply(hop.id, hop.start + add, samples=samples, steps=1)


@st.composite
def runs(draw):
    clients = draw(st.integers(1, 25))
    k = draw(st.integers(1, min(clients, 6)))
    options = {"epsilon": draw(st.sampled_from([0.0, 0.5, 1.0])), "lambda_": float(draw(st.integers(1, 3)))}
    return FedCat(context(clients, k, draw(st.integers(0, 2**32))), **options), k


@hypothesis.given(runs(), st.integers(1, 4))
@hypothesis.settings(max_examples=60, deadline=None)
def test_no_copy_meets_a_client_twice_in_a_cycle_and_all_copies_walk(made, cycles):
    method, k = made
    for _ in range(cycles):
        met = {copy: [] for copy in range(k)}
        for _ in range(k):
            hops = method.plan(method.round + 1)
            assert sorted(hop.copy for hop in hops) == list(range(k))
            assert len({hop.client for hop in hops}) == k
            for hop in hops:
                met[hop.copy].append(hop.client)
            method.absorb([answer(hop) for hop in hops])
        assert all(len(set(clients)) == k for clients in met.values())
    counts = method.selector.table.dense(k)
    assert counts.sum(0).tolist() == [k * cycles] * k


@hypothesis.given(st.integers(2, 5), st.lists(st.integers(1, 50), min_size=25, max_size=25), st.integers(0, 999))
@hypothesis.settings(max_examples=40, deadline=None)
def test_the_samples_of_the_copies_are_those_that_were_seen(k, samples, seed):
    method = FedCat(context(25, k, seed))
    seen = 0
    for r in range(k - 1):
        hops = method.plan(r + 1)
        method.absorb([answer(hop, samples=samples[hop.client]) for hop in hops])
        seen += sum(samples[hop.client] for hop in hops)
        assert sum(method.seen) == seen


@hypothesis.given(st.integers(1, 5), st.integers(0, 999))
@hypothesis.settings(max_examples=30, deadline=None)
def test_equal_copies_are_aggregated_to_the_copy(k, seed):
    method = FedCat(context(12, k, seed))
    row = method.row
    for r in range(k):
        method.absorb([answer(hop, add=0.25, samples=hop.client + 1) for hop in method.plan(r + 1)])
        row = row + 0.25
    assert torch.equal(method.row, row)


def test_copy_i_goes_to_the_selected_client_offset_plus_i():
    method = FedCat(context(k=3))
    for r in range(3):
        hops = method.plan(r + 1)
        selected = method._chosen[r]
        assert [hop.client for hop in hops] == [selected[(r + i) % 3] for i in range(3)]
        method.absorb([answer(hop) for hop in hops])


def test_a_cycle_by_hand():
    """Two copies, two rounds: each copy adds what its clients add and counts what they hold."""
    method = FedCat(context(clients=4, k=2), grouping=False)
    start = method.row
    first = method.plan(1)
    method.absorb([answer(first[0], 1.0, 10), answer(first[1], 2.0, 20)])
    assert torch.equal(method.models()["global"], start)
    assert torch.allclose(method.models("mean")["mean"], start + (10 * 1 + 20 * 2) / 30)
    assert list(method.models("copies")) == ["global", "copy 0", "copy 1"]
    second = method.plan(2)
    assert torch.equal(second[0].start, start + 1.0)
    method.absorb([answer(second[0], 4.0, 30), answer(second[1], 8.0, 40)])
    assert torch.allclose(method.row, start + (40 * 5.0 + 60 * 10.0) / 100)
    assert method.seen == [0, 0]


def test_a_failed_hop_leaves_its_copy_and_the_copy_moves_on():
    method = FedCat(context(clients=6, k=2))
    start = method.row
    a, b = method.plan(1)
    method.absorb([Reply.lost(a, Status.FAILED, "battery"), answer(b)])
    a, b = method.plan(2)
    assert torch.equal(a.start, start)
    assert method.seen == [0, 5]
    method.absorb([answer(a), answer(b)])
    assert method.round == 2
    assert torch.allclose(method.row, start + (5 * 1.0 + 10 * 2.0) / 15)
    assert method.selector.table.dense(2).sum() == 4


def test_a_cycle_in_which_every_hop_fails_changes_nothing():
    method = FedCat(context(clients=6, k=2))
    start = method.row
    for r in range(2):
        method.absorb([Reply.lost(hop, Status.LATE, "late") for hop in method.plan(r + 1)])
    assert torch.equal(method.row, start)
    assert method.round == 2


def test_a_copy_walks_on_as_soon_as_its_own_hop_is_back():
    method = FedCat(context(clients=9, k=3))
    a, b, c = method.plan(100)
    method.absorb([answer(b)])
    (b2,) = method.plan(100)
    assert (b2.copy, b2.round) == (1, 1)
    method.absorb([answer(b2)])
    (b3,) = method.plan(100)
    method.absorb([answer(b3)])
    assert method.plan(100) == []
    method.absorb([answer(c), answer(a)])
    assert {(hop.copy, hop.round) for hop in method.plan(100)} == {(0, 1), (2, 1)}
    assert method.round == 1


def test_a_client_that_is_named_twice_gets_two_orders_of_batches():
    class Pair:
        def select(self, round):
            return np.array([4, 4, 2])

    method = FedCat(replace(context(k=3), selector=Pair()), grouping=False)
    assert [(hop.client, hop.visit) for hop in method.plan(1)] == [(4, 0), (4, 1), (2, 0)]


def test_the_last_partial_cycle_is_aggregated_and_announced():
    sim = simulate(FedCat, federation([5] * 9), LAYOUT, rounds=5, k=3)
    assert sim.method.advice(5, 3) == [
        "FedCat aggregates every K = 3 rounds, of which rounds = 5 is not a multiple: the last cycle is averaged after "
        "2 of its 3 rounds"
    ]
    assert sim.method.advice(6, 6) == sim.method.advice(6, 100) == []
    (note,) = sim.method.advice(6, 4)
    assert note.startswith("FedCat aggregates every K = 3 rounds; evaluations in between see the last aggregated model")
    copies = {}

    class Spy(type(sim.method)):
        def close(self):
            copies.update(rows=torch.stack(self.copies), seen=list(self.seen))
            super().close()

    sim.method.__class__ = Spy
    sim.run()
    assert torch.equal(sim.method.row, weighted_mean(copies["rows"], copies["seen"]))


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_grouping_and_concatenation_it_is_fedavg_bit_for_bit(engine, dtype):
    layout = layout_of(small_net(), dtype)
    fed = federation([3, 9, 5, 12, 7, 4, 8, 6])
    off = {"grouping": False, "concatenation": False}
    ours = simulate(FedCat, fed, layout, engine, rounds=5, momentum=0.5, options=off)
    theirs = simulate(FedAvg, fed, layout, engine, rounds=5, momentum=0.5)
    ours.run()
    theirs.run()
    assert torch.equal(ours.method.row, theirs.method.row)
    assert [r.clients for r in ours.history] == [r.clients for r in theirs.history]
    assert (ours.ledger.up, ours.ledger.down) == (theirs.ledger.up, theirs.ledger.down)


def test_it_is_fedavg_bit_for_bit_also_when_clients_fail():
    fed = federation([3, 9, 5, 12, 7, 4])
    off = {"grouping": False, "concatenation": False}
    pair = [simulate(FedCat, fed, LAYOUT, k=3, options=off), simulate(FedAvg, fed, LAYOUT, k=3)]
    for r in range(4):
        for sim in pair:
            jobs = sim.plan()
            replies = sim.engine.train(jobs)
            gone = r % 3
            replies[gone] = Reply.lost(jobs[gone][1], Status.FAILED, "gone")
            sim.absorb(replies)
            sim.record()
    assert torch.equal(pair[0].method.row, pair[1].method.row)


def test_one_client_and_one_copy_is_plain_training():
    fed = federation([7])
    ours = simulate(FedCat, fed, LAYOUT, rounds=4, k=1)
    theirs = simulate(FedAvg, fed, LAYOUT, rounds=4, k=1)
    ours.run()
    theirs.run()
    assert torch.equal(ours.method.row, theirs.method.row)


def test_traffic_is_fedavgs():
    fed = federation([5] * 12)
    totals = set()
    for method in (FedAvg, FedCat):
        sim = simulate(method, fed, LAYOUT, rounds=6, k=3)
        sim.run()
        totals.add((sim.ledger.up, sim.ledger.down))
    assert totals == {(6 * 3 * LAYOUT.size * 8,) * 2}


def test_grouping_every_other_cycle():
    method = FedCat(context(clients=12, k=3), lambda_=2.0)
    assert method.selector.period == 6
    half = FedCat(context(clients=12, k=4), lambda_=0.5)
    assert half.selector.period == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.5}, "epsilon must be at least 0 and at most 1, got 1.5"),
        ({"lambda_": 0.0}, "lambda must be > 0"),
        ({"lambda_": 0.5}, r"lambda \* K = 0.5 \* 3 a whole number of rounds"),
        ({"lambda_": float("inf")}, "lambda must be > 0"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        FedCat(context(k=3), **options)


def test_a_reply_that_nobody_waits_for_is_an_error():
    with pytest.raises(ValueError, match="hop 7 is not outstanding"):
        FedCat(context()).absorb([Reply(7)])
