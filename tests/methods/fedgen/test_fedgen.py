from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import digits_net, drive, federation, layout_of, philox, simulate, small_net, step
from torch import nn
from torch.nn import functional

from fedcat.core.errors import SettingError
from fedcat.core.rng import Purpose, random_stream
from fedcat.methods import FedAvg
from fedcat.methods.base import run_server_work
from fedcat.methods.fedgen.fedgen import FedGen, GeneratorRule
from fedcat.methods.fedgen.generator import Generator
from fedcat.models.nets import Net
from fedcat.protocol.local_rule import Batch, LossInputs
from fedcat.protocol.reply import Reply, Status

FED = federation([3, 9, 5, 12, 7, 4, 8, 6])
SMALL = {"hidden": 12, "noise": 5, "generator_batch": 6, "generator_steps": 8, "generator_lr": 0.01}
GENERATOR = Generator(noise=3, classes=4, hidden=5, latent=6)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_its_two_terms_it_is_fedavg_bit_for_bit(engine, dtype, monkeypatch):
    monkeypatch.setattr(
        "fedcat.engines.gradients.choose.manual_gradients", lambda *given: None
    )  # only other losses go without
    layout = layout_of(digits_net(), dtype)
    words = {"rounds": 4, "momentum": 0.5, "exact": True}
    gen = simulate(FedGen, FED, layout, engine, options={**SMALL, "a": 0.0, "b": 0.0}, **words)
    plain = simulate(FedAvg, FED, layout, engine, **words)
    drive(gen)
    drive(plain)
    assert torch.equal(gen.method.row, plain.method.row)
    assert gen.method.generator.steps == 4 * 8


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_the_first_round_is_fedavgs_and_the_second_is_not(engine, monkeypatch):
    monkeypatch.setattr("fedcat.engines.gradients.choose.manual_gradients", lambda *given: None)
    layout = layout_of(digits_net(), torch.float32)
    gen = simulate(FedGen, FED, layout, engine, options=SMALL, exact=True, rounds=3)
    plain = simulate(FedAvg, FED, layout, engine, exact=True, rounds=3)
    for same in (True, False):
        step(gen)
        step(plain)
        assert torch.equal(gen.method.row, plain.method.row) == same


def test_a_clients_loss_by_hand():
    """CE + a * CE(head(G(y')), y') + b * KL(p(head(G(y))) || p(x)), with as many y' as the batch has samples."""
    layout = layout_of(digits_net(), torch.float64)
    row = layout.pack(layout.net)
    bound = layout.bind(layout.parameter_views(row), {})
    generator = Generator(noise=3, classes=10, hidden=5, latent=layout.net.head.in_features)
    rule = GeneratorRule(generator, a=2.0, b=3.0, decay=0.5, local_steps=2)
    sim = simulate(FedGen, FED, layout, batch_size=4)
    task = sim.task
    (_, hop), *_ = sim.plan()
    hop = replace(hop, sent={"generator": generator.initial().double()}, round=3)
    rng = random_stream(0, Purpose.RULE, 3, hop.client, 0)
    numbers = rule.draw(rng, task, hop, 4)
    assert torch.allclose(numbers["a"], torch.tensor([1.0, 1.0, 0.0, 0.0]).double() * 2.0 * 0.5**3)
    assert torch.allclose(numbers["b"], torch.tensor([1.0, 1.0, 0.0, 0.0]).double() * 3.0 * 0.5**3)
    x, y = FED.train.inputs(slice(0, 3), torch.float64), FED.train.y[:3]
    step = {name: values[0] for name, values in numbers.items()}
    made = bound.head(
        generator.generate(hop.sent["generator"], generator.inputs(step["noise"][:3], step["labels"][:3]))
    )
    guide = bound.head(generator.generate(hop.sent["generator"], generator.inputs(step["own_noise"][:3], y)))
    wanted = (
        functional.cross_entropy(bound.logits(x), y)
        + 2.0 * 0.125 * functional.cross_entropy(made, step["labels"][:3])
        + 3.0 * 0.125 * functional.kl_div(bound.logits(x).log_softmax(1), guide.softmax(1), reduction="batchmean")
    )
    beside = LossInputs(row, hop.sent, {}, {}, step)
    assert torch.allclose(rule.loss(bound, Batch(x, y), beside), wanted, atol=1e-13)
    padded = Batch(torch.cat([x, x[:1]]), torch.cat([y, y[:1]]), torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
    assert torch.allclose(rule.loss(bound, padded, beside), wanted, atol=1e-13)


def test_no_gradient_flows_through_the_generators_prediction():
    """The target of the second term is detached: with a = 0 the head's gradient is that of a fixed target."""
    layout = layout_of(digits_net(), torch.float64)
    leaf = layout.pack(layout.net).requires_grad_()
    bound = layout.bind(layout.parameter_views(leaf), {})
    generator = Generator(noise=3, classes=10, hidden=5, latent=layout.net.head.in_features)
    x, y = FED.train.inputs(slice(0, 3), torch.float64), FED.train.y[:3]
    row, noise = generator.initial().double(), torch.rand(3, 3).double()
    numbers = {"noise": noise, "labels": y, "own_noise": noise, "a": torch.tensor(0.0), "b": torch.tensor(1.0)}
    loss = GeneratorRule(generator, 0.0, 1.0, 1.0, 0).loss(
        bound, Batch(x, y), LossInputs(leaf, {"generator": row}, {}, {}, numbers)
    )
    (found,) = torch.autograd.grad(loss, leaf)
    target = bound.head(generator.generate(row, generator.inputs(noise, y))).softmax(1).detach()
    logits = bound.logits(x)
    fixed = functional.cross_entropy(logits, y) + functional.kl_div(
        logits.log_softmax(1), target, reduction="batchmean"
    )
    (wanted,) = torch.autograd.grad(fixed, leaf)
    assert torch.allclose(found, wanted, atol=1e-13)


def test_the_generators_traffic_is_in_the_ledger_and_label_counts_go_up_once():
    layout = layout_of(digits_net(), torch.float32)
    sim = simulate(FedGen, FED, layout, "stacked", options=SMALL, rounds=12, k=4)
    drive(sim)
    model, generator = layout.size * 4, sim.method.rule.generator.size * 4
    seen: set[int] = set()
    for round in range(12):
        entries = sim.history[round].hops
        fresh = {entry.client for entry in entries} - seen
        seen |= fresh
        assert sum(entry.down for entry in entries) == 4 * (model + (generator if round else 0))
        assert sum(entry.up for entry in entries) == 4 * model + len(fresh) * 10 * 8
        if round and not fresh:
            ratio = sum(entry.down + entry.up for entry in entries) / (4 * 2 * model)
            assert ratio == pytest.approx(1 + generator / (2 * model), rel=1e-12)
    assert seen == set(range(8))
    assert [sim.method.labels[client].tolist() for client in range(8)] == FED.class_counts.tolist()


def test_shares_are_of_the_clients_that_came_back_and_labels_that_none_holds_are_not_drawn():
    layout = layout_of(digits_net(), torch.float64)
    sim = simulate(FedGen, FED, layout, "stacked", options=SMALL, k=3)
    jobs = sim.plan()
    replies = sim.engine.train(jobs)
    sim.absorb([Reply.lost(jobs[0][1], Status.FAILED, "gone"), *replies[1:]])
    work = sim.method.work()
    counts = FED.class_counts[[hop.client for _, hop in jobs[1:]]]
    held = counts.sum(0) > 0
    assert not held.all()
    assert np.allclose(work.shares[:, held], counts[:, held] / counts.sum(0)[held])
    assert torch.equal(work.rows, torch.stack([reply.end for reply in replies[1:]]))
    labels, noise = work.draw()
    assert set(labels.unique().tolist()) <= set(np.flatnonzero(held))
    assert 0 <= float(noise.min()) < float(noise.max()) < 1
    assert sim.method.work() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"a": -1.0}, "a must be at least 0, got -1"),
        ({"generator_batch": 1}, "generator_batch must be at least 2"),
        ({"decay": 1.5}, "decay must be at least 0 and at most 1, got 1.5"),
        ({"hidden": 0}, "hidden must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        simulate(FedGen, FED, layout_of(digits_net()), options=options)


def test_a_net_whose_head_takes_something_else_is_refused():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.features, self.between, self.head = nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 10)

        def forward(self, x):
            return self.head(torch.relu(self.between(self.features(x))))

    with pytest.raises(SettingError, match=r"net Hidden must compute its output as self.head\(self.features\(x\)\)"):
        simulate(FedGen, FED, layout_of(Hidden()))


def test_the_weights_decay_to_a_floor_and_zero_stays_zero():
    layout = layout_of(digits_net())
    sim = simulate(FedGen, FED, layout, options={**SMALL, "a": 0.0, "b": 2.0, "decay": 0.1})
    (task, hop), *_ = sim.plan()
    hop = replace(hop, sent={"generator": sim.method.generator.row})
    for round, wanted in ((1, 0.2), (3, 2e-3), (9, 1e-4)):
        numbers = sim.method.rule.draw(np.random.default_rng(0), task, replace(hop, round=round), 2)
        assert torch.allclose(numbers["b"], torch.full((2,), wanted).double())
        assert not numbers["a"].any()


def test_the_generators_learning_rate_decays_and_each_round_has_its_own_random_stream():
    sim = simulate(FedGen, FED, layout_of(digits_net()), options={**SMALL, "generator_lr_decay": 0.5}, rounds=3)
    given = []
    for round in range(3):
        sim.absorb(sim.engine.train(sim.plan()))
        given.append(sim.method.work())
        assert given[-1].lr == pytest.approx(0.01 * 0.5**round)
        assert given[-1].target.steps == 8 * round
        run_server_work([given[-1]])
        sim.record({})
    noise = [work.draw()[1] for work in given]
    assert not torch.equal(noise[0], noise[1])


def test_a_net_without_parts_is_told_what_is_missing():
    with pytest.raises(SettingError, match="has no part 'features'"):
        simulate(FedGen, FED, layout_of(small_net()))


def test_a_net_with_buffers_has_its_features_too():
    net = Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 10))
    sim = simulate(FedGen, federation([6] * 6), layout_of(net, torch.float32), options=SMALL, rounds=2, k=3)
    drive(sim)
    assert sim.method.rule.generator.latent == 6
    assert torch.isfinite(sim.method.row).all()


def test_a_head_normalizes_the_features_of_each_term_alone():
    torch.manual_seed(0)
    features, head = nn.Sequential(nn.Flatten(), nn.Linear(64, 6)), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 10))
    layout = layout_of(Net(features, head))
    parameters, buffers = layout.pack(layout.net).tensor_split([layout.parameter_size])
    nets = [layout.bind(layout.parameter_views(parameters), layout.buffer_views(buffers)) for _ in range(2)]
    generator = Generator(noise=3, classes=10, hidden=5, latent=6)
    x, y, row = FED.train.inputs(slice(0, 3), torch.float64), FED.train.y[:3], generator.initial().double()
    noises = {name: torch.rand(3, 3).double() for name in ("noise", "own_noise")}
    inputs = LossInputs(parameters, {"generator": row}, {}, {}, {**noises, "labels": y, "a": 1.0, "b": 1.0})
    GeneratorRule(generator, 1.0, 1.0, 1.0, 0).loss(nets[0], Batch(x, y), inputs)
    nets[1].logits(x)
    for noise in noises.values():
        nets[1].head(generator.generate(row, generator.inputs(noise, y)))
    for name, after in nets[1].buffers.items():
        assert torch.allclose(nets[0].buffers[name], after, atol=1e-14)
    sims = [
        simulate(FedGen, FED, layout, engine, options=SMALL, rounds=3, join_lone=True)
        for engine in ("sequential", "stacked")
    ]
    drive(*sims[:1])
    drive(*sims[1:])
    assert torch.allclose(sims[0].method.row, sims[1].method.row, atol=1e-10)


@pytest.mark.parametrize("name", ["hidden", "noise", "generator_batch"])
def test_a_size_that_cannot_be_is_named(name):
    with pytest.raises(SettingError, match=f"^{name} must be at least"):
        simulate(FedGen, FED, layout_of(digits_net()), options={name: 0})


@pytest.mark.parametrize("name", ["a", "b", "teacher", "diversity", "local_steps", "generator_steps", "generator_lr"])
def test_a_negative_weight_or_count_is_named(name):
    value = -1 if name.endswith("steps") else -1.0
    with pytest.raises(SettingError, match=f"^{name} must be at least 0(?: and at most 1,000,000)?, got -1"):
        simulate(FedGen, FED, layout_of(digits_net()), options={name: value})


def test_the_generator_starts_and_trains_from_the_servers_own_streams():
    """Purpose 9: the initial weights by client 1, the draws of a round's training by the round."""
    layout = layout_of(digits_net(), torch.float32)
    sim = simulate(FedGen, FED, layout, options=SMALL, rounds=3, k=3)
    seed = sim.method.context.seed
    with torch.random.fork_rng():
        torch.manual_seed(int(philox(seed, 9, client=1).integers(2**63)))
        assert torch.equal(sim.method.generator.row, sim.method.rule.generator.initial())
    for round in range(2):
        sim.absorb(sim.engine.train(sim.plan()))
        work = sim.method.work()
        labels, noise = work.draw()
        rng = philox(seed, 9, round=round)
        held = np.flatnonzero(work.shares.sum(0).numpy() > 0)
        assert np.array_equal(labels.numpy(), rng.choice(held, size=(8, 6)))
        assert np.array_equal(noise.numpy(), rng.random((8, 6, 5), dtype=np.float32))
        run_server_work([work])
        sim.record({})
