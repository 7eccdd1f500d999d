"""Losses per sample: by hand, in both engines, and what is refused."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

import fedcat
from fedcat.core.errors import SettingError
from fedcat.models.losses import LOSSES, check_loss_shape, cross_entropy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(240, 6)).astype(np.float32)
LINE = (X @ RNG.normal(size=6)).astype(np.float32)
SHORT = {"net": "mlp", "clients": 8, "rounds": 6, "epochs": 1, "lr": 0.05, "method": "fedavg"}


def line(**words):
    return fedcat.Dataset.from_arrays(X, LINE, name="line", **words)


def test_by_hand():
    outputs = torch.tensor([[1.0, -1.0], [0.0, 2.0]])
    log = math.log
    assert LOSSES.get("cross-entropy")(outputs, torch.tensor([0, 0])).tolist() == pytest.approx(
        [log(1 + math.exp(-2)), log(1 + math.exp(2))]
    )
    smooth = LOSSES.get("label-smoothing")(outputs, torch.tensor([0, 0])).tolist()
    assert smooth[0] == pytest.approx(0.95 * log(1 + math.exp(-2)) + 0.05 * log(1 + math.exp(2)))
    assert LOSSES.get("mse")(outputs, torch.tensor([[0.0, 1.0], [0.0, 0.0]])).tolist() == [2.5, 2.0]
    assert LOSSES.get("huber")(outputs, torch.tensor([[0.5, -4.0], [0.0, 2.0]])).tolist() == [(0.125 + 2.5) / 2, 0.0]
    both = LOSSES.get("bce")(outputs, torch.tensor([[1, 0], [0, 1]]))
    assert both.tolist() == pytest.approx([log(1 + math.exp(-1)), (log(2) + log(1 + math.exp(-2))) / 2])


@pytest.mark.parametrize("shape", [(3, 1), (3,)])
def test_one_output_fits_one_value(shape):
    outputs, targets = torch.tensor([1.0, 2.0, 3.0]).view(shape), torch.tensor([0.0, 0.0, 1.0])
    assert LOSSES.get("mse")(outputs, targets).tolist() == [1.0, 4.0, 4.0]


def test_the_cross_entropy_of_a_sequence_is_the_mean_over_its_places():
    outputs, targets = torch.randn(4, 5, 7), torch.randint(7, (4, 5))
    by_hand = [functional.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)]
    assert torch.allclose(cross_entropy(outputs, targets), torch.stack(by_hand))


def absolute(outputs, targets):
    return (outputs[:, 0] - targets).abs()


@pytest.mark.parametrize("loss", ["mse", "huber", absolute])
def test_a_regression_trains_the_same_in_both_engines_and_best_is_its_least_loss(loss):
    rows, results = [], []
    for engine in ("sequential", "stacked"):
        result = fedcat.run(dataset=line(), loss=loss, engine=engine, evaluate_every=1, dtype="float64", **SHORT)
        rows.append(torch.cat([p.flatten() for p in result.model().parameters()]))
        results.append(result)
    assert torch.allclose(*rows, rtol=1e-10, atol=1e-12)
    result = results[0]
    losses = result.values("loss")
    assert result.summary.monitor == "loss"
    assert result.best == min(losses) < losses[0]
    assert "accuracy" not in result.history[-1].metrics
    outputs = result.model()(result.federation.test.x.double())
    targets = result.federation.test.y.double()
    function = LOSSES.get(loss) if isinstance(loss, str) else loss
    assert losses[-1] == pytest.approx(float(function(outputs, targets).mean()))


def test_several_labels_per_sample():
    labels = (X[:, :3] > 0).astype(np.int64)
    data = fedcat.Dataset.from_arrays(X, labels, name="labels")

    def hits(outputs, targets):
        return ((outputs > 0) == (targets > 0)).double().mean(1)

    result = fedcat.run(dataset=data, loss="bce", metrics=[hits], **{**SHORT, "rounds": 12, "lr": 0.5})
    assert result.federation.outputs == 3
    assert result.history[-1].metrics["hits"] > 0.8


def test_label_smoothing_with_classes_keeps_accuracy():
    words = {"dataset": "digits", "rounds": 2, "epochs": 1, "method": "fedavg", "device": "cpu"}
    plain, smooth = (fedcat.run(loss=loss, **words) for loss in ("cross-entropy", "label-smoothing"))
    default = fedcat.run(**words)
    assert default.history[-1].metrics == plain.history[-1].metrics != smooth.history[-1].metrics
    assert smooth.accuracy is not None
    assert smooth.summary.kernels.startswith("torch.vmap")
    assert plain.summary.kernels.startswith("hand-written gradients")


def test_fedgen_and_own_rules_use_the_loss_that_the_user_chose():
    words = {"dataset": "digits", "rounds": 1, "epochs": 1}
    with_loss = [fedcat.run(method="fedgen", loss=loss, **words) for loss in ("cross-entropy", "label-smoothing")]
    fedavg = fedcat.run(method="fedavg", loss="label-smoothing", **words)
    assert with_loss[0].history[0].train_loss != with_loss[1].history[0].train_loss
    assert with_loss[1].history[0].train_loss == pytest.approx(fedavg.history[0].train_loss, rel=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "loss must be given: the targets of 'line' are values"),
        ({"loss": lambda o, t: (o - t) ** 2}, r"must return one loss per sample, shape \(2,\).* got shape \(2, 2\)"),
        ({"loss": lambda o, t: (o[:, 0] - t).mean()}, r"must return one loss per sample.* got shape \(\)"),
        ({"loss": "cross-entropy"}, "loss 'cross_entropy' does not take outputs of shape"),
        ({"loss": 3}, "loss must be a string, got 3|loss must be a name or a function"),
        ({"loss": "mse", "method": "fedgen"}, "fedgen needs class labels"),
        ({"loss": "mse", "partition": "shards"}, "partition 'shards' divides by class"),
        ({"loss": "mse", "metrics": ["top5"]}, "metric 'top5' needs class labels"),
        ({"loss": "mse", "monitor": "accuracy"}, "monitor must be one of the metrics loss, got 'accuracy'"),
        ({"loss": lambda o, t: torch.zeros(len(o))}, "has no gradient"),
        ({"loss": "msee"}, "unknown loss 'msee': did you mean 'mse'"),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    with pytest.raises(SettingError, match=message):
        fedcat.run(**{"dataset": line(), **SHORT, **given})


def test_a_loss_that_mixes_samples_is_refused_in_a_stack():
    def centered(outputs, targets):
        return (outputs[:, 0] - targets - (outputs[:, 0] - targets).mean()) ** 2

    with pytest.raises(SettingError, match="loss 'centered' changes if its batch is padded"):
        fedcat.run(dataset=line(), loss=centered, engine="stacked", **SHORT)
    assert fedcat.run(dataset=line(), loss=centered, engine="sequential", **SHORT).status == "finished"


def test_a_branch_on_targets_is_refused_in_a_stack_with_the_cure():
    def branching(outputs, targets):
        return (outputs[:, 0] - targets) ** 2 if targets.sum() > 0 else (outputs[:, 0] - targets).abs()

    with pytest.raises(SettingError, match=r"cannot run for several clients at once.*engine=.sequential"):
        fedcat.run(dataset=line(), loss=branching, engine="stacked", **SHORT)
    assert fedcat.run(dataset=line(), loss=branching, engine="sequential", **SHORT).status == "finished"


def test_a_result_without_classes_has_a_loss_and_no_accuracy():
    result = fedcat.run(dataset=line(), loss="mse", **SHORT)
    assert (result.accuracy, result.loss) == (None, result.history[-1].loss)
    assert result.metrics == result.history[-1].metrics


def test_targets_are_labels_or_values_by_their_type():
    data = fedcat.Dataset.from_arrays(X, LINE.round(), name="whole numbers")
    assert (data.classes, data.defaults["partition"]) == (0, "iid")
    assert "one value per sample" in str(data)
    assert fedcat.Dataset.from_arrays(X, (LINE > 0).astype(int)).classes == 2
    assert "values of shape (6,)" in str(fedcat.Dataset.from_arrays(X, X))
    with pytest.raises(SettingError, match="classes must be left out if the targets are values, got 3"):
        fedcat.Dataset.from_arrays(X, LINE, classes=3)
    with pytest.raises(SettingError, match="test targets must be one value per sample, as in training, got class"):
        data.divide(4, "iid").__class__(data.train, fedcat.Pool(X, np.zeros(240, int)), np.arange(192) % 4)
    with pytest.raises(SettingError, match="class_counts needs class labels"):
        print(data.divide(4, "iid").class_counts)


def test_a_loss_is_checked_on_a_few_outputs():
    check_loss_shape(cross_entropy, torch.zeros(3, 2), torch.zeros(3).long())
    with pytest.raises(SettingError, match="got list"):
        check_loss_shape(lambda o, t: [1, 2, 3], torch.zeros(3, 2), torch.zeros(3))
