"""The generator's arithmetic, and its lessons."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import DEVICES, apart, digits_net, federation, layout_of, simulate
from torch import nn
from torch.nn import functional

from fedcat.methods import FedAvg
from fedcat.methods.base import do_together
from fedcat.methods.fedgen import training as lessons
from fedcat.methods.fedgen.fedgen import FedGen
from fedcat.methods.fedgen.generator import GeneratorForm, RowAdam, generator_loss, noise_distances
from fedcat.methods.fedgen.training import Lesson, Pupil, Training
from fedcat.runs.simulation import run_together

FED = federation([3, 9, 5, 12, 7, 4, 8, 6])
SMALL = {"hidden": 12, "noise": 5, "generator_batch": 6, "generator_steps": 8, "generator_lr": 0.01}
FORM = GeneratorForm(noise=3, classes=4, hidden=5, latent=6)


def reference(form):
    """Return the generator as PyTorch's own layers."""
    return nn.Sequential(
        nn.Linear(form.noise + form.classes, form.hidden),
        nn.BatchNorm1d(form.hidden),
        nn.ReLU(),
        nn.Linear(form.hidden, form.latent),
    )


def row_of(layers):
    norm = layers[1]
    parts = [*layers[0].parameters(), *norm.parameters(), *layers[3].parameters(), norm.running_mean, norm.running_var]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def drawn(form, batch=8, seed=0):
    rng = np.random.default_rng(seed)
    noise, labels = (
        torch.from_numpy(rng.random((batch, form.noise))),
        torch.from_numpy(rng.integers(form.classes, size=batch)),
    )
    return noise, labels, form.inputs(noise, labels)


def test_the_generator_is_what_pytorchs_layers_make():
    torch.manual_seed(0)
    layers = reference(FORM).double()
    noise, labels, inputs = drawn(FORM)
    assert torch.equal(inputs, torch.cat([noise, functional.one_hot(labels, 4).double()], 1))
    before = row_of(layers)
    wanted = layers(inputs)
    features, statistics = FORM.trained(before[: FORM.parameters], inputs)
    assert torch.allclose(features, wanted, atol=1e-13)
    after = torch.cat([before[: FORM.parameters], 0.9 * before[FORM.parameters :] + 0.1 * statistics])
    assert torch.allclose(after, row_of(layers), atol=1e-13)
    assert torch.allclose(FORM.evaluated(after, inputs), layers.eval()(inputs), atol=1e-13)
    assert FORM.size == len(before)
    torch.manual_seed(5)
    made = FORM.initial()
    torch.manual_seed(5)
    assert torch.equal(made, row_of(reference(FORM)))


def test_the_generator_of_the_experiments_has_its_size():
    """CIFAR-10: 100,948 parameters and 1,024 running statistics, 1.64 times the lab's net of 62,006."""
    form = GeneratorForm(noise=100, classes=10, hidden=512, latent=84)
    assert (form.parameters, form.size) == (100_948, 101_972)


def loss_of(p, inputs, labels, weights, far, heads):
    features, _ = FORM.trained(p, inputs)
    logits = torch.stack([features @ weight.T + bias for weight, bias in heads], 1)
    return generator_loss(features, logits, labels, weights, far).sum(0)


def test_the_gradient_of_the_generators_loss_against_finite_differences(record_figure):
    torch.manual_seed(2)
    rng = np.random.default_rng(1)
    rows = torch.stack([row_of(reference(FORM).double()) for _ in range(2)])[:, : FORM.parameters]
    heads = [(torch.randn(4, 6).double(), torch.randn(4).double()) for _ in range(3)]
    noise = torch.from_numpy(rng.random((2, 7, 3)))
    labels = torch.from_numpy(rng.integers(4, size=(2, 7)))
    weights, far = torch.from_numpy(rng.random((2, 3, 7))), noise_distances(noise)
    inputs = FORM.inputs(noise, labels)
    leaf = rows.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(leaf, inputs, labels, weights, far, heads).sum(), leaf)
    step, worst = 1e-6, 0.0
    for i in range(FORM.parameters):
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
    for device in range(2):
        each = [float(functional.cross_entropy(logits[0, device, i], labels[0, i])) for i in range(3)]
        told += np.mean([float(weights[0, device, i]) * each[i] for i in range(3)])
    pairs = [
        float((noise[0, i] - noise[0, j]).square().mean() * (features[0, i] - features[0, j]).abs().mean())
        for i in range(3)
        for j in range(3)
    ]
    found = generator_loss(features, logits, labels, weights, noise_distances(noise))
    assert np.allclose(found[:, 0], [told, np.exp(-np.mean(pairs))], atol=1e-12)


def test_adam_on_rows_is_pytorchs():
    torch.manual_seed(0)
    start, slopes = torch.randn(2, 9).double(), torch.randn(5, 2, 9).double()
    p = start.clone()
    zero = torch.zeros_like(p)
    adam = RowAdam(zero, zero, [0, 0], torch.tensor([[0.1], [0.02]]).double(), 1e-2)
    for slope in slopes:
        p = adam.step(p, slope)
    for row, lr in enumerate((0.1, 0.02)):
        leaf = start[row].clone().requires_grad_()
        theirs = torch.optim.Adam([leaf], lr=lr, weight_decay=1e-2)
        for slope in slopes:
            leaf.grad = slope[row].clone()
            theirs.step()
        assert torch.allclose(p[row], leaf.detach(), atol=1e-14)


def lesson_of(layout, seed, exact=False, devices=3, steps=5):
    torch.manual_seed(seed)
    form = GeneratorForm(noise=4, classes=10, hidden=7, latent=layout.net.head.in_features)
    rows = torch.stack([layout.pack(digits_net(s)) for s in range(devices)])
    shares = torch.full((devices, 10), 1 / devices).to(rows)
    how = Training(batch=6, steps=steps, weight_decay=1e-2, teacher=1.0, diversity=1.0)
    return Lesson(Pupil(form, form.initial().to(rows)), how, 0.01 * (seed + 1), layout, rows, shares, seed, 2, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_generators_learn_together_what_they_learn_alone(device):
    layout = layout_of(digits_net(), torch.float64, device)
    alone, together = ([lesson_of(layout, seed) for seed in range(4)] for _ in range(2))
    for lesson in alone:
        do_together([lesson])
    do_together([together[0], None, *together[1:]])
    for one, other in zip(alone, together, strict=True):
        assert apart(other.pupil.row, one.pupil.row) < 1e-12
        assert other.pupil.steps == 5
        assert apart(one.pupil.row, lesson_of(layout, one.seed).pupil.row) > 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("free", [True, False])
def test_in_exact_mode_company_changes_no_bit(device, free, monkeypatch):
    if not free:
        monkeypatch.setattr(lessons, "_width_is_free", lambda lesson: False)
    layout = layout_of(digits_net(), torch.float32, device)
    alone = lesson_of(layout, 0, exact=True)
    do_together([alone])
    for company in (1, 4, 39):
        beside = [lesson_of(layout, seed, exact=True) for seed in range(company + 1)]
        do_together(beside)
        assert torch.equal(beside[0].pupil.row, alone.pupil.row)


def test_lessons_of_several_simulations_are_given_at_once(monkeypatch):
    layout = layout_of(digits_net(), torch.float32)
    widths = []
    real = lessons._teach
    monkeypatch.setattr(lessons, "_teach", lambda some: widths.append(len(some)) or real(some))
    engine = simulate(FedAvg, FED, layout, "stacked").engine
    sims = [simulate(FedGen, FED, layout, engine, options=SMALL, rounds=3, seed=seed) for seed in range(4)]
    run_together([*sims, simulate(FedAvg, FED, layout, engine, rounds=3)])
    assert widths == [4, 4, 4]


def test_a_head_of_several_layers_and_a_linear_one_are_the_same_to_the_generator():
    class Deep(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.features, self.head = inner.features, nn.Sequential(inner.head)

        def forward(self, x):
            return self.head(self.features(x))

    one = lesson_of(layout_of(digits_net(), torch.float64), 0)
    deep = layout_of(Deep(digits_net()), torch.float64)
    other = replace(one, layout=deep, pupil=Pupil(one.pupil.form, one.pupil.row.clone()))
    do_together([one])
    do_together([other])
    assert apart(other.pupil.row, one.pupil.row) < 1e-13


def test_a_generator_learns_to_be_recognised():
    """After its lessons the devices' heads take the generated features for the wanted labels, and did not before."""
    layout = layout_of(digits_net(), torch.float32)
    lesson = lesson_of(layout, 0, devices=2, steps=400)
    form, heads = lesson.pupil.form, lessons._Heads(layout, [lesson.rows])

    def recognised():
        rng = torch.Generator().manual_seed(9)
        labels = torch.arange(10).repeat(20)
        inputs = form.inputs(torch.rand(200, 4, generator=rng), labels)
        logits = heads(form.evaluated(lesson.pupil.row, inputs)[None])[0]
        return float((logits.argmax(-1) == labels).float().mean())

    assert recognised() < 0.3
    do_together([lesson])
    assert recognised() > 0.9


def test_two_lessons_are_what_pytorchs_layers_and_adam_make_of_them():
    """Uneven shares, other weights than 1, and an optimiser that goes on from lesson to lesson."""
    layout = layout_of(digits_net(), torch.float64)
    first = lesson_of(layout, 0)
    rng = np.random.default_rng(4)
    shares = torch.from_numpy(rng.dirichlet(np.ones(3), size=10).T.copy())
    shares[:, 7] = 0.0
    how = replace(first.how, teacher=2.0, diversity=0.5)
    form = first.pupil.form
    layers = reference(form).double()
    parts = [*layers[0].parameters(), *layers[1].parameters(), *layers[3].parameters()]
    with torch.no_grad():
        for part, values in zip(parts, form._views(first.pupil.row).values(), strict=True):
            part.copy_(values)
    adam = torch.optim.Adam(parts, lr=0.1, weight_decay=how.weight_decay)
    heads = [functools.partial(functional.linear, weight=w, bias=c) for w, c in map(head_of(layout), first.rows)]
    for round, lr in ((2, 0.03), (3, 0.02)):
        lesson = replace(first, shares=shares, how=how, round=round, lr=lr)
        labels, noise = lesson.drawn()
        assert 7 not in labels
        adam.param_groups[0]["lr"] = lr
        for y, z in zip(labels, noise, strict=True):
            features = layers(form.inputs(z, y))
            told = sum(
                (share[y] * functional.cross_entropy(head(features), y, reduction="none")).mean()
                for head, share in zip(heads, shares, strict=True)
            )
            far = (features[:, None] - features[None]).abs().mean(-1)
            alike = torch.exp(-((z[:, None] - z[None]).square().mean(-1) * far).mean())
            adam.zero_grad()
            (2.0 * told + 0.5 * alike).backward()
            adam.step()
        do_together([lesson])
    assert apart(first.pupil.row, row_of(layers)) < 1e-11


def head_of(layout):
    """Return a function from a row to the weight and the bias of its head."""
    return lambda row: (layout.unpack(row)["head.weight"], layout.unpack(row)["head.bias"])
