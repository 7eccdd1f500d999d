"""The generator's arithmetic, and its trainings."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import DEVICES, apart, digits_net, drive, federation, layout_of, simulate
from torch import nn
from torch.nn import functional

from fedcat.methods import FedAvg
from fedcat.methods.base import run_server_work
from fedcat.methods.fedgen import training
from fedcat.methods.fedgen.fedgen import FedGen
from fedcat.methods.fedgen.generator import (
    Generator,
    adam_corrections,
    adam_step,
    diversity_loss,
    noise_distances,
    teacher_loss,
)
from fedcat.methods.fedgen.training import GeneratorState, GeneratorTraining, TrainingOptions

FED = federation([3, 9, 5, 12, 7, 4, 8, 6])
SMALL = {"hidden": 12, "noise": 5, "generator_batch": 6, "generator_steps": 8, "generator_lr": 0.01}
GENERATOR = Generator(noise=3, classes=4, hidden=5, latent=6)


def reference(generator):
    """Return the generator as PyTorch's own layers."""
    return nn.Sequential(
        nn.Linear(generator.noise + generator.classes, generator.hidden),
        nn.BatchNorm1d(generator.hidden),
        nn.ReLU(),
        nn.Linear(generator.hidden, generator.latent),
    )


def row_of(layers):
    norm = layers[1]
    parts = [*layers[0].parameters(), *norm.parameters(), *layers[3].parameters(), norm.running_mean, norm.running_var]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def drawn(generator, batch=8, seed=0):
    rng = np.random.default_rng(seed)
    noise, labels = (
        torch.from_numpy(rng.random((batch, generator.noise))),
        torch.from_numpy(rng.integers(generator.classes, size=batch)),
    )
    return noise, labels, generator.inputs(noise, labels)


def test_the_generator_is_what_pytorchs_layers_make():
    torch.manual_seed(0)
    layers = reference(GENERATOR).double()
    noise, labels, inputs = drawn(GENERATOR)
    assert torch.equal(inputs, torch.cat([noise, functional.one_hot(labels, 4).double()], 1))
    before = row_of(layers)
    wanted = layers(inputs)
    features, statistics = GENERATOR.generate_in_training(before[: GENERATOR.parameters], inputs)
    assert torch.allclose(features, wanted, atol=1e-13)
    after = torch.cat([before[: GENERATOR.parameters], 0.9 * before[GENERATOR.parameters :] + 0.1 * statistics])
    assert torch.allclose(after, row_of(layers), atol=1e-13)
    assert torch.allclose(GENERATOR.generate(after, inputs), layers.eval()(inputs), atol=1e-13)
    assert GENERATOR.size == len(before)
    torch.manual_seed(5)
    made = GENERATOR.initial()
    torch.manual_seed(5)
    assert torch.equal(made, row_of(reference(GENERATOR)))


def test_the_generator_of_the_experiments_has_its_size():
    """CIFAR-10: 100,948 parameters and 1,024 running statistics, 1.64 times the lab's net of 62,006."""
    generator = Generator(noise=100, classes=10, hidden=512, latent=84)
    assert (generator.parameters, generator.size) == (100_948, 101_972)


def loss_of(p, inputs, labels, weights, far, heads):
    features, _ = GENERATOR.generate_in_training(p, inputs)
    logits = torch.stack([features @ weight.T + bias for weight, bias in heads], 1)
    return teacher_loss(logits, labels, weights) + diversity_loss(features, far)


def test_the_gradient_of_the_generators_loss_against_finite_differences(record_figure):
    torch.manual_seed(2)
    rng = np.random.default_rng(1)
    rows = torch.stack([row_of(reference(GENERATOR).double()) for _ in range(2)])[:, : GENERATOR.parameters]
    heads = [(torch.randn(4, 6).double(), torch.randn(4).double()) for _ in range(3)]
    noise = torch.from_numpy(rng.random((2, 7, 3)))
    labels = torch.from_numpy(rng.integers(4, size=(2, 7)))
    weights, far = torch.from_numpy(rng.random((2, 3, 7))), noise_distances(noise)
    inputs = GENERATOR.inputs(noise, labels)
    leaf = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(leaf, inputs, labels, weights, far, heads).sum(), leaf)
    step, worst = 1e-6, 0.0
    for i in range(GENERATOR.parameters):
        change = torch.zeros_like(rows)
        change[:, i] = step
        ends = [loss_of(rows + sign * change, inputs, labels, weights, far, heads) for sign in (1, -1)]
        worst = max(worst, float(((ends[0] - ends[1]) / (2 * step) - slope[:, i]).abs().max()))
    record_figure("FedGen's generator loss: gradient against finite differences", worst, 1e-7)
    assert slope.abs().max() > 0.1
    assert worst < 1e-7


def test_the_generators_loss_by_hand():
    rng = np.random.default_rng(0)
    features = torch.from_numpy(rng.normal(size=(1, 3, 2)))
    logits = torch.from_numpy(rng.normal(size=(1, 2, 3, 4)))
    noise = torch.from_numpy(rng.random((1, 3, 5)))
    labels, weights = torch.tensor([[1, 3, 1]]), torch.from_numpy(rng.random((1, 2, 3)))
    told = 0.0
    for client in range(2):
        each = [float(functional.cross_entropy(logits[0, client, i], labels[0, i])) for i in range(3)]
        told += np.mean([float(weights[0, client, i]) * each[i] for i in range(3)])
    pairs = [
        float((noise[0, i] - noise[0, j]).square().mean() * (features[0, i] - features[0, j]).abs().mean())
        for i in range(3)
        for j in range(3)
    ]
    assert np.allclose(teacher_loss(logits, labels, weights), [told], atol=1e-12)
    assert np.allclose(diversity_loss(features, noise_distances(noise)), [np.exp(-np.mean(pairs))], atol=1e-12)


def test_adam_on_rows_is_pytorchs():
    torch.manual_seed(0)
    start, slopes = torch.randn(2, 9).double(), torch.randn(5, 2, 9).double()
    p = start.clone()
    zero = torch.zeros_like(p)
    m, v, lr = zero.clone(), zero.clone(), torch.tensor([[0.1], [0.02]]).double()
    corrections = adam_corrections([0, 0], len(slopes), p)
    for step, slope in enumerate(slopes):
        adam_step(p, slope, m, v, lr, 1e-2, [table[:, step] for table in corrections])
    for row, lr in enumerate((0.1, 0.02)):
        leaf = start[row].clone().requires_grad_()
        theirs = torch.optim.Adam([leaf], lr=lr, weight_decay=1e-2)
        for slope in slopes:
            leaf.grad = slope[row].clone()
            theirs.step()
        assert torch.allclose(p[row], leaf.detach(), atol=1e-14)


def training_of(layout, seed, exact=False, clients=3, steps=5):
    torch.manual_seed(seed)
    generator = Generator(noise=4, classes=10, hidden=7, latent=layout.net.head.in_features)
    rows = torch.stack([layout.pack(digits_net(s)) for s in range(clients)])
    shares = torch.full((clients, 10), 1 / clients).to(rows)
    how = TrainingOptions(batch=6, steps=steps, weight_decay=1e-2, teacher=1.0, diversity=1.0)
    return GeneratorTraining(
        target=GeneratorState(generator, generator.initial().to(rows)),
        options=how,
        lr=0.01 * (seed + 1),
        layout=layout,
        rows=rows,
        shares=shares,
        seed=seed,
        round=2,
        exact=exact,
    )


@pytest.mark.parametrize("device", DEVICES)
def test_generators_learn_together_what_they_learn_alone(device):
    layout = layout_of(digits_net(), torch.float64, device)
    alone, together = ([training_of(layout, seed) for seed in range(4)] for _ in range(2))
    for work in alone:
        run_server_work([work])
    run_server_work([together[0], None, *together[1:]])
    for one, other in zip(alone, together, strict=True):
        assert apart(other.target.row, one.target.row) < 1e-12
        assert other.target.steps == 5
        assert apart(one.target.row, training_of(layout, one.seed).target.row) > 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("free", [True, False])
def test_in_exact_mode_company_changes_no_bit(device, free, monkeypatch):
    if not free:
        monkeypatch.setattr(training, "_any_number", lambda work: False)
    layout = layout_of(digits_net(), torch.float32, device)
    alone = training_of(layout, 0, exact=True)
    run_server_work([alone])
    for company in (1, 4, 39):
        beside = [training_of(layout, seed, exact=True) for seed in range(company + 1)]
        run_server_work(beside)
        assert torch.equal(beside[0].target.row, alone.target.row)


def test_lessons_of_several_simulations_are_given_at_once(monkeypatch):
    layout = layout_of(digits_net(), torch.float32)
    widths = []
    real = training._train
    monkeypatch.setattr(training, "_train", lambda some: widths.append(len(some)) or real(some))
    engine = simulate(FedAvg, FED, layout, "stacked").engine
    sims = [simulate(FedGen, FED, layout, engine, options=SMALL, rounds=3, seed=seed) for seed in range(4)]
    drive(*sims, simulate(FedAvg, FED, layout, engine, rounds=3))
    assert widths == [4, 4, 4]


def test_a_head_of_several_layers_and_a_linear_one_are_the_same_to_the_generator():
    class Deep(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.features, self.head = inner.features, nn.Sequential(inner.head)

        def forward(self, x):
            return self.head(self.features(x))

    one = training_of(layout_of(digits_net(), torch.float64), 0)
    deep = layout_of(Deep(digits_net()), torch.float64)
    other = replace(one, layout=deep, target=GeneratorState(one.target.generator, one.target.row.clone()))
    run_server_work([one])
    run_server_work([other])
    assert apart(other.target.row, one.target.row) < 1e-13


def test_a_generator_learns_to_be_recognised():
    """After its trainings the clients' heads take the generated features for the wanted labels, and did not before."""
    layout = layout_of(digits_net(), torch.float32)
    work = training_of(layout, 0, clients=2, steps=400)
    generator, heads = work.target.generator, training._Heads(layout, [work.rows])

    def recognised():
        rng = torch.Generator().manual_seed(9)
        labels = torch.arange(10).repeat(20)
        inputs = generator.inputs(torch.rand(200, 4, generator=rng), labels)
        logits = heads(generator.generate(work.target.row, inputs)[None])[0]
        return float((logits.argmax(-1) == labels).float().mean())

    assert recognised() < 0.3
    run_server_work([work])
    assert recognised() > 0.9


def test_two_lessons_are_what_pytorchs_layers_and_adam_make_of_them():
    """Uneven shares, other weights than 1, and an optimizer that goes on from work to work."""
    layout = layout_of(digits_net(), torch.float64)
    first = training_of(layout, 0)
    rng = np.random.default_rng(4)
    shares = torch.from_numpy(rng.dirichlet(np.ones(3), size=10).T.copy())
    shares[:, 7] = 0.0
    how = replace(first.options, teacher=2.0, diversity=0.5)
    generator = first.target.generator
    layers = reference(generator).double()
    parts = [*layers[0].parameters(), *layers[1].parameters(), *layers[3].parameters()]
    with torch.no_grad():
        for part, values in zip(parts, generator._views(first.target.row).values(), strict=True):
            part.copy_(values)
    adam = torch.optim.Adam(parts, lr=0.1, weight_decay=how.weight_decay)
    heads = [functools.partial(functional.linear, weight=w, bias=c) for w, c in map(head_of(layout), first.rows)]
    for round, lr in ((2, 0.03), (3, 0.02)):
        work = replace(first, shares=shares, options=how, round=round, lr=lr)
        labels, noise = work.draw()
        assert 7 not in labels
        adam.param_groups[0]["lr"] = lr
        for y, z in zip(labels, noise, strict=True):
            features = layers(generator.inputs(z, y))
            told = sum(
                (share[y] * functional.cross_entropy(head(features), y, reduction="none")).mean()
                for head, share in zip(heads, shares, strict=True)
            )
            far = (features[:, None] - features[None]).abs().mean(-1)
            alike = torch.exp(-((z[:, None] - z[None]).square().mean(-1) * far).mean())
            adam.zero_grad()
            (2.0 * told + 0.5 * alike).backward()
            adam.step()
        run_server_work([work])
    assert apart(first.target.row, row_of(layers)) < 1e-11


def head_of(layout):
    """Return a function from a row to the weight and the bias of its head."""
    return lambda row: (layout.unpack(row)["head.weight"], layout.unpack(row)["head.bias"])
