"""Metrics over a whole evaluation set, and over clients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis.strategies import integers

import fedcat
from fedcat.core.errors import SettingError
from fedcat.models.losses import cross_entropy
from fedcat.models.metrics import METRICS, ClientScores, Metric, make_metrics, make_monitor

OUTPUTS = torch.tensor([[2.0, 1, 0], [0, 3, 1], [0, 1, 2], [5, 1, 0], [0, 0, 1]])
LABELS = torch.tensor([0, 1, 1, 0, 0])
"""Predicted: 0, 1, 2, 0, 2."""
SHORT = {"dataset": "digits", "clients": 20, "rounds": 4, "epochs": 1, "evaluate_every": 2, "method": "fedavg"}


def score(name, outputs=OUTPUTS, labels=LABELS):
    return METRICS.get(name).value(outputs, labels)


def test_by_hand():
    assert score("accuracy") == 3 / 5
    assert score("balanced-accuracy") == pytest.approx((2 / 3 + 1 / 2) / 2)
    f1 = [2 * 2 / (2 + 3), 2 * 1 / (1 + 2), 0.0]  # 2 hits of 2 predicted and 3 held; 1 of 1 and 2; 0 of 2 and 0
    assert score("macro-f1") == pytest.approx(sum(f1) / 3)
    six = torch.eye(6) + torch.arange(6) / 100
    assert score("top5", six, torch.tensor([0, 1, 2, 3, 4, 0])) == pytest.approx(5 / 6)


@given(seed=integers(0, 10**6), classes=integers(2, 7), samples=integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_f1_and_balanced_accuracy_by_their_definitions(seed, classes, samples):
    """Class by class, with sets instead of a table."""
    rng = np.random.default_rng(seed)
    labels, guess = rng.integers(classes, size=(2, samples))
    outputs, held = torch.eye(classes)[guess], torch.from_numpy(labels)
    f1, recall = [], []
    for c in range(classes):
        true, positive = set(np.flatnonzero(labels == c)), set(np.flatnonzero(guess == c))
        if true or positive:
            f1.append(2 * len(true & positive) / (len(true) + len(positive)))
        if true:
            recall.append(len(true & positive) / len(true))
    assert score("macro-f1", outputs, held) == pytest.approx(np.mean(f1))
    assert score("balanced-accuracy", outputs, held) == pytest.approx(np.mean(recall))


def test_a_metric_sees_the_whole_set_once(monkeypatch):
    monkeypatch.setattr("fedcat.engines.evaluation.BATCH", 7)
    seen = []

    def spread(outputs, targets):
        seen.append((len(outputs), len(targets)))
        return outputs.max() - outputs.min()

    result = fedcat.run(metrics=[spread], monitor="spread", **SHORT)
    assert seen == [(100, 100), (360, 360), (360, 360)]  # a trial, then the whole set
    net, test = result.model(), result.federation.test
    outputs = net(test.inputs(slice(None), torch.float32))
    assert result.history[-1].metrics["spread"] == pytest.approx(float(outputs.max() - outputs.min()), rel=1e-5)
    assert result.best == max(result.values("spread"))


def test_a_comparison_by_another_metric(tmp_path):
    words = {name: value for name, value in SHORT.items() if name != "method"}
    found = fedcat.compare(
        ["fedavg", "fedprox"], 2, metrics=["macro-f1"], monitor="macro-f1", out=tmp_path / "c", **words
    )
    for variant in found:
        values = [result.history[-1].metrics["macro-f1"] for result in variant.results]
        assert variant.mean_std("final")[0] == pytest.approx(np.mean(values))
        assert variant.monitor == "macro-f1"
        assert variant.mean_std("final", metric="accuracy")[0] == pytest.approx(
            np.mean([result.accuracy for result in variant.results])
        )


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([3], "metric must be a function of \\(outputs, targets\\), got 3"),
        (["macrof1"], "unknown metric 'macrof1': did you mean 'macro-f1'"),
        ([lambda o: 0.0], r"metric must be a function of \(outputs, targets\)"),
        ([lambda o, t: None], "metric 'lambda' fails on outputs of shape"),
        ([lambda o, t: 1 / 0], "ZeroDivisionError"),
        ("top5", "metrics must be a list, got 'top5'"),
        ([lambda o, t: o], "metric 'lambda' must return a number or one number for each of the 100 samples"),
        ([Metric(lambda o, t: 0.0, "loss")], "metrics must have different names, got 'loss' twice"),
    ],
)
def test_what_is_no_metric_is_refused(metrics, message):
    with pytest.raises(SettingError, match=message):
        fedcat.run(metrics=metrics, **SHORT)


def test_the_monitor_is_the_first_metric_unless_another_is_named():
    metrics = make_metrics([Metric(lambda o, t: 1.0, "one")], cross_entropy, classes=True)
    assert list(metrics) == ["accuracy", "loss", "one"]
    assert make_monitor("", metrics).name == "accuracy"
    assert make_monitor("one", metrics).name == "one"
    assert make_monitor("", make_metrics([], cross_entropy, classes=False)).name == "loss"


def test_a_metric_that_is_monitored_is_recorded():
    result = fedcat.run(monitor="macro-f1", **SHORT)
    assert list(result.history[-1].metrics) == ["accuracy", "loss", "macro-f1"]
    assert list(fedcat.run(metrics=["loss"], **SHORT).history[-1].metrics) == ["accuracy", "loss"]


def test_the_best_of_a_metric_may_be_its_least():
    low, high = Metric(cross_entropy, "a", lower_is_better=True), Metric(cross_entropy, "b")
    assert (low.best([2.0, 1.0, 3.0]), high.best([2.0, 1.0, 3.0])) == (1.0, 3.0)
    assert low.better(1.0, 2.0)
    assert not high.better(1.0, 2.0)
    assert (Metric(cross_entropy, "a", percent=True).text(0.5), low.text(0.12345)) == ("50.00 %", "0.1235")


def test_per_client_values_of_a_mean_and_of_a_whole():
    owner = np.array([1, -1, 1, 4, 4])
    accuracy = METRICS.get("accuracy").per_client(OUTPUTS, LABELS, owner)
    assert accuracy.tolist() == [0.5, 0.5]  # client 1: samples 0 and 2; client 4: samples 3 and 4

    def largest(outputs, targets):
        return outputs.max()

    assert Metric(largest).per_client(OUTPUTS, LABELS, owner).tolist() == [2.0, 5.0]


def test_how_a_metric_spreads_over_clients():
    values = np.array([0.1, 0.5, 0.9, 0.7, 0.3, 0.2, 0.8, 0.6, 0.4, 1.0, 0.0])
    scores = ClientScores(np.arange(11), np.arange(1, 12), {"a": values})
    found = scores.spread(Metric(cross_entropy, "a"))
    assert found["mean"] == pytest.approx(0.5)
    assert found["weighted_mean"] == pytest.approx((values * np.arange(1, 12)).sum() / 66)
    assert found["worst_decile"] == pytest.approx((0.0 + 0.1) / 2)  # two of eleven clients
    assert found["std"] == pytest.approx(np.std(values))
    assert scores.spread(Metric(cross_entropy, "a", lower_is_better=True))["worst_decile"] == pytest.approx(0.95)
    assert scores.rows()[2] == {"client": 2, "samples": 3, "a": 0.9}
