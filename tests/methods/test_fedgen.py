from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import DEVICES, apart, federation, layout_of, simulate, small_net
from torch import nn
from torch.nn import functional

from fedcat.chance import Purpose, chance
from fedcat.errors import SettingError
from fedcat.hop import Reply, Status
from fedcat.local import Batch, Beside
from fedcat.methods import FedAvg, lessons
from fedcat.methods.fedgen import FedGen, Guided
from fedcat.methods.generator import GeneratorForm, RowAdam, generator_loss, noise_distances
from fedcat.methods.lessons import Lesson, Pupil, Training
from fedcat.methods.method import do_together
from fedcat.models.nets import NETS
from fedcat.simulation import run_together

FED = federation([3, 9, 5, 12, 7, 4, 8, 6])
SMALL = {"hidden": 12, "noise": 5, "generator_batch": 6, "generator_steps": 8, "generator_lr": 0.01}
FORM = GeneratorForm(noise=3, classes=4, hidden=5, latent=6)


def net(seed=0):
    torch.manual_seed(seed)
    return NETS.get("digits-cnn")((1, 8, 8), 10)


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
    adam = RowAdam(zero, zero, torch.zeros(2, 1).double(), torch.tensor([[0.1], [0.02]]).double(), 1e-2)
    for slope in slopes:
        p = adam.step(p, slope)
    for row, lr in enumerate((0.1, 0.02)):
        leaf = start[row].clone().requires_grad_()
        theirs = torch.optim.Adam([leaf], lr=lr, weight_decay=1e-2)
        for slope in slopes:
            leaf.grad = slope[row].clone()
            theirs.step()
        assert torch.allclose(p[row], leaf.detach(), atol=1e-14)


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_its_two_terms_it_is_fedavg_bit_for_bit(engine, dtype):
    layout = layout_of(net(), dtype)
    words = {"rounds": 4, "momentum": 0.5, "exact": True}
    gen = simulate(FedGen, FED, layout, engine, options={**SMALL, "a": 0.0, "b": 0.0}, **words)
    plain = simulate(FedAvg, FED, layout, engine, **words)
    gen.run()
    plain.run()
    assert torch.equal(gen.method.row, plain.method.row)
    assert gen.method.generator.steps == 4 * 8


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_the_first_round_is_fedavgs_and_the_second_is_not(engine):
    layout = layout_of(net(), torch.float32)
    gen = simulate(FedGen, FED, layout, engine, options=SMALL, exact=True, rounds=3)
    plain = simulate(FedAvg, FED, layout, engine, exact=True, rounds=3)
    for same in (True, False):
        gen.step()
        plain.step()
        assert torch.equal(gen.method.row, plain.method.row) == same


def test_a_devices_loss_by_hand():
    """CE + a * CE(head(G(y')), y') * generated / batch size + b * KL(p(head(G(y))) || p(x))."""
    layout = layout_of(net(), torch.float64)
    row = layout.pack(layout.net)
    bound = layout.bind(layout.parameter_views(row), {})
    form = GeneratorForm(noise=3, classes=10, hidden=5, latent=layout.net.head.in_features)
    rule = Guided(form, a=2.0, b=3.0, decay=0.5, generated=6, local_steps=2)
    sim = simulate(FedGen, FED, layout, batch_size=4)
    task = sim.task
    (_, hop), *_ = sim.plan()
    hop = replace(hop, sent={"generator": form.initial().double()}, round=3)
    rng = chance(0, Purpose.RULE, 3, hop.device, 0)
    numbers = rule.draw(rng, task, hop, 4)
    assert torch.allclose(numbers["a"], torch.tensor([1.0, 1.0, 0.0, 0.0]).double() * 2.0 * 0.5**3 * 6 / 4)
    assert torch.allclose(numbers["b"], torch.tensor([1.0, 1.0, 0.0, 0.0]).double() * 3.0 * 0.5**3)
    x, y = FED.train.inputs(slice(0, 3), torch.float64), FED.train.y[:3]
    step = {name: values[0] for name, values in numbers.items()}
    made = bound.head(form.evaluated(hop.sent["generator"], form.inputs(step["noise"], step["labels"])))
    guide = bound.head(form.evaluated(hop.sent["generator"], form.inputs(step["own_noise"][:3], y)))
    wanted = (
        functional.cross_entropy(bound.logits(x), y)
        + 2.0 * 0.125 * 6 / 4 * functional.cross_entropy(made, step["labels"])
        + 3.0 * 0.125 * functional.kl_div(bound.logits(x).log_softmax(1), guide.softmax(1), reduction="batchmean")
    )
    beside = Beside(row, hop.sent, {}, step)
    assert torch.allclose(rule.loss(bound, Batch(x, y), beside), wanted, atol=1e-13)
    padded = Batch(torch.cat([x, x[:1]]), torch.cat([y, y[:1]]), torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
    assert torch.allclose(rule.loss(bound, padded, beside), wanted, atol=1e-13)


def test_no_gradient_flows_through_the_generators_prediction():
    """The target of the second term is detached: with a = 0 the head's gradient is that of a fixed target."""
    layout = layout_of(net(), torch.float64)
    leaf = layout.pack(layout.net).requires_grad_()
    bound = layout.bind(layout.parameter_views(leaf), {})
    form = GeneratorForm(noise=3, classes=10, hidden=5, latent=layout.net.head.in_features)
    x, y = FED.train.inputs(slice(0, 3), torch.float64), FED.train.y[:3]
    generator, noise = form.initial().double(), torch.rand(3, 3).double()
    numbers = {"noise": noise, "labels": y, "own_noise": noise, "a": torch.tensor(0.0), "b": torch.tensor(1.0)}
    loss = Guided(form, 0.0, 1.0, 1.0, 3, 0).loss(
        bound, Batch(x, y), Beside(leaf, {"generator": generator}, {}, numbers)
    )
    (found,) = torch.autograd.grad(loss, leaf)
    target = bound.head(form.evaluated(generator, form.inputs(noise, y))).softmax(1).detach()
    logits = bound.logits(x)
    fixed = functional.cross_entropy(logits, y) + functional.kl_div(
        logits.log_softmax(1), target, reduction="batchmean"
    )
    (wanted,) = torch.autograd.grad(fixed, leaf)
    assert torch.allclose(found, wanted, atol=1e-13)


def test_the_generators_traffic_is_in_the_ledger_and_label_counts_go_up_once():
    layout = layout_of(net(), torch.float32)
    sim = simulate(FedGen, FED, layout, "stacked", options=SMALL, rounds=12, k=4)
    sim.run()
    model, generator = layout.size * 4, sim.method.form.size * 4
    seen: set[int] = set()
    for round in range(12):
        entries = [entry for entry in sim.ledger if entry.round == round]
        fresh = {entry.device for entry in entries} - seen
        seen |= fresh
        assert sum(entry.down for entry in entries) == 4 * (model + (generator if round else 0))
        assert sum(entry.up for entry in entries) == 4 * model + len(fresh) * 10 * 8
        if round and not fresh:
            ratio = sum(entry.down + entry.up for entry in entries) / (4 * 2 * model)
            assert ratio == pytest.approx(1 + generator / (2 * model), rel=1e-12)
    assert seen == set(range(8))
    for device, counts in sim.method.labels.items():
        assert counts.tolist() == FED.class_counts[device].tolist()


def test_shares_are_of_the_devices_that_came_back_and_labels_that_none_holds_are_not_drawn():
    layout = layout_of(net(), torch.float64)
    sim = simulate(FedGen, FED, layout, "stacked", options=SMALL, k=3)
    jobs = sim.plan()
    replies = sim.engine.train(jobs)
    sim.absorb([Reply.lost(jobs[0][1], Status.FAILED, "gone"), *replies[1:]])
    lesson = sim.method.work()
    counts = FED.class_counts[[hop.device for _, hop in jobs[1:]]]
    held = counts.sum(0) > 0
    assert not held.all()
    assert np.allclose(lesson.shares[:, held], counts[:, held] / counts.sum(0)[held])
    assert torch.equal(lesson.rows, torch.stack([reply.end for reply in replies[1:]]))
    labels, noise = lesson.drawn()
    assert set(labels.unique().tolist()) <= set(np.flatnonzero(held))
    assert 0 <= float(noise.min()) < float(noise.max()) < 1
    assert sim.method.work() is None


def lesson_of(layout, seed, exact=False, devices=3, steps=5):
    torch.manual_seed(seed)
    form = GeneratorForm(noise=4, classes=10, hidden=7, latent=layout.net.head.in_features)
    rows = torch.stack([layout.pack(net(s)) for s in range(devices)])
    shares = torch.full((devices, 10), 1 / devices).to(rows)
    how = Training(batch=6, steps=steps, weight_decay=1e-2, teacher=1.0, diversity=1.0)
    return Lesson(Pupil(form, form.initial().to(rows)), how, 0.01 * (seed + 1), layout, rows, shares, seed, 2, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_generators_learn_together_what_they_learn_alone(device):
    layout = layout_of(net(), torch.float64, device)
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
    layout = layout_of(net(), torch.float32, device)
    alone = lesson_of(layout, 0, exact=True)
    do_together([alone])
    for company in (1, 4, 9):
        beside = [lesson_of(layout, seed, exact=True) for seed in range(company + 1)]
        do_together(beside)
        assert torch.equal(beside[0].pupil.row, alone.pupil.row)


def test_lessons_of_several_simulations_are_given_at_once(monkeypatch):
    layout = layout_of(net(), torch.float32)
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

    one = lesson_of(layout_of(net(), torch.float64), 0)
    deep = layout_of(Deep(net()), torch.float64)
    other = replace(one, layout=deep, pupil=Pupil(one.pupil.form, one.pupil.row.clone()))
    do_together([one])
    do_together([other])
    assert apart(other.pupil.row, one.pupil.row) < 1e-13


def test_a_generator_learns_to_be_recognised():
    """After its lessons the devices' heads take the generated features for the wanted labels, and did not before."""
    layout = layout_of(net(), torch.float32)
    lesson = lesson_of(layout, 0, devices=2, steps=400)
    form, heads = lesson.pupil.form, lessons._Heads(layout, lesson.rows[None])

    def recognised():
        rng = torch.Generator().manual_seed(9)
        labels = torch.arange(10).repeat(20)
        inputs = form.inputs(torch.rand(200, 4, generator=rng), labels)
        logits = heads(form.evaluated(lesson.pupil.row, inputs)[None])[0]
        return float((logits.argmax(-1) == labels).float().mean())

    assert recognised() < 0.3
    do_together([lesson])
    assert recognised() > 0.9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"a": -1.0}, "a must be at least 0 and finite, got -1"),
        ({"generator_batch": 1}, "generator_batch must be at least 2"),
        ({"decay": 1.5}, "decay must be at least 0 and at most 1, got 1.5"),
        ({"hidden": 0}, "hidden must be at least 1"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(SettingError, match=message):
        simulate(FedGen, FED, layout_of(net()), options=options)


def test_a_net_without_parts_is_told_what_is_missing():
    with pytest.raises(SettingError, match="has no part 'features'"):
        simulate(FedGen, FED, layout_of(small_net()))
