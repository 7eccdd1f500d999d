"""Metrics of rows, evaluated one by one and stacked."""

import pytest
import torch
from helpers import federation, layout_of, small_net
from torch import nn

from fedcat.data.federation import EvaluationSet
from fedcat.engines.evaluation import Evaluation, outputs_of, outputs_stacked
from fedcat.engines.evaluation import evaluate as evaluate_jobs
from fedcat.models.losses import cross_entropy
from fedcat.models.metrics import make_metrics

FED = federation([40, 7])
TEST = FED.train


METRICS = make_metrics([], cross_entropy, classes=True)


def of_pool(pool, index=None):
    return EvaluationSet(pool, None if index is None else index.numpy())


def one_by_one(layout, rows, on):
    return [outputs_of(layout, row, on) for row in rows]


@pytest.fixture(params=["stacked", "one by one"])
def evaluate(request, monkeypatch):
    """Return each way of evaluating, with so small parts that there are several, the last of them shorter."""
    monkeypatch.setattr("fedcat.engines.evaluation.ROWS", 2)
    monkeypatch.setattr("fedcat.engines.evaluation.SAMPLES", 20)
    monkeypatch.setattr("fedcat.engines.evaluation.BATCH", 9)
    outputs = outputs_stacked if request.param == "stacked" else one_by_one

    def scores(layout, rows, pool, index=None):
        on = of_pool(pool, index)
        found = []
        for row in outputs(layout, rows, on):
            values = {name: metric.value(row, on.targets(layout.dtype)) for name, metric in METRICS.items()}
            found.append((values["accuracy"], values["loss"]))
        return found

    return scores


def by_hand(net, pool, index=None):
    """Return accuracy and mean loss from one pass over everything."""
    index = slice(None) if index is None else index
    with torch.no_grad():
        logits, y = net(pool.inputs(index, torch.float64)), pool.y[index]
    right = [int(row.argmax()) == int(label) for row, label in zip(logits, y, strict=True)]
    return sum(right) / len(right), float(nn.functional.cross_entropy(logits, y))


def noisy_net():
    """A net that computes something else in training: dropout and batch normalization."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 10))
    net[2].running_mean.uniform_(-1, 1)
    net[2].running_var.uniform_(0.5, 2)
    return net


def test_a_net_is_evaluated_in_evaluation_mode_whatever_mode_it_is_in(evaluate):
    layout = layout_of(noisy_net())
    row, before = layout.pack(layout.net), layout.pack(layout.net)
    layout.net.train()
    torch.manual_seed(0)
    trained = by_hand(layout.net, TEST)
    layout.write(before, layout.net)
    layout.net.train()
    (first,) = evaluate(layout, [row], TEST)
    layout.net.train()
    (second,) = evaluate(layout, [row], TEST)
    assert first == second
    assert first == pytest.approx(by_hand(layout.net.eval(), TEST), abs=1e-12)
    assert abs(first[1] - trained[1]) > 1e-3
    assert torch.equal(row, before)
    assert torch.equal(layout.pack(layout.net), before)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_row_has_its_own_accuracy_and_loss_in_their_order(evaluate, count):
    nets = [small_net(seed).double() for seed in range(count)]
    layout = layout_of(small_net(99))
    found = evaluate(layout, [layout.pack(net) for net in nets], TEST)
    assert len(found) == count
    for score, net in zip(found, nets, strict=True):
        assert score == pytest.approx(by_hand(net, TEST), abs=1e-12)


def test_samples_may_be_chosen_and_count_as_often_as_they_are_named(evaluate):
    net = small_net().double()
    layout, index = layout_of(small_net(99)), torch.tensor([30, 2, 2, 46, 7])
    rows = [layout.pack(net), layout.pack(layout.net), layout.pack(net)]
    found = evaluate(layout, rows, TEST, index)
    assert found[0] == found[2] == pytest.approx(by_hand(net, TEST, index), abs=1e-12)
    assert found[1] == pytest.approx(by_hand(layout.net, TEST, index), abs=1e-12)


def test_parts_of_a_hundred_samples_are_the_smallest(monkeypatch):
    """With few samples per pass, 250 samples are evaluated in parts of 100, 100 and 50."""
    seen = []

    class Noted(nn.Linear):
        def forward(self, x):
            seen.append(len(x))
            return super().forward(x)

    monkeypatch.setattr("fedcat.engines.evaluation.SAMPLES", 20)
    fed = federation([250])
    layout = layout_of(nn.Sequential(nn.Flatten(), Noted(64, 10)))
    (found,) = outputs_stacked(layout, [layout.pack(layout.net)], of_pool(fed.train))
    assert seen == [100, 100, 50]
    assert torch.allclose(found, layout.net(fed.train.x), atol=1e-12)


def test_evaluation_leaves_no_gradients(evaluate):
    layout = layout_of(small_net())
    evaluate(layout, [layout.pack(layout.net).requires_grad_()], TEST)
    assert all(p.grad is None for p in layout.net.parameters())


@pytest.mark.parametrize("together", [False, True])
def test_a_perfect_and_a_hopeless_model(together):
    """One class only: a bias decides everything."""
    layout = layout_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    row = torch.zeros(layout.size, dtype=torch.float64)
    right, wrong = row.clone(), row.clone()
    most = int(TEST.y.bincount().argmax())
    only = (TEST.y == most).nonzero()[:, 0]
    right[640 + most], wrong[640 + (most + 1) % 10] = 50.0, 50.0
    on, metrics = of_pool(TEST, only), list(METRICS.values())
    found = evaluate_jobs([Evaluation(layout, row, on, metrics, together=together) for row in (right, wrong)])
    assert [score["accuracy"] for score in found] == [1.0, 0.0]
    assert [score["loss"] for score in found] == pytest.approx([0.0, 50.0])
