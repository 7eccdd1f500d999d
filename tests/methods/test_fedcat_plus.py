from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import drive, federation, layout_of, simulate, small_net
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.data.skew import Skew
from fedcat.methods import FedCat
from fedcat.methods.average import weighted_mean
from fedcat.methods.fedcat_plus import FedCatPlus
from fedcat.methods.selection import FunctionSelector
from fedcat.protocol.reply import Reply, Status

FED = federation([3, 9, 5, 12, 7, 4, 8, 6, 5, 10, 11])
LAYOUT = layout_of(small_net())
OFF = {"spread": 0.0, "lead": 0.0, "smoothing": 0.0}


@pytest.mark.parametrize("barrier", [True, False])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, {}),
        ({"grouping": False}, {"average": 0.9}),
        ({"epsilon": 1.0, "lambda_": 2.0}, {"weight_decay": 0.01, "clip": 1.0, "momentum": 0.9}),
    ],
)
def test_without_its_parts_it_is_fedcat_bit_for_bit(options, words, barrier):
    layout = layout_of(small_net(), torch.float32)
    words = {"k": 4, "rounds": 10, "momentum": 0.5, **words}
    plain = drive(simulate(FedCat, FED, layout, "stacked", options=options, **words), barrier=barrier)
    plus = drive(simulate(FedCatPlus, FED, layout, "stacked", options={**options, **OFF}, **words), barrier=barrier)
    for model, row in plain.method.models("mean", "copies").items():
        assert torch.equal(plus.method.models("mean", "copies")[model], row)
    assert [r.clients for r in plus.history] == [r.clients for r in plain.history]
    assert (plus.ledger.up, plus.ledger.down) == (plain.ledger.up, plain.ledger.down)


def test_without_its_parts_it_is_fedcat_also_where_hops_fail_and_are_tried_again():
    sims = [
        simulate(method, FED, LAYOUT, k=3, rounds=9, options={"retry": 1, **options})
        for method, options in ((FedCat, {}), (FedCatPlus, OFF))
    ]
    for sim in sims:
        chance = np.random.default_rng(4)
        while not sim.done:
            jobs = sim.plan()
            lost = chance.random(len(jobs)) < 0.4
            replies = sim.engine.train(jobs)
            pairs = zip(jobs, replies, lost, strict=True)
            sim.absorb([Reply.lost(hop, Status.FAILED, "away") if gone else reply for (_, hop), reply, gone in pairs])
            sim.record({})
    plain, plus = (sim.method for sim in sims)
    assert torch.equal(plain.row, plus.row)
    assert [r.clients for r in sims[0].history] == [r.clients for r in sims[1].history]


def reply_to(method, hop, end, samples=1, steps=2):
    """Return a reply as a client would send it, with its label counts if they are not known yet."""
    labels = {"labels": torch.from_numpy(FED.class_counts[hop.client])} if method.uploads(hop) else {}
    return Reply(hop.id, end, samples, steps=steps, uploads=labels)


def noisy(method, size=0.01, lost=(), samples=None):
    """End a round: every copy moves by a step of its own. Return the hops."""
    hops = method.plan(method.round + 1)
    replies = []
    for hop in hops:
        rng = np.random.default_rng([hop.round, hop.copy])
        end = hop.start + size * torch.from_numpy(rng.standard_normal(len(hop.start))).to(hop.start)
        weight = 1 if samples is None else samples[hop.client]
        gone = hop.copy in lost
        replies.append(Reply.lost(hop, Status.FAILED, "away") if gone else reply_to(method, hop, end, weight))
    method.absorb(replies)
    return hops


def distance(method, size):
    copies = torch.stack(method.copies)[:, :size]
    return float((copies - copies.mean(0)).norm() / len(copies) ** 0.5)


def test_copies_stay_as_far_from_their_mean_as_they_should():
    """The distance is spread * way^2 / norm; no round lets it grow by more than 5 %."""
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=60, options={"spread": 0.2}).method
    size, start, kinds = LAYOUT.parameter_size, method.row[: LAYOUT.parameter_size], set()
    for r in range(1, 61):
        hops = method.plan(r)
        ends = torch.stack([hop.start + 0.05 + 0.02 * torch.randn(LAYOUT.size, dtype=torch.float64) for hop in hops])
        natural = float((ends - ends.mean(0)).norm() / 3**0.5)
        method.absorb([reply_to(method, hop, end) for hop, end in zip(hops, ends, strict=True)])
        row = method.row[:size]
        wanted = 0.2 * float((row - start).norm() ** 2 / row.norm())
        assert distance(method, size) == pytest.approx(min(wanted, 1.05 * natural), rel=1e-9)
        assert torch.allclose(torch.stack(method.copies).mean(0), method.row, atol=1e-13)
        assert torch.allclose(method.row, ends.mean(0), atol=1e-13)
        kinds.add(wanted < 1.05 * natural)
    assert kinds == {True, False}


def test_copies_whose_mean_has_not_moved_become_one():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3).method
    start, change = method.row, torch.linspace(-1, 1, LAYOUT.size, dtype=torch.float64)
    changes = dict(zip(range(3), (change, -change, 0 * change), strict=True))
    method.absorb([reply_to(method, hop, hop.start + changes[hop.copy]) for hop in method.plan(1)])
    assert all(torch.allclose(copy, start, atol=1e-15) for copy in method.copies)


def test_every_group_gives_one_client_and_no_copy_meets_one_twice_in_k_rounds():
    method = simulate(FedCatPlus, FED, LAYOUT, k=4, rounds=40).method
    for _ in range(6):
        met = {copy: [] for copy in range(4)}
        for _ in range(4):
            for hop in noisy(method):
                met[hop.copy].append(hop.client)
        assert all(len(set(clients)) == 4 for clients in met.values())
    assert method.selector.table.dense(4).sum(0).tolist() == [4 * 6] * 4


@pytest.mark.parametrize("gain", [1.0, 0.0, 2.0])
def test_the_mean_step_of_a_round_leads_the_next_and_its_share_grows(gain):
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=200, options={"own": 0.0, "skew": 0.1, "gain": gain}).method
    size, start = LAYOUT.parameter_size, method.row
    last = torch.zeros(size, dtype=torch.float64)
    for r in range(220):
        hops, share = method.plan(r + 1), min(0.95, r / (r + 10))
        way = float((method.row - start)[:size].norm() / method.row[:size].norm())
        rate = (1 - share) * (1 + gain * share * max(0, 1 - way))
        assert all(torch.allclose(hop.sent["step"], last, atol=1e-14) for hop in hops)
        assert all(float(hop.sent["lead"]) == pytest.approx(share) for hop in hops)
        assert all(hop.lr == pytest.approx(rate * method.context.lr(r)) for hop in hops)
        steps = [hop.copy + 1 for hop in hops]
        method.absorb([reply_to(method, h, h.start + 0.1 * n, steps=n) for h, n in zip(hops, steps, strict=True)])
        last = torch.full_like(last, 0.1)  # whoever trained, each of its steps moved by that
    assert share == 0.95


@pytest.mark.parametrize("spread", [0.15, 0.0])
def test_own_steps_are_longer_until_the_mean_has_come_far(spread, monkeypatch):
    """With a share of 1/2: 1.5 times at first, 4/3 where the mean has come a third of its norm, once past its norm."""
    monkeypatch.setattr(FedCatPlus, "_share", lambda self, round: 0.5)
    options = {"spread": spread, "lead": 0.5, "skew": 0.0}
    method = simulate(FedCatPlus, FED, LAYOUT, k=1, rounds=9, lr=lambda r: 0.1, options=options).method
    start, places, rates = method.row, (1.0, 1.5, 0.25, 1.0), []
    for round, place in enumerate(places, start=1):
        (hop,) = method.plan(round)
        rates.append(hop.lr / 0.1)
        method.absorb([reply_to(method, hop, place * start)])
    (hop,) = method.plan(len(places) + 1)
    assert [*rates, hop.lr / 0.1] == pytest.approx([0.75, 0.75, 0.5 * (1 + 1 / 3), 0.5, 0.75])


def test_the_step_that_leads_is_weighted_by_samples():
    method = simulate(FedCatPlus, FED, LAYOUT, k=2).method
    a, b = method.plan(1)
    method.absorb([reply_to(method, a, a.start + 6, 1, steps=3), reply_to(method, b, b.start + 2, 9, steps=4)])
    assert torch.allclose(method.lead.step, torch.full_like(method.lead.step, 0.1 * 2 + 0.9 * 0.5))


@pytest.mark.parametrize(
    ("skew", "most", "own"), [(0.0, 1.0, 1.0), (0.5, 1.0, 0.125), (0.5, 0.4, 0.05), (1.0, 1.0, 0.0)]
)
def test_a_copys_own_last_step_leads_it_too_the_more_so_the_less_skewed_labels_are(skew, most, own):
    """A copy whose hop fails keeps its last step. Steps follow the learning rate; the lead is limited by the skew."""
    options = {"skew": skew, "own": most}
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=300, lr=lambda r: 0.1 * 0.99**r, options=options).method
    mine = torch.zeros(3, LAYOUT.parameter_size, dtype=torch.float64)
    mean = mine[0]
    for r in range(240):
        hops, lost = noisy(method, lost=[r % 5]), r % 5
        for hop in hops:
            wanted = (1 - own) * mean + own * mine[hop.copy]
            assert torch.allclose(hop.sent["step"], wanted, rtol=1e-12, atol=1e-15)
        for hop in hops:
            rng = np.random.default_rng([hop.round, hop.copy])
            if hop.copy != lost:
                mine[hop.copy] = 0.01 * torch.from_numpy(rng.standard_normal(LAYOUT.size))[: mine.shape[1]] / 2
        mean = 0.99 * mine[[copy for copy in range(3) if copy != lost]].mean(0)
        mine *= 0.99
    assert float(hops[0].sent["lead"]) == pytest.approx(min(0.95, 1 - skew / 2.4))


@pytest.mark.parametrize(
    ("k", "skew", "limit"),
    [(1, 0.9, 0.0), (1, 0.4, 0.5), (2, 0.8, 0.5), (10, 0.8, 0.9), (10, 0.3, 0.95), (20, 0.8, 0.95)],
)
def test_few_clients_with_skewed_labels_lead_less(k, skew, limit, monkeypatch):
    monkeypatch.setattr(FedCatPlus, "warm_up", 1e-9)
    method = simulate(FedCatPlus, federation([4] * 20), LAYOUT, k=k, rounds=2, options={"skew": skew}).method
    noisy(method)
    assert [float(hop.sent["lead"]) for hop in method.plan(2)] == [pytest.approx(limit)] * k


def test_the_skew_is_that_of_the_label_counts_which_each_client_reports_once():
    sim = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=12)
    assert sim.method.skew == 0.75
    drive(sim)
    told: set[int] = set()
    for record in sim.history:
        fresh = {hop.client for hop in record.hops} - told
        told |= fresh
        assert sum(hop.up for hop in record.hops) == 3 * LAYOUT.size * 8 + len(fresh) * 10 * 8
    assert sim.method.skew == Skew.of(FED).distance
    assert told == set(range(11))


def test_restored_in_mid_round_it_goes_on_with_the_same_bits_and_bytes():
    """Hops fail and are tried again, a client may occur twice in a round, and the learning rate falls."""

    def twice(round, rng, samples, k):
        return [2, 2, *rng.choice(len(samples), k - 2).tolist()]

    def made(**given):
        words = {"k": 4, "rounds": 9, "lr": lambda r: 0.1 / (1 + r), "average": 0.8, **given}
        words["options"] = {"smoothing": 0.9, **words["options"]}
        return simulate(FedCatPlus, FED, LAYOUT, run_name="run", **words)

    chosen = {"selector": FunctionSelector(twice, 0, FED.sizes, 4), "options": {"grouping": False}}
    places = [
        *((count, {"options": {"retry": 2}}) for count in (2, 9, 14)),
        *((count, chosen) for count in (1, 2, 3, 9)),
    ]
    for count, given in places:
        ends = [driven_with_losses(lambda given=given: made(**given), count, restore) for restore in (None, count)]
        whole, again = (sim.method.models("copies") for sim in ends)
        assert all(torch.equal(row, again[name]) for name, row in whole.items())
        assert ends[0].method.skew == ends[1].method.skew
        assert (ends[0].ledger.up, ends[0].ledger.down) == (ends[1].ledger.up, ends[1].ledger.down)


def driven_with_losses(made, seed, restore):
    """Return a run to which replies came one by one and some were lost; after `restore` replies it is restored."""
    sim, order, count = made(), np.random.default_rng(seed), 0
    while not sim.done:
        jobs = sim.plan()
        for number in order.permutation(len(jobs)):
            hop = jobs[number][1]
            lost = np.random.default_rng([seed, *hop.id]).random() < 0.3
            (reply,) = sim.engine.train([jobs[number]])
            sim.absorb([Reply.lost(hop, Status.FAILED, "away") if lost else reply])
            count += 1
            if count == restore:
                fresh = made()
                fresh.restore(sim.state())
                sim = fresh
                break
        if sim.method.round > len(sim.history):
            sim.record({})
    return sim


def test_without_classes_or_with_a_skew_that_is_given_nobody_reports_labels():
    given = simulate(FedCatPlus, FED, LAYOUT, k=3, options={"skew": 0.3}).method
    values = FedCatPlus(replace(given.context, classes=0))
    for method, skew in ((given, 0.3), (values, 0.75)):
        (hop, *_) = method.plan(1)
        assert method.uploads(hop) == {}
        assert not hop.memory
        noisy(method)
        assert method.skew == skew


def test_the_global_model_is_the_average_of_the_copies_mean_over_rounds():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=200).method
    average = method.row
    assert torch.equal(method.models()["global"], average)
    for r in range(1, 200):
        noisy(method)
        average = average + min(1, 5 / r + 250 / r**2) * (method.row - average)
        found = method.models("mean")
        assert torch.allclose(found["global"], average, atol=1e-13)
        assert torch.equal(found["mean"], method.row)
    assert not torch.allclose(average, method.row, atol=1e-3)


def test_with_cycles_the_average_is_that_of_the_copies_weighted_mean():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, options={"spread": 0.0, "lead": 0.0, "smoothing": 0.5}).method
    average, seen = None, np.zeros(3)
    for r in range(5):
        for hop in noisy(method, samples=FED.sizes):
            seen[hop.copy] += FED.sizes[hop.client]
        mean = method.row if r % 3 == 2 else weighted_mean(torch.stack(method.copies), seen.tolist())
        share = 0.5 / (1 - 0.5 ** (r + 1))
        average = mean if average is None else average + share * (mean - average)
        assert torch.allclose(method.models()["global"], average, atol=1e-13)
        seen = np.zeros(3) if r % 3 == 2 else seen


def test_a_lost_copy_stays_and_a_round_without_replies_changes_nothing():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=20, options={"smoothing": 0.9}).method
    for _ in range(4):
        noisy(method)
    copies, models, step = method.copies, method.models("mean"), method.lead.step
    hops = noisy(method, lost=[0, 1, 2])
    assert all(torch.equal(a, b) for a, b in zip(method.copies, copies, strict=True))
    assert all(torch.equal(method.models("mean")[name], row) for name, row in models.items())
    assert torch.equal(method.lead.step, step)
    assert method.round == 5
    hops = noisy(method, lost=[1])
    moved = {hop.copy: hop.start for hop in hops}
    assert torch.equal(moved[1], copies[1])
    assert not torch.equal(method.row, models["mean"])


def test_running_statistics_stay_those_of_their_copy():
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 10))
    layout = layout_of(net)
    method = simulate(FedCatPlus, federation([3, 9, 5, 12], shape=(1, 4, 4)), layout, k=3).method
    size = layout.parameter_size
    hops = method.plan(1)
    ends = torch.rand(3, layout.size, dtype=torch.float64)
    method.absorb([Reply(hop.id, end, 1, steps=1) for hop, end in zip(hops, ends, strict=True)])
    assert torch.allclose(torch.stack(method.copies)[:, size:], ends[:, size:], atol=1e-15)
    assert torch.allclose(method.row, ends.mean(0), atol=1e-15)
    way = ends.mean(0)[:size] - layout.pack(net)[:size]
    assert distance(method, size) == pytest.approx(0.15 * float(way.norm() ** 2 / ends.mean(0)[:size].norm()))


def test_a_model_that_is_taken_back_takes_its_copies_and_its_step_along():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=30).method
    for _ in range(5):
        noisy(method)
    state, models, way = method.state(), method.models(), method.way
    for _ in range(3):
        noisy(method, size=1e6)
    skew, known = method.skew, [client for client in range(11) if not method.labels.uploads(client)]
    method.rewind(state)
    assert method.round == 8
    assert (method.skew, [client for client in range(11) if not method.labels.uploads(client)]) == (skew, known)
    assert len(known) > len(state["labels"])
    assert torch.equal(method.models()["global"], models["global"])
    assert torch.equal(method.lead.step, state["lead"]["step"])
    assert method.way == way
    assert all(torch.equal(copy, state["row"]) for copy in method.copies)
    noisy(method)
    assert float(method.row.norm()) < 10 * float(state["row"].norm())


@pytest.mark.parametrize(
    ("name", "value"),
    [("spread", -0.1), ("lead", 1.0), ("smoothing", 95.0), ("own", 1.1), ("gain", -0.5), ("skew", 2.0)],
)
def test_options_outside_their_bounds_are_refused(name, value):
    with pytest.raises(SettingError, match=f"{name} must be"):
        simulate(FedCatPlus, FED, LAYOUT, options={name: value})


def test_no_note_on_cycles_unless_there_are_some():
    assert simulate(FedCatPlus, FED, LAYOUT, k=3).method.advice(10, 4) == []
    assert len(simulate(FedCatPlus, FED, LAYOUT, k=3, options=OFF).method.advice(10, 4)) == 2
