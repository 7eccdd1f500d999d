import numpy as np
import pytest
import torch
from helpers import drive, federation, layout_of, simulate, small_net
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.methods import FedCat
from fedcat.methods.average import weighted_mean
from fedcat.methods.fedcat_plus import FedCatPlus
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


def noisy(method, size=0.01, lost=(), samples=None):
    """End a round: every copy moves by a step of its own. Return the hops."""
    hops = method.plan(method.round + 1)
    replies = []
    for hop in hops:
        rng = np.random.default_rng([hop.round, hop.copy])
        end = hop.start + size * torch.from_numpy(rng.standard_normal(len(hop.start))).to(hop.start)
        weight = 1 if samples is None else samples[hop.client]
        gone = hop.copy in lost
        replies.append(Reply.lost(hop, Status.FAILED, "away") if gone else Reply(hop.id, end, weight, steps=2))
    method.absorb(replies)
    return hops


def distance(method, size):
    copies = torch.stack(method.copies)[:, :size]
    return float((copies - copies.mean(0)).norm() / len(copies) ** 0.5)


def test_copies_stay_as_far_from_their_mean_as_they_should():
    """They part in ten cycles, here 30 rounds; no round lets their distance grow by more than 5 %."""
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=60, options={"spread": 0.2}).method
    size = LAYOUT.parameter_size
    for r in range(1, 61):
        hops = method.plan(r)
        ends = torch.stack([hop.start + 0.05 * torch.randn(LAYOUT.size, dtype=torch.float64) for hop in hops])
        natural = float((ends - ends.mean(0)).norm() / 3**0.5)
        method.absorb([Reply(hop.id, end, 1, steps=2) for hop, end in zip(hops, ends, strict=True)])
        wanted = 0.2 * min(1, r / 30) * float(method.row.norm())
        assert distance(method, size) == pytest.approx(min(wanted, 1.05 * natural), rel=1e-9)
        assert torch.allclose(torch.stack(method.copies).mean(0), method.row, atol=1e-13)
        assert torch.allclose(method.row, ends.mean(0), atol=1e-13)
    assert distance(method, size) == pytest.approx(wanted)


def test_every_group_gives_one_client_and_no_copy_meets_one_twice_in_k_rounds():
    method = simulate(FedCatPlus, FED, LAYOUT, k=4, rounds=40).method
    for _ in range(6):
        met = {copy: [] for copy in range(4)}
        for _ in range(4):
            for hop in noisy(method):
                met[hop.copy].append(hop.client)
        assert all(len(set(clients)) == 4 for clients in met.values())
    assert method.selector.table.dense(4).sum(0).tolist() == [4 * 6] * 4


def test_the_mean_step_of_a_round_leads_the_next_and_its_share_grows():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=200).method
    last = torch.zeros(LAYOUT.parameter_size, dtype=torch.float64)
    for r in range(120):
        hops = method.plan(r + 1)
        assert all(torch.allclose(hop.sent["step"], last, atol=1e-14) for hop in hops)
        assert all(float(hop.sent["lead"]) == pytest.approx(min(0.9, r / (r + 10))) for hop in hops)
        steps = [hop.copy + 1 for hop in hops]
        method.absorb(
            [
                Reply(h.id, h.start + 0.1 * n, int(FED.sizes[h.client]), steps=n)
                for h, n in zip(hops, steps, strict=True)
            ]
        )
        last = torch.full_like(last, 0.1)  # whoever trained, each of its steps moved by that


def test_the_step_that_leads_is_weighted_by_samples():
    method = simulate(FedCatPlus, FED, LAYOUT, k=2).method
    a, b = method.plan(1)
    method.absorb([Reply(a.id, a.start + 6, 1, steps=3), Reply(b.id, b.start + 2, 9, steps=4)])
    assert torch.allclose(method.lead.step, torch.full_like(method.lead.step, 0.1 * 2 + 0.9 * 0.5))


def test_the_global_model_is_the_average_of_the_copies_mean_over_rounds():
    """The share of round r is 10 / (10 + r), later 0.05 over the sum of the weights so far."""
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=300).method
    start, average = method.row, None
    assert torch.equal(method.models()["global"], start)
    for r in range(230):
        noisy(method)
        share = max(10 / (10 + r), 0.05 / (1 - 0.95 ** (r + 1)))
        average = method.row if average is None else average + share * (method.row - average)
        found = method.models("mean")
        assert torch.allclose(found["global"], average, atol=1e-13)
        assert torch.equal(found["mean"], method.row)
    assert share == pytest.approx(0.05, rel=1e-4)


def test_with_cycles_the_average_is_that_of_the_copies_weighted_mean():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, options={"spread": 0.0, "lead": 0.0, "smoothing": 0.5}).method
    average, seen = None, np.zeros(3)
    for r in range(5):
        for hop in noisy(method, samples=FED.sizes):
            seen[hop.copy] += FED.sizes[hop.client]
        mean = method.row if r % 3 == 2 else weighted_mean(torch.stack(method.copies), seen.tolist())
        share = max(10 / (10 + r), 0.5 / (1 - 0.5 ** (r + 1)))
        average = mean if average is None else average + share * (mean - average)
        assert torch.allclose(method.models()["global"], average, atol=1e-13)
        seen = np.zeros(3) if r % 3 == 2 else seen


def test_a_lost_copy_stays_and_a_round_without_replies_changes_nothing():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=20).method
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
    assert distance(method, size) < 0.05 * float((ends - ends.mean(0))[:, :size].norm())


def test_a_model_that_is_taken_back_takes_its_copies_and_its_step_along():
    method = simulate(FedCatPlus, FED, LAYOUT, k=3, rounds=30).method
    for _ in range(5):
        noisy(method)
    state, models = method.state(), method.models()
    for _ in range(3):
        noisy(method, size=1e6)
    method.rewind(state)
    assert method.round == 8
    assert torch.equal(method.models()["global"], models["global"])
    assert torch.equal(method.lead.step, state["lead"]["step"])
    assert all(torch.equal(copy, state["row"]) for copy in method.copies)
    noisy(method)
    assert float(method.row.norm()) < 10 * float(state["row"].norm())


@pytest.mark.parametrize(("name", "value"), [("spread", -0.1), ("lead", 1.0), ("smoothing", 1.0), ("lead", -0.5)])
def test_options_outside_their_bounds_are_refused(name, value):
    with pytest.raises(SettingError, match=f"{name} must be"):
        simulate(FedCatPlus, FED, LAYOUT, options={name: value})


def test_no_note_on_cycles_unless_there_are_some():
    assert simulate(FedCatPlus, FED, LAYOUT, k=3).method.advice(10, 4) == []
    assert len(simulate(FedCatPlus, FED, LAYOUT, k=3, options=OFF).method.advice(10, 4)) == 2
