"""`fedcat plot`, and what commands show of metrics, held-out data and the parts of local training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fedcat
from fedcat.cli.plot import _curve, _models, _runs, _values
from fedcat.core.errors import SettingError
from fedcat.runs.run_files import read_history

SHORT = ["--clients", "20", "--rounds", "4", "--epochs", "1", "--evaluate-every", "2"]


def inked(path):
    with Image.open(path) as image:
        return float((np.asarray(image.convert("L")) < 250).mean())


def test_a_comparison_is_plotted_as_means_over_seeds(fedcat_command):
    code, _, _ = fedcat_command(
        *("compare", "--methods", "fedavg,fedprox", "--seeds", "2", "--metrics", "macro-f1"),
        *("--monitor", "macro-f1", "--out", "c", *SHORT),
    )
    assert code == 0
    code, out, _ = fedcat_command("plot", "c")
    assert (code, out) == (0, "plot: c/macro-f1.png\n")
    assert 0.01 < inked("c/macro-f1.png") < 0.5
    runs = _runs(Path("c"))
    assert list(runs) == ["fedavg", "fedprox"]
    histories = [read_history(folder) for folder in runs["fedavg"]]
    curve = _curve("fedavg", [_values(h, "macro-f1") for h in histories], histories[0], "bytes", 100)
    assert curve.x == [(r.up + r.down) / 1e6 for r in histories[0] if r.evaluated]
    assert curve.values[1] == [100 * r.metrics["macro-f1"] for r in histories[1] if r.evaluated]
    for against in ("bytes", "seconds"):
        assert fedcat_command("plot", "c", "--against", against, "--metric", "loss", "--out", "a.pdf")[0] == 0


def test_a_run_is_plotted_with_its_other_models_and_validation_data(fedcat_command):
    fedcat_command("run", "--method", "fedavg", "--average", "0.5", "--validation", "0.2", "--out", "r", *SHORT)
    assert fedcat_command("plot", "r")[0] == 0
    history = read_history(Path("r"))
    labels = [curve.label for curve in _models(history, "accuracy", "rounds", 1)]
    assert labels == ["global model", "average", "clients' validation data"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plot", "nowhere"], "holds neither a finished run nor a comparison"),
        (["plot", "r", "--metric", "los"], "unknown metric 'los': did you mean 'loss'"),
        (["plot", "r", "--against", "time"], "unknown against 'time'"),
        (["plot", "r", "--out", "a.gif"], "must end in .png, .svg, .pdf"),
    ],
)
def test_what_cannot_be_plotted(fedcat_command, words, message):
    fedcat_command("run", "--method", "fedavg", "--out", "r", *SHORT)
    code, _, err = fedcat_command(*words)
    assert code == 2
    assert message in err


def test_a_comparison_that_is_not_finished(tmp_path):
    (tmp_path / "comparison.json").write_text('[{"label": "a", "runs": [{"seed": 0, "folder": "a"}]}]')
    with pytest.raises(SettingError, match="is not finished"):
        _runs(tmp_path)


def test_the_spread_over_clients_and_the_choice_are_shown(fedcat_command):
    held = ("--client-test", "0.2", "--validation", "0.1")
    _, out, _ = fedcat_command("run", "--method", "fedavg", *held, "--metrics", "top5", *SHORT)
    lines = {line.split()[0]: line for line in out.splitlines() if line}
    assert "worst tenth" in lines["clients"]
    assert "best on validation data" in lines["chosen"]
    assert "%" in lines["top5"]
    assert "evaluation on clients" in lines["traffic"]
    _, out, _ = fedcat_command("compare", "--seeds", "2", "--out", "c", *held, *SHORT)
    assert "accuracy on the clients' own test data in %, mean over seeds" in out
    assert "chosen: at the evaluation with the best score on validation data" in out
    (line, _) = json.loads(Path("c/comparison.json").read_text())
    assert set(line["client_test"]) == {"mean", "weighted_mean", "worst_decile", "std"}
    assert set(line["chosen"]) == {"mean", "std"}


def test_parts_of_local_training_are_flags(fedcat_command):
    words = ["--optimizer", "adam", "--optimizer-beta1", "0.8", "--augment", "flip,crop", "--loss", "label-smoothing"]
    code, out, _ = fedcat_command("run", "--method", "fedavg", "--lr", "0.003", *words, "--out", "r", *SHORT)
    assert code == 0
    again = fedcat.run(settings="r/settings.toml")
    assert again.settings.optimizer_options == {"beta1": 0.8, "beta2": 0.999, "eps": 1e-8}
    assert (again.settings.augment, again.settings.loss) == (["flip", "crop"], "label-smoothing")
    assert again.history[-1].metrics == read_history(Path("r"))[-1].metrics
    assert "optimizer adam, beta1 0.8" in out
    assert "augment flip, crop" in out
    assert "loss label-smoothing" in out


def test_own_parts_on_the_command_line(fedcat_command):
    Path("mine.py").write_text(
        "import torch\n"
        "def middle(rows, weights, start, *, lean: float = 0.5):\n"
        "    return torch.lerp(start, rows.median(dim=0).values, lean)\n"
        "def absolute(outputs, targets):\n"
        "    return outputs.softmax(-1).sub(torch.nn.functional.one_hot(targets, 10)).abs().sum(-1)\n"
    )
    words = ["--aggregator", "mine:middle", "--aggregator-option", "lean=0.9", "--loss", "mine:absolute"]
    code, _, err = fedcat_command("run", "--method", "fedavg", *words, "--out", "r", *SHORT)
    assert (code, err) == (0, "")
    assert read_history(Path("r"))[-1].loss < 2
    code, _, err = fedcat_command("run", "r/settings.toml")
    assert code == 2
    assert "would import the module 'mine' and run its code" in err
    assert fedcat_command("run", "r/settings.toml", "--trust")[0] == 0


def test_naming_a_files_part_again_keeps_its_options(fedcat_command):
    Path("base.toml").write_text('optimizer = "adam"\nlr = 0.003\n[optimizer_options]\nbeta1 = 0.5\n')
    assert fedcat_command("run", "base.toml", "--optimizer", "adam", "--out", "a", *SHORT)[0] == 0
    assert "beta1 = 0.5" in Path("a/settings.toml").read_text()
    _, _, err = fedcat_command("run", "base.toml", "--optimizer", "sgd", "--out", "b", *SHORT)
    assert "ignored from base.toml" in err
    assert "optimizer_beta1" in err


def test_a_comparison_shows_its_other_metrics_and_what_the_means_are_over(fedcat_command):
    _, out, _ = fedcat_command("compare", "--seeds", "1", "--metrics", "macro-f1", *SHORT)
    assert "last five: mean of the 2 evaluations" in out
    assert "macro-f1, %" in out
    _, out, _ = fedcat_command("run", "--method", "fedavg", *SHORT)
    assert "mean of the 2 evaluations" in out


def test_data_with_values_and_files_with_own_parts_are_shown(fedcat_command):
    rng = np.random.default_rng(0)
    np.savez("a.npz", x=rng.normal(size=(40, 3)), y=rng.normal(size=40))
    code, out, _ = fedcat_command("data", "show", "npz", "-d", "path=a.npz", "--clients", "4", "--min-samples", "1")
    assert code == 0
    assert "one value per sample; samples per client: 8 to 8, median 8" in out
    Path("own.toml").write_text('dataset = "digits"\nloss = "mine:loss"\naggregator = "mine:a"\n')
    assert fedcat_command("data", "show", "own.toml", "--no-plot")[0] == 0


def test_lists(fedcat_command):
    _, out, _ = fedcat_command("training")
    assert all(name in out for name in ("cross-entropy", "mse", "adamw", "beta2=0.999", "crop", "flip"))
    _, out, _ = fedcat_command("metrics")
    assert all(name in out for name in ("accuracy", "balanced-accuracy", "macro-f1", "top5"))
    _, out, _ = fedcat_command("methods")
    assert "aggregator" in out
