"""What every method promises: the engines agree, no bit depends on the order of replies, on a restore or on company."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
from helpers import (
    DEVICES,
    Unordered,
    apart,
    digits_net,
    drive,
    federation,
    layout_of,
    one_by_one,
    simulate,
    step,
)
from hypothesis import given, settings
from hypothesis.strategies import booleans, integers

from fedcat import engines
from fedcat.core.options import options as options_of
from fedcat.data.augment import Augment, Augmentation, flip
from fedcat.methods import METHODS
from fedcat.methods.base import declared
from fedcat.methods.server_optimizer import SERVER_OPTIMIZERS
from fedcat.protocol.local_optimizer import Adam
from fedcat.protocol.reply import Reply, Status
from fedcat.runs.build import Builder
from fedcat.runs.driver import Driver
from fedcat.runs.state import decode, encode

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
    ("fedcat-plus", {"spread": 0.0}, {"average": 0.9}),
    ("fedcat-plus", {"lead": 0.0, "retry": 1}, {}),
    ("fedcat-plus", {"smoothing": 0.0}, {}),
    ("fedcat-plus", {"smoothing": 0.9}, {"average": 4.0}),
    ("fedcross", {"collaborator": "in-order", "alpha": 0.8}, {}),
    ("fedmr", {"first_stage": 2}, {}),
    ("fedcm", {"weighting": "equal"}, {"average": 0.9, "weight_decay": 0.01}),
]


def made(name, layout, engine, options=None, **words):
    words = {"rounds": 6, "k": 3, "lr": 0.02, "momentum": 0.5, **words}
    server, local = words.pop("server", None), words.pop("local", None)
    if local is not None:
        words["optimizer"] = local
    if server is not None:
        words["server_optimizer"] = SERVER_OPTIMIZERS.get(server)(0.5)
    return simulate(
        METHODS.get(name), FED, layout, engine, options={**OPTIONS.get(name, {}), **(options or {})}, **words
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options", "words"), VARIANTS)
def test_the_engines_agree(name, options, words, device):
    layout = layout_of(digits_net(), torch.float64, device)
    sims = [made(name, layout, engine, options, **words) for engine in ("sequential", "stacked")]
    for sim in sims:
        drive(sim)
    a, b = (sim.method.row for sim in sims)
    assert torch.isfinite(a).all()
    assert apart(b, a) < 1e-11
    assert [r.clients for r in sims[0].history] == [r.clients for r in sims[1].history]
    assert (sims[0].ledger.up, sims[0].ledger.down) == (sims[1].ledger.up, sims[1].ledger.down)


def same(found, wanted):
    """Check that two runs gave the same bits: models, hops, traffic and metrics of every round."""
    for model, row in wanted.method.models().items():
        assert torch.equal(found.method.models()[model], row)
    assert [replace(r, seconds=0.0) for r in found.history] == [replace(r, seconds=0.0) for r in wanted.history]
    assert (found.ledger.up, found.ledger.down) == (wanted.ledger.up, wanted.ledger.down)


@pytest.mark.parametrize(("name", "options", "words"), VARIANTS)
def test_replies_that_are_late_and_out_of_order_give_the_bits_of_a_barrier(name, options, words):
    engine = "sequential" if name in ("fedavg", "fedcat-dc") else "stacked"
    layout = layout_of(digits_net(), torch.float32)
    words = {"exact": True, "evaluate_every": 2, **words}
    whole = drive(made(name, layout, engine, options, **words))
    same(one_by_one(made(name, layout, engine, options, **words), seed=1), whole)


RESTORED = [
    *VARIANTS,
    ("fedcat", {}, {"server": "momentum", "average": 0.8}),
    ("fedcat", {}, {"server": "adam", "local": Adam(), "augment": Augment((Augmentation(flip),))}),
    ("fedcluster", {}, {"server": "momentum", "average": 0.5}),
    ("scaffold", {}, {"server": "adam", "average": 0.8}),
    ("fedgen", {}, {"server": "momentum"}),
]


@pytest.mark.parametrize(("name", "options", "words"), RESTORED)
def test_a_restore_at_any_moment_changes_no_bit(name, options, words):
    layout = layout_of(digits_net(), torch.float32)
    words = {"exact": True, "evaluate_every": 2, "run_name": name, **words}
    whole = drive(made(name, layout, "stacked", options, **words))

    @settings(max_examples=3, deadline=None, derandomize=True)
    @given(moment=integers(0, 20), order=integers(0, 1000), barrier=booleans())
    def check(moment, order, barrier):
        broken = made(name, layout, "stacked", options, **words)
        broken.engine = Unordered(broken.engine, order)
        driver = Driver([broken], barrier=False)
        for _ in range(moment):
            if driver.active:
                driver.step()
        state = broken.state()
        plain, tensors = encode(state)  # encodes copies
        if barrier:
            driver.run()
        again, after = encode(state)  # what went on must not have changed the state
        assert plain == again
        assert all(torch.equal(tensors[name], tensor) for name, tensor in after.items())
        resumed = made(name, layout, "stacked", options, **words)
        resumed.restore(decode(json.loads(json.dumps(plain)), tensors))
        resumed.engine = Unordered(resumed.engine, order + 1)
        same(drive(resumed, barrier=barrier), whole)

    check()


@pytest.mark.parametrize("device", DEVICES)
def test_all_methods_side_by_side_give_the_bits_that_they_give_alone(device):
    layout = layout_of(digits_net(), torch.float32, device)
    alone = [made(name, layout, "stacked", options, exact=True, **words) for name, options, words in VARIANTS]
    for sim in alone:
        drive(sim)
    engine = engines.make("stacked", exact=True)
    others = [made(name, layout, engine, seed=1, exact=True) for name in NAMES]
    together = [made(name, layout, engine, options, exact=True, **words) for name, options, words in VARIANTS]
    drive(*others, *together)
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
        sim.record({})
    assert torch.isfinite(sim.method.models()["global"]).all()
    assert not torch.equal(sim.method.models()["global"], layout.pack(digits_net()))


@pytest.mark.parametrize(
    ("name", "ratio"),
    [
        *(
            ("fedavg", 1),
            ("fedprox", 1),
            ("clusamp", 1),
            ("fedcat", 1),
            ("fedcluster", 1),
            ("fedcross", 1),
            ("fedmr", 1),
        ),
        *(("scaffold", 2), ("fedcm", 1.5), ("fedcat-plus", 1.5)),
    ],
)
def test_traffic_of_every_round_against_one_model_down_and_up(name, ratio):
    """A step that leads travels with its share, one number; for FedCat-Plus a client reports its label counts once."""
    layout = layout_of(digits_net(), torch.float32)
    sim = made(name, layout, "stacked")
    drive(sim)
    told: set[int] = set()
    for record in sim.history:
        moved = sum(hop.down + hop.up for hop in record.hops)
        fresh = {hop.client for hop in record.hops} - told if name == "fedcat-plus" else set()
        told |= fresh
        assert moved == ratio * 2 * 3 * layout.size * 4 + (3 * 4 if ratio == 1.5 else 0) + len(fresh) * 10 * 8


@pytest.mark.parametrize("name", NAMES)
def test_the_hops_of_every_round_have_the_learning_rate_of_the_schedule(name):
    given = {"dataset": "digits", "clients": 12, "per_round": 3, "rounds": 5, "epochs": 1, "workers": 1}
    decay = {"lr": 0.06, "lr_schedule": "inverse", "lr_decay": 0.5}
    options = {option: value for option, value in OPTIONS.get(name, {}).items() if option != "hidden"}
    options |= {"gain": 0.0} if name == "fedcat-plus" else {}  # else the rate depends on the model as well
    sim = Builder().build({"method": name, **given, **decay, "method_options": options})
    found = []
    while not sim.done:
        jobs = sim.plan()
        found += [(hop.round, hop.lr) for _, hop in jobs]
        sim.absorb(sim.engine.train(jobs))
        sim.record({})
    led = [round / (round + 10) for round in range(5)]
    shares = {"fedcm": [0.1] * 5, "fedcat-plus": [1 - a for a in led]}.get(name, [1.0] * 5)
    wanted = [(round, share * 0.06 / (1 + 0.5 * round)) for round, share in enumerate(shares) for _ in range(3)]
    assert found == [(round, pytest.approx(lr, rel=1e-12)) for round, lr in wanted]


STEPPED = [(name, "momentum") for name in NAMES if name not in ("cyclic", "fedadam", "fedcross", "fedmr")]
STEPPED += [("fedadam", "adam"), ("fedcat", "adam")]


@pytest.mark.parametrize(("name", "optimizer"), STEPPED)
def test_a_restored_method_goes_on_with_its_server_optimizer_and_its_average(name, optimizer):
    layout = layout_of(digits_net(), torch.float32)
    options, stepper = {"smoothing": 0.9} if name == "fedcat-plus" else {}, SERVER_OPTIMIZERS.get(optimizer)
    sims = [
        made(name, layout, "stacked", options, exact=True, average=0.8, server_optimizer=stepper(0.5)) for _ in range(2)
    ]
    whole, resumed = sims
    for _ in range(4 * getattr(whole.method, "stages", 1)):
        step(whole)
    resumed.method.restore(whole.method.state())
    assert resumed.method.round == 4
    for sim in sims:
        while hops := sim.method.plan(6):
            sim.method.absorb(sim.engine.train([(sim.task, hop) for hop in hops]))
        sim.method.close()
    for model, row in whole.method.models().items():
        assert torch.equal(resumed.method.models()[model], row), model
    assert not torch.equal(whole.method.models()["average"], whole.method.models()["global"])


def test_the_options_of_every_method_and_their_defaults():
    weighting = {"weighting": "samples"}
    cat = {"grouping": True, "concatenation": True, "epsilon": 0.5, "lambda": 1.0, "retry": 0}
    plus = {"spread": 0.15, "lead": 0.95, "own": 1.0, "gain": 1.0, "smoothing": 4.0, "skew": None}
    found = {name: options_of(METHODS.get(name)) for name in NAMES if name != "fedgen"}
    assert found == {
        "clusamp": {"similarity": "cosine"},
        "cyclic": {"reshuffle": False},
        "fedadam": weighting,
        "fedavg": weighting,
        "fedavgm": weighting,
        "fedcat": cat,
        "fedcat-dc": {**cat, "grouping": False},
        "fedcat-gc": {**cat, "concatenation": False},
        "fedcat-plus": {**plus, **{name: cat[name] for name in ("grouping", "epsilon", "lambda", "retry")}},
        "fedcluster": {"clusters": 0, **weighting},
        "fedcm": {"alpha": 0.1, **weighting},
        "fedcross": {"alpha": 0.99, "collaborator": "least-similar"},
        "fedmr": {"first_stage": 0},
        "fedprox": {"mu": 0.01, **weighting},
        "scaffold": {"variant": "corrected", "weighting": "equal"},
    }


def test_what_every_method_declares():
    optimizers = {name: declared(METHODS.get(name), "default_server_optimizer", "?") for name in NAMES}
    own = {"cyclic": None, "fedcross": None, "fedmr": None, "fedadam": "adam", "fedavgm": "momentum"}
    assert optimizers == {name: own.get(name, "mean") for name in NAMES}
    models = {name: declared(METHODS.get(name), "extra_models", "?") for name in NAMES}
    copies = {"fedcross": ("copies",), "fedmr": ("copies",)}
    assert models == {n: ("mean", "copies") if n.startswith("fedcat") else copies.get(n, ()) for n in NAMES}
    assert declared(lambda context: None, "extra_models", "unknown") == "unknown"
