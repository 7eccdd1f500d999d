"""What every method promises: the engines agree, no bit depends on the order of replies, on a restore or on company."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import DEVICES, apart, digits_net, federation, layout_of, simulate
from test_base import one_by_one

from fedcat import engines
from fedcat.methods import METHODS
from fedcat.protocol.reply import Reply, Status
from fedcat.runs.simulation import run_together

FED = federation([3, 9, 5, 12, 7, 4, 8, 6, 5], shape=(1, 8, 8))
OPTIONS = {
    "fedprox": {"mu": 0.5},
    "fedgen": {"hidden": 12, "noise": 5, "generator_batch": 6, "generator_steps": 8, "generator_lr": 0.01},
    "fedcluster": {"clusters": 2},
}
NAMES = [name for name, _ in METHODS]
VARIANTS = [
    *((name, {}, {}) for name in NAMES),
    ("scaffold", {"variant": "after-step", "weighting": "samples"}, {}),
    ("scaffold", {"variant": "plain"}, {}),
    ("clusamp", {"similarity": "L1"}, {}),
    ("clusamp", {"similarity": "L2"}, {}),
    ("cyclic", {"reshuffle": True}, {}),
    ("fedgen", {"local_steps": 3}, {}),
    ("fedcat", {}, {"average": 0.9}),
]


def made(name, layout, engine, options=None, **words):
    words = {"rounds": 6, "k": 3, "lr": 0.02, "momentum": 0.5, **words}
    return simulate(
        METHODS.get(name), FED, layout, engine, options={**OPTIONS.get(name, {}), **(options or {})}, **words
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options", "words"), VARIANTS)
def test_the_engines_agree(name, options, words, device):
    layout = layout_of(digits_net(), torch.float64, device)
    sims = [made(name, layout, engine, options, **words) for engine in ("sequential", "stacked")]
    for sim in sims:
        sim.run()
    a, b = (sim.method.row for sim in sims)
    assert torch.isfinite(a).all()
    assert apart(b, a) < 1e-11
    assert [r.clients for r in sims[0].history] == [r.clients for r in sims[1].history]
    assert (sims[0].ledger.up, sims[0].ledger.down) == (sims[1].ledger.up, sims[1].ledger.down)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize(("name", "options", "words"), VARIANTS)
def test_replies_one_by_one_and_out_of_order_give_the_same_bits(name, options, words, engine):
    layout = layout_of(digits_net(), torch.float32)
    whole = made(name, layout, engine, options, exact=True, **words)
    whole.run()
    single = made(name, layout, engine, options, exact=True, **words)
    one_by_one(single, random.Random(1))
    for model, row in whole.method.models().items():
        assert torch.equal(single.method.models()[model], row)
    assert [r.clients for r in single.history] == [r.clients for r in whole.history]
    assert (single.ledger.up, single.ledger.down) == (whole.ledger.up, whole.ledger.down)


@pytest.mark.parametrize(("name", "options", "words"), VARIANTS)
def test_a_restore_in_the_middle_of_a_round_changes_no_bit(name, options, words):
    layout = layout_of(digits_net(), torch.float32)
    whole = made(name, layout, "stacked", options, exact=True, **words)
    whole.run()
    broken = made(name, layout, "stacked", options, exact=True, **words)
    for _ in range(4):
        broken.step()
    broken.method.absorb(broken.engine.train(broken.plan())[1:][::-1])
    resumed = made(name, layout, "stacked", options, exact=True, **words)
    resumed.method.restore(broken.method.state())
    while again := resumed.method.plan(6):
        resumed.method.absorb(resumed.engine.train([(resumed.task, hop) for hop in again]))
    resumed.method.close()
    for model, row in whole.method.models().items():
        assert torch.equal(resumed.method.models()[model], row)


@pytest.mark.parametrize("device", DEVICES)
def test_all_methods_side_by_side_give_the_bits_that_they_give_alone(device):
    layout = layout_of(digits_net(), torch.float32, device)
    alone = [made(name, layout, "stacked", options, exact=True, **words) for name, options, words in VARIANTS]
    for sim in alone:
        sim.run()
    engine = engines.make("stacked", exact=True)
    others = [made(name, layout, engine, seed=1, exact=True) for name in NAMES]
    together = [made(name, layout, engine, options, exact=True, **words) for name, options, words in VARIANTS]
    run_together([*others, *together])
    for (name, *_), one, other in zip(VARIANTS, alone, together, strict=True):
        for model, row in one.method.models().items():
            assert torch.equal(other.method.models()[model], row), name


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_does_not_come_back_leaves_the_rest_to_go_on(name):
    layout = layout_of(digits_net(), torch.float32)
    sim = made(name, layout, "stacked")
    gone = random.Random(0)
    while not sim.done:
        jobs = sim.plan()
        every = len(sim.history) == 2
        replies = [
            Reply.lost(hop, Status.FAILED, "out of reach") if every or gone.random() < 0.4 else reply
            for (_, hop), reply in zip(jobs, sim.engine.train(jobs), strict=True)
        ]
        before = sim.method.models()["global"]
        sim.absorb(replies)
        if every and name not in ("fedcat", "fedcat-dc"):
            assert torch.equal(sim.method.models()["global"], before)
        sim.record()
    assert torch.isfinite(sim.method.models()["global"]).all()
    assert not torch.equal(sim.method.models()["global"], layout.pack(digits_net()))


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("fedavg", 1), ("fedprox", 1), ("clusamp", 1), ("fedcat", 1), ("fedcluster", 1), ("scaffold", 2)],
)
def test_traffic_of_every_round_against_one_model_down_and_up(name, ratio):
    layout = layout_of(digits_net(), torch.float32)
    sim = made(name, layout, "stacked")
    sim.run()
    for round in range(6):
        moved = sum(entry.down + entry.up for entry in sim.ledger if entry.round == round)
        assert moved == ratio * 2 * 3 * layout.size * 4
