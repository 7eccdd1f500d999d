"""Whole commands, as a user types them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import torch

import fedcat
from fedcat.cli import app as cli

SHORT = ["--clients", "20", "--rounds", "3", "--epochs", "1", "--evaluate-every", "1"]
SOURCE = Path(__file__).parents[2] / "src"


def test_version(fedcat_command):
    assert fedcat_command("--version") == (0, f"fedcat {fedcat.__version__}\n", "")


def test_it_runs_from_the_source_tree_uninstalled(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-m", "fedcat", "--version"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"fedcat {fedcat.__version__}\n")


def test_run_shows_progress_and_writes_a_folder(fedcat_command, tmp_path):
    code, out, err = fedcat_command("run", "--method", "fedcat", "--alpha", "0.5", *SHORT)
    assert code == 0
    assert "engine stacked on cpu" in out or "engine stacked on cuda" in out
    lines = [line for line in out.splitlines() if line.startswith("round ")]
    assert [line.split()[1] for line in lines] == ["1/3", "2/3", "3/3"]
    assert all("rounds/s" in line and "left" in line and "fedcat" in line for line in lines)
    assert "directory runs/fedcat-digits-1" in out
    assert "note: FedCat aggregates every K = 2 rounds, and rounds = 3 is not a multiple of 2" in err
    assert (tmp_path / "runs" / "fedcat-digits-1" / "model.safetensors").exists()
    assert "runs/fedcat-digits-2" in fedcat_command("run", *SHORT)[1]


def test_a_settings_file_runs_again_and_options_override_it(fedcat_command, tmp_path):
    fedcat_command("run", "-o", "epsilon=0.25", "-o", "lambda=2", "--seed", "3", "--out", "a", *SHORT)
    code, _, _ = fedcat_command("run", "a/settings.toml", "--out", "b")
    assert code == 0
    assert Path("a/settings.toml").read_text() == Path("b/settings.toml").read_text()
    assert "epsilon = 0.25" in Path("a/settings.toml").read_text()
    summaries = [json.loads(Path(f, "run.json").read_text()) for f in "ab"]
    assert summaries[0]["metrics"] == summaries[1]["metrics"]
    fedcat_command("run", "a/settings.toml", "--rounds", "1", "--no-exact", "--evaluate", "mean", "--out", "c")
    assert json.loads(Path("c/run.json").read_text())["rounds"] == 1
    assert "mean" in json.loads(Path("c/history.jsonl").read_text())["others"]


def test_compare_prints_a_table(fedcat_command):
    code, out, _ = fedcat_command(
        "compare", "--methods", "fedavg,fedcat", "--seeds", "2", "--sweep", "alpha=0.3,1", "--sweep", "epsilon=0,1",
        "--out", "c", *SHORT,
    )  # fmt: skip
    assert code == 0
    for label in ("fedavg alpha=0.3", "fedavg alpha=1", "fedcat alpha=0.3 epsilon=0", "fedcat alpha=1 epsilon=1"):
        assert any(label in line and "±" in line and "MB" in line for line in out.splitlines()), label
    assert "12 runs side by side" in out
    assert len(json.loads(Path("c/comparison.json").read_text())) == 6


def test_compare_takes_the_seed_of_a_file_and_shows_runs_of_different_length(fedcat_command):
    Path("base.toml").write_text("seed = 7\nclients = 20\nepochs = 1\nevaluate_every = 1\n")
    code, out, _ = fedcat_command("compare", "base.toml", "--seeds", "1", "--sweep", "rounds=4,2", "--out", "c")
    assert code == 0
    assert [line.split()[1] for line in out.splitlines() if line.startswith("round ")] == ["1/4", "2/4", "3/4", "4/4"]
    assert Path("c/fedavg-rounds=4-seed7").is_dir()


def test_a_fraction_that_is_given_beats_a_files_k(fedcat_command):
    Path("base.toml").write_text("clients = 20\nper_round = 3\nepochs = 1\nrounds = 1\n")
    fedcat_command("run", "base.toml", "--fraction", "0.5", "--evaluate", "mean,copies", "--out", "a")
    line = json.loads(Path("a/history.jsonl").read_text())
    assert len(line["hops"]) == 10
    assert len(line["others"]) == 11


def test_a_swept_fraction_beats_a_files_k(fedcat_command):
    Path("base.toml").write_text("clients = 20\nper_round = 3\nepochs = 1\nrounds = 1\n")
    code, _, _ = fedcat_command("compare", "base.toml", "--seeds", "1", "--sweep", "fraction=0.1,0.5", "--out", "c")
    assert code == 0
    lines = [json.loads(Path(f"c/fedavg-fraction={f}-seed0/history.jsonl").read_text()) for f in ("0.1", "0.5")]
    assert [len(line["hops"]) for line in lines] == [2, 10]


def test_one_seed_has_no_deviation(fedcat_command):
    _, out, _ = fedcat_command("compare", "--seeds", "1", *SHORT)
    assert "±" not in out
    assert "one seed" in out


def test_without_a_command_the_help_is_shown(fedcat_command):
    code, out, err = fedcat_command()
    assert code == 2
    assert "compare" in out + err
    assert "error" not in err


def test_lists(fedcat_command):
    code, out, _ = fedcat_command("methods")
    assert code == 0
    assert all(word in out for word in ("fedavg", "fedcat-gc", "epsilon=0.5", "by-samples", "Which one?"))
    assert "None" not in out
    code, out, _ = fedcat_command("nets")
    assert code == 0
    assert all(word in out for word in ("digits-cnn", "lab-femnist", "mcmahan-cifar"))


def test_help_explains_every_setting(fedcat_command):
    code, out, _ = fedcat_command("run", "--help")
    assert code == 0
    assert all(flag in out for flag in ("--alpha", "--weight-decay", "--no-exact", "--lr-schedule", "--per-client"))


def run_with(*words: str) -> list[str]:
    return ["run", *words]


BAD = [
    (run_with("--alpha", "0"), "alpha must be > 0, got 0"),
    (run_with("--alpha", "-1"), "alpha must be > 0, got -1"),
    (run_with("--alpha", "much"), "alpha must be a number, got 'much'"),
    (run_with("--clients", "2000"), "clients must be at most the 1437 training samples, got 2000"),
    (run_with("--per-round", "51"), "per_round must be at least 1 and at most the 50 clients, got 51"),
    (run_with("--rounds", "0"), "rounds must be at least 1 and at most 1,000,000,000, got 0"),
    (run_with("--method", "fedcta"), "unknown method 'fedcta': did you mean 'fedcat'?"),
    (run_with("--dataset", "MNITS"), "unknown dataset 'MNITS': did you mean 'mnist'?"),
    (run_with("--dataset", "digit"), "unknown dataset 'digit': did you mean 'digits'?"),
    (run_with("--net", "digitscnn"), "unknown net 'digitscnn': did you mean 'digits-cnn'?"),
    (run_with("--net", "lab-mnist"), "net 'lab-mnist' takes inputs of shape (1, 28, 28)"),
    (run_with("--engine", "stack"), "unknown engine 'stack': did you mean 'stacked'?"),
    (run_with("--partition", "dir"), "unknown partition 'dir': available: dirichlet,"),
    (
        run_with("--min-samples", "20"),
        "partition 'dirichlet' with alpha 0.5 found no draw with at least min_samples = 20",
    ),
    (run_with("--device", "tpu"), "device 'tpu' cannot be used"),
    (run_with("--net", "theirs:Wide"), "net Wide has output shape (11,), but the dataset has 10 classes"),
    (run_with("--net", "theirs:Missing"), "net 'theirs:Missing' cannot be imported"),
    (run_with("bad.toml"), "unknown setting 'alhpa': did you mean 'alpha'?"),
    (run_with("nowhere.toml"), "settings file 'nowhere.toml' does not exist"),
    (run_with("--out", "full"), "out directory 'full' already holds a run"),
    (run_with("-o", "epsilon"), "option must have the form NAME=VALUE or METHOD.NAME=VALUE, got 'epsilon'"),
    (run_with("-o", "mu=1"), "unknown option of fedcat 'mu'"),
    (run_with("--method", "fedavg", "-o", "mu=1"), "unknown option of fedavg 'mu': available: weighting"),
    (run_with("-o", "epsilon=2"), "epsilon must be at least 0 and at most 1, got 2"),
    (run_with("--rouns", "3"), "No such option: --rouns"),
    (run_with("--devices", "3"), "option --devices is now called --clients"),
    (run_with("--server", "adam"), "option --server is now called --server-optimizer"),
    (run_with("--mu", "3"), "mu is an option of the method fedprox: use -o mu=VALUE"),
    (run_with("--labels", "fine"), "labels is an option of the dataset cifar100: use -d labels=VALUE"),
    (run_with("-s", "pace=3"), "unknown option of mean 'server_pace'"),
    (run_with("full"), "settings file 'full' cannot be read: Is a directory, use 'full/settings.toml'"),
    (run_with("typed.toml"), "method must be a string, got 5"),
    (run_with("tables.toml"), "settings file 'tables.toml': partition_options must be a table of options, got 5"),
    (run_with("tables.toml", "--alpha", "0.3"), "partition_options must be a table of options, got 5"),
    (run_with("--out", "x" * 300), "x': File name too long"),
    (["resume", "x" * 300], "x': File name too long"),
    (run_with("-d", "labels=fine"), "dataset 'digits' has no options, got 'labels'"),
    (run_with("-d", "labels"), "dataset-option must have the form NAME=VALUE, got 'labels'"),
    (run_with("--dataset", "cifar100", "-d", "labls=fine"), "did you mean 'labels'?"),
    (
        run_with("--dataset", "cifar100", "-d", "labels=rough"),
        "unknown cifar100.labels 'rough': available: coarse, fine",
    ),
    (run_with("--dataset", "femnist", "-d", "writers=many"), "femnist.writers must be an integer, got 'many'"),
    (
        run_with("--dataset", "mnist", "--data-dir", "nowhere"),
        "data_dir must be an existing directory, got 'nowhere'",
    ),
    (run_with("--dataset", "mnist", "--data-dir", "nowhere", "--alpha", "0"), "alpha must be > 0, got 0"),
    (run_with("--dataset", "npz"), "dataset 'npz' needs the option path: -d path=..."),
    (
        run_with("--dataset", "folder", "-d", "path=5"),
        "folder.path must be a directory with one subdirectory per class, got '5'",
    ),
    (run_with("--preset", "lba", "--dataset", "mnist"), "unknown preset 'lba': did you mean 'lab'?"),
    (
        run_with("--preset", "lab"),
        "preset 'lab' must be used with one of its datasets, mnist, cifar10, cifar100, femnist",
    ),
    (run_with("--partition", "natural"), "partition 'natural' needs samples with owners"),
    (["presets", "lab", "digits"], "preset 'lab' must be used with one of its datasets"),
    (["data", "get", "digits"], "dataset 'digits' cannot be downloaded"),
    (["data", "get", "mnits"], "unknown dataset to download 'mnits': did you mean 'mnist'?"),
    (["data", "show", "digits", "--out", "a.bmp"], "the plot's file name must end in .png, .svg, .pdf, got 'a.bmp'"),
    (["data", "show", "digit"], "unknown dataset 'digit': did you mean 'digits'?"),
    (["data", "show", "digits", "--alpha", "0"], "alpha must be > 0, got 0"),
    (["compare", "reserved.toml"], "unknown setting 'seeds': did you mean 'seed'?"),
    (["compare", "--seeds", "two"], "seeds must be an integer, got 'two'"),
    (["compare", "--sweep", "alpha"], "sweep must have the form NAME=A,B,..., got 'alpha'"),
    (["compare", "--sweep", "alpha=0.1,-3"], "alpha must be > 0, got -3"),
    (["compare", "--methods", "fedavg,fedact"], "unknown method 'fedact': did you mean 'fedcat'?"),
    (["compare", "--sweep", "lr=0.1", "--sweep", "lr=0.2"], "sweep must set lr only once"),
    (["compare", "--sweep", "lr=0.1,0.2", "--lr", "0.3"], "lr must be set or swept, got both"),
    (["compare", "--out", "full"], "out directory 'full' already holds a run"),
    (["compar"], "No such command 'compar'"),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_bad_input_gets_one_line_and_leaves_nothing_behind(fedcat_command, tmp_path, words, message):
    Path("bad.toml").write_text("alhpa = 0.1\n")
    Path("typed.toml").write_text("method = 5\n")
    Path("tables.toml").write_text("partition_options = 5\n")
    Path("reserved.toml").write_text("seeds = 2\n")
    Path("theirs.py").write_text(
        "from torch import nn\n"
        "class Wide(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(64, 11)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x.flatten(1))\n"
    )
    Path("full").mkdir()
    Path("full/settings.toml").write_text("")
    sys.modules.pop("theirs", None)
    code, out, err = fedcat_command(*words)
    assert code == 2
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert out == ""
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__"} == {
        "bad.toml",
        "typed.toml",
        "tables.toml",
        "reserved.toml",
        "theirs.py",
        "full",
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none(fedcat_command, tmp_path):
    code, _, err = fedcat_command("run", "--device", "cuda")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "device 'cuda' needs CUDA" in err
    assert list(tmp_path.iterdir()) == []


def test_control_c_ends_cleanly_and_says_what_was_kept(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONUNBUFFERED": "1"}
    words = ["run", "--rounds", "100000", "--evaluate-every", "1", "--out", "cut"]
    with subprocess.Popen(
        [sys.executable, "-m", "fedcat", *words],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        history = tmp_path / "cut" / "history.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (history.exists() and history.read_text().count("\n") >= 2):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "ended by SIGINT after" in err
    assert "`fedcat resume cut` goes on" in err
    summary = json.loads((tmp_path / "cut" / "run.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["rounds"] == history.read_text().count("\n") >= 2
    fedcat.load_model(tmp_path / "cut")


def test_a_bar_on_a_terminal(monkeypatch, tmp_path):
    import io

    from rich.console import Console

    screen = io.StringIO()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fedcat.cli.run.out", Console(file=screen, force_terminal=True, width=80, highlight=False))
    words = ["compare", "--seeds", "1", "--sweep", "lr=0.01,0.02,0.05,0.1", *SHORT]
    monkeypatch.setattr(sys, "argv", ["fedcat", *words])
    with pytest.raises(SystemExit):
        cli.main()
    last = [line for line in screen.getvalue().replace("\r", "\n").splitlines() if "3/3" in line][-1]
    assert "rounds/s" in last
    assert "0:00:00" in last
    assert "fedavg" in last


def test_own_warnings_are_lines_and_others_are_as_they_were(capsys):
    others = []
    cli._show_warning(lambda *given: others.append(given), UserWarning("too little"), UserWarning, cli.__file__, 3)
    cli._show_warning(lambda *given: others.append(given), "old", DeprecationWarning, torch.__file__, 4)
    assert capsys.readouterr().err == "note: too little\n"
    assert others == [("old", DeprecationWarning, torch.__file__, 4)]


def test_a_comparison_explains_its_columns_and_shows_paired_differences(fedcat_command):
    words = ["--seeds", "2", "--rounds", "4", "--epochs", "1", "--clients", "20", "-o", "scaffold.clip=10"]
    code, out, _ = fedcat_command("compare", "--methods", "fedavg,scaffold", *words)
    assert code == 0
    assert "best: the best accuracy on the test data, so it is optimistic" in out
    assert "est. time: of one run, an estimate: runs that train together share the time by their steps" in out
    lines = out[out.index("difference in last five to fedavg") :].splitlines()
    assert lines[1].split() == ["run", "mean", "seed", "0", "seed", "1"]
    stored = json.loads(Path("runs/compare-digits-1/comparison.json").read_text())
    by_seed = stored[1]["differences"]["last_five"]
    assert lines[3].split()[0] == "scaffold"
    assert lines[3].split()[-2:] == [f"{100 * value:+.2f}" for value in by_seed]
    assert "clip" in out.splitlines()[1]
    assert "(scaffold: clip 10)" in out
    clips = [
        tomllib.loads(Path(f"runs/compare-digits-1/{method}-seed0/settings.toml").read_text()).get("clip")
        for method in ("scaffold", "fedavg")
    ]
    assert clips == [10.0, None]


def test_one_seed_is_shown_without_a_deviation(fedcat_command):
    words = ["--seeds", "1", "--rounds", "2", "--epochs", "1", "--clients", "20"]
    code, out, _ = fedcat_command("compare", "--methods", "fedavg,fedprox", *words)
    assert code == 0
    assert "±" not in out
    assert "1 epoch;" in out


def test_a_run_that_trained_nothing_ends_with_an_error_code(fedcat_command):
    words = ["--method", "fedavg", "--lr", "1e30", "--rounds", "2", "--clients", "20", "--min-samples", "20"]
    code, _, err = fedcat_command("run", *words)
    assert code == 1
    assert "note: no hop arrived: the model is the initial one" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--dataset", "fashion.npz"], "choose the dataset npz with the option path=fashion.npz"),
        (["run", "--per-round", "3", "--fraction", "0.5"], "per_round 3 and fraction 0.5 are both set"),
        (["run", "--rounds", "1" + "0" * 23], "rounds must be at least 1 and at most 1,000,000,000"),
        (["compare", "--sweep", "lr=0.1,0.1"], "sweep of lr must list different values, got 0.1 twice"),
        (["compare", "-o", "mu=0.1", "-o", "fedprox.mu=0.2"], "option must set mu only once, got mu and fedprox.mu"),
        (["compare", "-o", "scafold.clip=1"], "unknown method in options 'scafold': did you mean 'scaffold'?"),
        (
            ["run", "--method", "fedcat-gc", "--selector", "uniform"],
            "selector cannot be set: FedCat without concatenat",
        ),
        (["run", "--method", "fedcat", "--selector", "uniform"], "another selection needs the option grouping=false"),
    ],
)
def test_what_was_accepted_silently_is_refused(fedcat_command, words, message):
    code, _, err = fedcat_command(*words)
    assert code == 2
    assert message in err


def test_another_selection_of_fedcat_without_grouping(fedcat_command):
    words = ["--selector", "by-samples", "-o", "grouping=false", "--rounds", "2", "--epochs", "1", "--clients", "20"]
    assert fedcat_command("run", "--method", "fedcat", *words)[0] == 0
