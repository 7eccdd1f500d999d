from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import drive, federation, layout_of, philox, simulate, small_net

from fedcat.core.errors import SettingError
from fedcat.core.options import options as options_of
from fedcat.methods import METHODS, FedAvg, FedCat
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context
from fedcat.methods.selection.grouped import GroupedSelector
from fedcat.methods.server_optimizer import ServerOptimizerChoice
from fedcat.protocol.hop import HopId
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


@pytest.mark.parametrize("name", ["mean", "momentum", "adam"])
def test_a_cycle_in_which_every_hop_fails_is_no_step_of_the_server_optimizer(name):
    """Momentum of the cycles before would carry the model on."""
    method = FedCat(replace(context(clients=6, k=2), server_optimizer=ServerOptimizerChoice(name)))
    walked(method, 2)
    row = method.row
    for r in (2, 3):
        method.absorb([Reply.lost(hop, Status.LATE, "late") for hop in method.plan(r + 1)])
    method.close()
    assert torch.equal(method.row, row)
    assert method.first == 4


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
        "FedCat aggregates every K = 3 rounds, and rounds = 5 is not a multiple of 3: the last cycle is averaged after "
        "2 of its 3 rounds"
    ]
    assert sim.method.advice(6, 6) == sim.method.advice(6, 100) == []
    (note,) = sim.method.advice(6, 4)
    assert note.startswith("FedCat aggregates every K = 3 rounds; evaluations in between see the model of the last")
    copies = {}

    class Spy(type(sim.method)):
        def close(self):
            copies.update(rows=torch.stack(self.copies), seen=list(self.seen))
            super().close()

    sim.method.__class__ = Spy
    drive(sim)
    assert torch.equal(sim.method.row, weighted_mean(copies["rows"], copies["seen"]))


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_grouping_and_concatenation_it_is_fedavg_bit_for_bit(engine, dtype):
    layout = layout_of(small_net(), dtype)
    fed = federation([3, 9, 5, 12, 7, 4, 8, 6])
    off = {"grouping": False, "concatenation": False}
    ours = simulate(FedCat, fed, layout, engine, rounds=5, momentum=0.5, options=off)
    theirs = simulate(FedAvg, fed, layout, engine, rounds=5, momentum=0.5)
    drive(ours)
    drive(theirs)
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
            sim.record({})
    assert torch.equal(pair[0].method.row, pair[1].method.row)


def test_one_client_and_one_copy_is_plain_training():
    fed = federation([7])
    ours = simulate(FedCat, fed, LAYOUT, rounds=4, k=1)
    theirs = simulate(FedAvg, fed, LAYOUT, rounds=4, k=1)
    drive(ours)
    drive(theirs)
    assert torch.equal(ours.method.row, theirs.method.row)


def test_traffic_is_fedavgs():
    fed = federation([5] * 12)
    totals = set()
    for method in (FedAvg, FedCat):
        sim = simulate(method, fed, LAYOUT, rounds=6, k=3)
        drive(sim)
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
    with pytest.raises(ValueError, match=r"round=7, copy=0, attempt=0\) is not outstanding"):
        FedCat(context()).absorb([Reply(HopId(7, 0))])


def walked(method, rounds, samples=5):
    """Run rounds whose clients add one to the row; return the hops of each."""
    found = []
    for r in range(rounds):
        found.append(method.plan(r + 1))
        method.absorb([answer(hop, samples=samples) for hop in found[-1]])
    return found


@pytest.mark.parametrize(
    ("options", "k", "period"),
    [({}, 3, 3), ({"lambda_": 2.0}, 3, 6), ({"lambda_": 0.5}, 4, 2), ({"concatenation": False, "lambda_": 2.0}, 3, 6)],
)
def test_clients_are_those_of_algorithm_3_with_this_epsilon_and_grouping(options, k, period):
    method = FedCat(context(17, k, seed=5), epsilon=0.3, **options)
    selector = GroupedSelector(5, 17, k, 0.3, period)
    for r, hops in enumerate(walked(method, 14)):
        chosen = selector.select(r).tolist()
        offset = 0 if "concatenation" in options else r % k
        assert [hop.client for hop in hops] == [chosen[(offset + i) % k] for i in range(k)]


def test_without_grouping_the_clients_are_fedavgs():
    method = FedCat(context(17, 3, seed=5), grouping=False)
    for r, hops in enumerate(walked(method, 7)):
        chosen = philox(5, 3, round=r).choice(17, size=3, replace=False).tolist()
        assert [hop.client for hop in hops] == [chosen[(r + i) % 3] for i in range(3)]


def test_the_ablations_are_fedcat_with_one_part_each():
    gc, dc = (METHODS.get(name)(context(k=3)) for name in ("fedcat-gc", "fedcat-dc"))
    assert (gc.length, isinstance(gc.selector, GroupedSelector)) == (1, True)
    assert (dc.length, isinstance(dc.selector, GroupedSelector)) == (3, False)


def test_options_and_their_defaults():
    known = {"grouping": True, "concatenation": True, "epsilon": 0.5, "lambda": 1.0, "retry": 0}
    assert options_of(FedCat) == known
    method = FedCat(context(k=3))
    assert (method.selector.epsilon, method.selector.period, method.length) == (0.5, 3, 3)


def test_every_round_of_a_cycle_has_its_own_learning_rate():
    """Also where one copy is rounds ahead of the others."""
    method = FedCat(replace(context(clients=9, k=3), lr=lambda round: 1 / (round + 1)))
    a, b, c = method.plan(100)
    method.absorb([answer(b)])
    (b,) = method.plan(100)
    method.absorb([answer(b)])
    (last,) = method.plan(100)
    assert [(hop.copy, hop.round, hop.lr) for hop in (a, c, b, last)] == [
        (0, 0, 1.0),
        (2, 0, 1.0),
        (1, 1, 1 / 2),
        (1, 2, 1 / 3),
    ]
    method.absorb([answer(last)])
    assert {hop.lr for hops in walked(FedCat(method.context), 7)[3:] for hop in hops} == {1 / 4, 1 / 5, 1 / 6, 1 / 7}


def test_hops_name_their_round_copy_and_epochs():
    method = FedCat(replace(context(clients=9, k=3), epochs=4))
    for r, hops in enumerate(walked(method, 5)):
        assert [(hop.id, hop.visit) for hop in hops] == [((r, i, 0), 0) for i in range(3)]
        assert {hop.epochs for hop in hops} == {4}


def test_a_client_that_is_met_again_in_a_later_slot_has_a_later_visit():
    """The visit counts slots of the selection before it, so it does not depend on the copy that goes there."""

    class Same:
        def select(self, round):
            return np.array([4, 2, 4])

        def state(self):
            return {}

    method = FedCat(replace(context(k=3), selector=Same()), grouping=False)
    found = [[(hop.client, hop.visit) for hop in hops] for hops in walked(method, 3)]
    assert found == [[(4, 0), (2, 0), (4, 1)], [(2, 0), (4, 1), (4, 0)], [(4, 1), (4, 0), (2, 0)]]


@pytest.mark.parametrize("name", ["mean", "momentum", "adam"])
@pytest.mark.parametrize("rounds", [3, 4, 5])
def test_a_cycle_that_is_closed_early_takes_the_server_optimizers_step(name, rounds):
    """K = 3: rounds 4 and 5 end in mid-cycle, and the second cycle starts where the first step led."""
    choice = ServerOptimizerChoice(name, {"lr": 0.5})
    method = FedCat(replace(context(clients=9, k=3), server_optimizer=choice))
    theirs, row = choice.make("mean", "FedCat"), method.row
    for hops in (3, *([rounds - 3] if rounds > 3 else [])):
        walked_row = row
        for _ in range(hops):
            walked_row = walked_row + 1.0
        row = theirs.step(row, walked_row)
    walked(method, rounds)
    method.close()
    assert torch.allclose(method.models()["global"], row, atol=1e-14)
    assert method.seen == [0, 0, 0]
    again = method.models()["global"]
    method.close()
    assert torch.equal(method.models()["global"], again)


def test_a_cycle_is_as_long_as_k_and_starts_at_its_end():
    method = FedCat(context(clients=9, k=3))
    start = method.row
    rows = []
    for _ in range(7):
        walked_hops = method.plan(method.round + 1)
        method.absorb([answer(hop) for hop in walked_hops])
        rows.append((method.round, method.first, round(float((method.row - start).mean()), 6)))
    assert rows == [(1, 0, 0), (2, 0, 0), (3, 3, 3), (4, 3, 3), (5, 3, 3), (6, 6, 6), (7, 6, 6)]


def test_no_hop_starts_beyond_the_last_round_or_the_cycle():
    method = FedCat(context(clients=9, k=3))
    assert method.plan(0) == []
    (a, *_) = method.plan(1)
    method.absorb([answer(a)])
    assert method.plan(1) == []
    assert [hop.round for hop in method.plan(2)] == [1]


def test_a_copy_that_came_back_is_not_changed_by_what_happens_to_the_reply():
    method = FedCat(context(clients=9, k=3))
    a, _, _ = method.plan(1)
    end = a.start + 1.0
    method.absorb([Reply(a.id, end, samples=5, steps=1)])
    end.zero_()
    assert torch.equal(method.copies[0], a.start + 1.0)


def test_copies_are_weighted_by_the_samples_they_have_seen():
    method = FedCat(context(clients=4, k=2), grouping=False)
    start = method.row
    for add, samples in (((1.0, 2.0), (1, 6)), ((10.0, 20.0), (2, 1))):
        hops = method.plan(method.round + 1)
        method.absorb([answer(hop, add[hop.copy], samples[hop.copy]) for hop in hops])
    assert torch.allclose(method.row, start + (3 * 11.0 + 7 * 22.0) / 10)


def test_the_mean_and_the_copies_are_given_when_they_are_asked_for():
    method = FedCat(context(clients=9, k=3))
    assert list(method.models()) == ["global"]
    assert torch.equal(method.models("mean")["mean"], method.row)
    walked(method, 1)
    found = method.models("mean", "copies")
    assert list(found) == ["global", "mean", "copy 0", "copy 1", "copy 2"]
    assert torch.equal(found["copy 1"], method.copies[1])


@pytest.mark.parametrize(("k", "lambda_", "period"), [(3, 1 / 3, 1), (10, 0.1, 1), (7, 3 / 7, 3), (3, 1 + 1e-10, 3)])
def test_a_fraction_that_makes_whole_rounds_is_taken_despite_rounding(k, lambda_, period):
    assert FedCat(context(k=k, clients=20), lambda_=lambda_).selector.period == period


@pytest.mark.parametrize("lambda_", [-1.0, 0.1, 1 + 1e-6, float("nan")])
def test_a_lambda_that_makes_no_whole_rounds_is_refused(lambda_):
    with pytest.raises(SettingError, match=r"lambda must be > 0 and make lambda \* K"):
        FedCat(context(k=3), lambda_=lambda_)


def test_advice_without_concatenation_is_never_needed():
    assert FedCat(context(k=3), concatenation=False).advice(5, 1) == []
    assert FedCat(context(k=1)).advice(5, 1) == []
    assert "after 1 of its 3 rounds" in FedCat(context(k=3)).advice(4, 3)[0]


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_epsilon_may_be_either_end(epsilon):
    assert FedCat(context(k=3), epsilon=epsilon).selector.epsilon == epsilon


def test_a_state_in_mid_cycle_holds_all_that_the_next_rounds_need():
    """Server momentum, the average, the counts of the selection, and a copy that is ahead of the others."""
    choice = ServerOptimizerChoice("momentum")
    words = {"server_optimizer": choice, "average": 0.9}
    method, other = (FedCat(replace(context(clients=11, k=3), **words)) for _ in range(2))
    walked(method, 4)
    a, b, c = method.plan(100)
    method.absorb([answer(b, 3.0, 2)])
    (b,) = method.plan(100)
    other.restore(method.state())
    replies = [answer(hop, 7.0, 3) for hop in (b, c, a)]
    again = {hop.id: hop for hop in other.plan(100)}
    assert again.keys() == {a.id, b.id, c.id}
    assert all(torch.equal(again[hop.id].start, hop.start) for hop in (a, b, c))
    for one in (method, other):
        one.absorb(replies)
    for _ in range(9):
        hops, again = method.plan(100), other.plan(100)
        assert [(h.id, h.client, h.visit) for h in hops] == [(h.id, h.client, h.visit) for h in again]
        assert all(torch.equal(h.start, g.start) for h, g in zip(hops, again, strict=True))
        for one in (method, other):
            one.absorb([answer(hop, hop.client * 0.1, hop.client + 1) for hop in hops])
    wanted, found = (one.models("mean", "copies") for one in (method, other))
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert method.seen == other.seen
