"""`fedcat data` and runs on published datasets, as a user types them."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from http_server import serve
from PIL import Image
from small_data import (
    cifar_files,
    cifar_source,
    femnist_source,
    leaf_files,
    mnist_files,
    mnist_source,
    write,
    writers,
)

from fedcat.data.files import download
from fedcat.data.files.catalog import SOURCES

SOURCE = Path(__file__).parents[2] / "src"
SHORT = ["--clients", "6", "--min-samples", "1", "--rounds", "2", "--epochs", "1"]


@pytest.fixture
def mnist(monkeypatch, tmp_path_factory):
    """Return a folder with a small MNIST, which is what `mnist` means here."""
    files = mnist_files()
    monkeypatch.setitem(SOURCES, "mnist", mnist_source(files))
    return write(tmp_path_factory.mktemp("data") / "mnist", files).parent


def test_list_says_where_files_are(fedcat_command, mnist):
    code, out, err = fedcat_command("data", "list", "--data-dir", str(mnist))
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[lines.index(next(x for x in lines if x.startswith("mnist:"))) + 1] == f"  files: {mnist / 'mnist'}"
    assert "not found, will be downloaded" in lines[lines.index(next(x for x in lines if x.startswith("cifar10:"))) + 1]
    assert "labels=coarse" in out
    assert "dirichlet-hsu" in out


def test_show_prints_figures_and_draws(fedcat_command, mnist):
    code, out, _ = fedcat_command("data", "show", "mnist", "--alpha", "0.3", *SHORT[:4], "--data-dir", str(mnist))
    assert code == 0
    assert out.startswith("mnist: 6 clients, 120 training and 30 test samples, 10 classes\n")
    assert "mean total variation distance" in out
    assert "plot: runs/mnist-dirichlet-0.3-6-seed0.png" in out
    assert Path("runs/mnist-dirichlet-0.3-6-seed0.png").stat().st_size > 10_000


def test_show_writes_a_table_and_takes_options(fedcat_command):
    words = ["--partition", "iid", "--clients", "7", "--rows", "2", "--out", "a.svg", "--csv", "a.csv"]
    code, out, _ = fedcat_command("data", "show", "digits", *words)
    assert code == 0
    assert "and 5 more clients; --rows 0 lists all" in out
    with Path("a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row["samples"]) for row in rows) == 1437
    assert all(sum(int(row[str(c)]) for c in range(10)) == int(row["samples"]) for row in rows)
    assert Path("a.svg").exists()
    code, _, err = fedcat_command("data", "show", "digits", "--csv", "nowhere/a.csv")
    assert (code, err) == (2, "error: csv file 'nowhere/a.csv' cannot be written: no directory 'nowhere'\n")
    before = set(Path().iterdir())
    assert fedcat_command("data", "show", "digits", "--no-plot")[0] == 0
    assert set(Path().iterdir()) == before


def test_get_downloads_once_and_a_run_finds_it(fedcat_command, mnist, monkeypatch, own_cache):
    files = {path.name: path.read_bytes() for path in (mnist / "mnist").iterdir()}
    packed = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}
    with serve(packed) as served:
        monkeypatch.setitem(SOURCES, "mnist", mnist_source(files, served.address))
        code, out, err = fedcat_command("data", "get", "mnist", "--data-dir", "new/folder")
        assert (code, out) == (0, "mnist: 120 train, 30 test samples, verified, from new/folder/mnist\n")
        assert err.count("downloading ") == 4
        assert len(served.asked) == 4
        code, _, err = fedcat_command("data", "get", "mnist", "--data-dir", "new/folder")
        assert (code, err, len(served.asked)) == (0, "", 4)
        code, _, err = fedcat_command("run", "--dataset", "mnist", *SHORT)
        assert (code, len(served.asked)) == (0, 8)
        assert (own_cache / "mnist" / "train-images-idx3-ubyte.gz").exists()


def test_without_a_network_one_line_says_what_to_do(fedcat_command, monkeypatch, own_cache, mnist):
    monkeypatch.setattr(download, "PAUSE", 0.0)
    code, out, err = fedcat_command("run", "--dataset", "mnist")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: dataset 'mnist' is not in {own_cache} and cannot be downloaded (http://127.0.0.1:9/")
    assert "put train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte" in err
    assert not own_cache.exists() or not [p for p in own_cache.rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda content: content[:-1],
            "has 94,095 bytes, but the published file has 94,096: it is truncated or a different file; replace",
        ),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "it is damaged or a different file"),
        (
            lambda content: b"hello",
            "has 5 bytes, but the published file has 94,096: it is truncated or a different file",
        ),
    ],
)
def test_a_damaged_file_is_one_line(fedcat_command, mnist, own_cache, damage, message):
    path = mnist / "mnist" / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    code, out, err = fedcat_command("run", "--dataset", "mnist", "--data-dir", str(mnist))
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: {path} has ")
    assert message in err
    assert not (own_cache / "prepared").exists()


def test_a_run_with_a_preset_and_again_from_its_file(fedcat_command, mnist):
    place = ["--data-dir", str(mnist)]
    words = ["run", "--preset", "paper", "--dataset", "mnist", *place, *SHORT, "--out", "a"]
    assert fedcat_command(*words, "-d", "mean=[0.5]")[0] == 0
    settings = tomllib.loads(Path("a/settings.toml").read_text())
    assert (settings["preset"], settings["net"], settings["momentum"]) == ("paper", "mcmahan-mnist", 0.9)
    assert settings["dataset_options"] == {"mean": [0.5], "std": [0.3081]}
    assert fedcat_command("run", "a/settings.toml", "--out", "b")[0] == 0
    assert Path("a/settings.toml").read_text() == Path("b/settings.toml").read_text()
    scores = [json.loads(Path(f, "run.json").read_text())["metrics"] for f in "ab"]
    assert scores[0] == scores[1]
    assert fedcat_command("run", "a/settings.toml", "--preset", "lab", *SHORT, "--out", "c")[0] == 0
    settings = tomllib.loads(Path("c/settings.toml").read_text())
    assert (settings["net"], settings["momentum"], settings["rounds"]) == ("lab-mnist", 0.5, 2)


def test_alpha_on_writers_is_refused_also_under_a_preset(fedcat_command, monkeypatch, tmp_path):
    monkeypatch.setitem(SOURCES, "femnist", femnist_source(b""))
    write(tmp_path / "data" / "femnist", leaf_files(writers(4)))
    words = ["--dataset", "femnist", "--data-dir", "data", "-d", "writers=3", "-d", "keep=1"]
    for given in ([], ["--preset", "lab"]):
        code, _, err = fedcat_command("run", *words, *given, "--alpha", "0.1")
        assert code == 2
        assert err.splitlines()[-1].startswith("error: alpha has no effect on 'femnist', whose clients are the owners")


def test_another_dataset_leaves_the_options_of_the_files_behind(fedcat_command, mnist):
    Path("a.toml").write_text('dataset = "cifar100"\n[dataset_options]\nlabels = "fine"\n')
    assert fedcat_command("run", "a.toml", "--dataset", "mnist", "--data-dir", str(mnist), *SHORT)[0] == 0


def test_presets_are_settings_files(fedcat_command, mnist):
    code, out, _ = fedcat_command("presets")
    assert code == 0
    assert out.count("# fedcat presets ") == 8
    code, out, _ = fedcat_command("presets", "lab", "mnist")
    Path("lab.toml").write_text(out)
    assert tomllib.loads(out)["net"] == "lab-mnist"
    assert fedcat_command("run", "lab.toml", "--data-dir", str(mnist), *SHORT)[0] == 0
    assert fedcat_command("presets", "paper")[1].count("# fedcat presets paper ") == 4


def test_presets_that_are_swept_or_named_show_through_a_file_for_every_dataset(fedcat_command, mnist, monkeypatch):
    files = cifar_files("cifar10")
    monkeypatch.setitem(SOURCES, "cifar10", cifar_source("cifar10", files))
    write(mnist / "cifar-10-batches-bin", files)
    Path("f.toml").write_text('dataset = "cifar10"\nmomentum = 0.3\nper_round = 3\n[dataset_options]\nmean = [0.1]\n')
    short = ["--methods", "fedavg", "--seeds", "1", "--data-dir", str(mnist), *SHORT]
    words = ["compare", "f.toml", "--sweep", "preset=lab,paper", *short, "--fraction", "0.5", "--out", "a"]
    assert fedcat_command(*words)[0] == 0
    found = [tomllib.loads(path.read_text()) for path in sorted(Path("a").glob("*/settings.toml"))]
    assert [(one["momentum"], one["dataset_options"]["mean"]) for one in found] == [(m, [0.5] * 3) for m in (0.5, 0.9)]
    words = ["compare", "f.toml", "--preset", "lab", "--sweep", "dataset=cifar10,mnist", *short, "--out", "b"]
    code, out, _ = fedcat_command(*words)
    assert code == 0
    assert "2 runs side by side on cifar10, mnist" in out
    found = [tomllib.loads(path.read_text()) for path in sorted(Path("b").glob("*/settings.toml"))]
    assert [one["dataset_options"]["mean"] for one in found] == [[0.5] * 3, [0.1307]]
    assert all("per_round" not in one and one["fraction"] == 0.1 for one in found)
    assert fedcat_command("compare", "--preset", "lab", "--sweep", "dataset=cifar10,mnist", *short)[0] == 0


def test_names_that_look_like_markup_or_formulas_are_names(fedcat_command, tmp_path):
    owners = np.array(["[/b]", "[red]x"] * 20)
    np.savez("a.npz", x=np.zeros((40, 2), dtype=np.float32), y=np.arange(40) % 2, owner=owners)
    code, out, _ = fedcat_command("data", "show", "npz", "-d", "path=a.npz")
    assert code == 0
    assert "[/b]" in out
    for name in ("$a_{$", "été", "猫"):
        for i in range(6):
            path = tmp_path / "photos" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4)).save(path)
    words = [
        "data",
        "show",
        "folder",
        "-d",
        "path=photos",
        "--partition",
        "iid",
        "--clients",
        "2",
        "--min-samples",
        "1",
    ]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-m", "fedcat", *words], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "plot: runs/photos-iid-2-seed0.png" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-d", "std=[0]"], "std must be a list of numbers, none of them 0, got [0]"),
        (["--clients", "10", "--per-round", "20"], "per_round must be at least 1 and at most the 10 clients, got 20"),
        (["-o", "epsilon=abc"], "fedcat.epsilon must be a number, got 'abc'"),
        (["--out", "full"], "out directory 'full' already holds a run"),
        (["--device", "tpu"], "device 'tpu' cannot be used"),
    ],
)
def test_mistakes_are_said_before_anything_is_downloaded(fedcat_command, mnist, words, message):
    Path("full").mkdir()
    Path("full/settings.toml").write_text("")
    code, _, err = fedcat_command("run", "--dataset", "mnist", *words)
    assert (code, len(err.splitlines())) == (2, 1)
    assert message in err


def test_what_a_preset_replaces_in_a_file_is_said(fedcat_command, mnist):
    Path("f.toml").write_text('dataset = "mnist"\nlr = 0.5\nrounds = 1\n')
    code, out, err = fedcat_command("run", "f.toml", "--preset", "lab", "--data-dir", str(mnist), *SHORT)
    assert code == 0
    assert "note: preset 'lab' overrides these settings of f.toml: lr 0.5\n" in err
    text = "[dataset_options]\nmean = [0.0]\n[options.fedcat]\nepsilon = 0.9\n[options.fedavg]\n"
    Path("g.toml").write_text('dataset = "mnist"\nseed = 3\n' + text)
    _, _, err = fedcat_command("run", "g.toml", "--preset", "lab", "--data-dir", str(mnist), *SHORT, "--out", "g")
    assert "overrides these settings of g.toml: dataset_options.mean [0.0], options.fedcat.epsilon 0.9\n" in err
    assert "seed = 3" in Path("g/settings.toml").read_text()
    words = ["run", "g/settings.toml", "--preset", "paper", *SHORT, "--out", "h"]
    assert "g/settings.toml: net lab-mnist, momentum 0.5\n" in fedcat_command(*words)[2]
    assert "preset lab; net lab-mnist; partition dirichlet, alpha 0.5; 1 client per round; 1 epoch" in out


def test_what_has_no_effect_is_noted(fedcat_command):
    code, _, err = fedcat_command("run", "--partition", "iid", "--alpha", "0.1", *SHORT)
    assert code == 0
    assert "note: alpha has no effect with the partition 'iid'" in err
    assert "no effect" not in fedcat_command("run", "--partition", "shards", "--shards", "3", *SHORT)[2]


def test_options_of_a_dataset_are_swept(fedcat_command, tmp_path):
    Path("swept.py").write_text(
        "import fedcat\n"
        "def load(*, noise=0.0):\n"
        "    if noise > 1:\n"
        "        raise ValueError('too loud')\n"
        "    return fedcat.load_dataset('digits')\n"
    )
    sys.modules.pop("swept", None)
    words = ["compare", "--dataset", "swept:load", "--methods", "fedavg,fedcat", "--seeds", "1", *SHORT]
    code, _, _ = fedcat_command(*words, "--sweep", "noise=0.1,0.2", "--sweep", "epsilon=0,1", "--out", "c")
    assert code == 0
    found = sorted(path.name for path in Path("c").iterdir() if path.is_dir())
    assert found == [
        *("fedavg-noise=0.1-seed0", "fedavg-noise=0.2-seed0"),
        *(f"fedcat-noise={n}-epsilon={e}-seed0" for n in (0.1, 0.2) for e in (0, 1)),
    ]
    assert tomllib.loads(Path("c", found[1], "settings.toml").read_text())["dataset_options"] == {"noise": 0.2}
    code, _, err = fedcat_command(*words, "--sweep", "noise=0.1,0.2", "-d", "noise=0.3")
    assert (code, err) == (2, "error: noise must be set or swept, got both\n")
    code, _, err = fedcat_command(*words, "--sweep", "epsilon=0.1,0.2", "-o", "epsilon=0.3")
    assert (code, err) == (2, "error: epsilon must be set or swept, got both\n")
    code, _, err = fedcat_command(*words, "--sweep", "nois=0.1,0.2")
    assert "unknown sweep 'nois': did you mean 'noise'?" in err
    code, _, err = fedcat_command(*words, "-d", "noise=3")
    assert (code, err) == (
        2,
        "error: dataset 'swept:load' failed with ValueError: too loud (swept.py, line 4)\n",
    )


def test_options_of_a_file_do_not_reach_other_datasets_of_a_sweep(fedcat_command, mnist, monkeypatch):
    files = cifar_files("cifar10")
    monkeypatch.setitem(SOURCES, "cifar10", cifar_source("cifar10", files))
    write(mnist / "cifar-10-batches-bin", files)
    Path("m.toml").write_text('dataset = "mnist"\n[dataset_options]\nmean = [0.7]\n')
    words = ["compare", "--methods", "fedavg", "--seeds", "1", "--data-dir", str(mnist), *SHORT]
    assert fedcat_command(*words, "m.toml", "--sweep", "dataset=mnist,cifar10", "--out", "a")[0] == 0
    found = [
        tomllib.loads(path.read_text())["dataset_options"]["mean"] for path in sorted(Path("a").glob("*/settings.toml"))
    ]
    assert found == [[0.5, 0.5, 0.5], [0.7]]
    assert fedcat_command(*words, "--sweep", "dataset=mnist,cifar10", "-d", "mean=0.4", "--out", "b")[0] == 0
    found = [
        tomllib.loads(path.read_text())["dataset_options"]["mean"] for path in sorted(Path("b").glob("*/settings.toml"))
    ]
    assert found == [[0.4], [0.4]]


def test_other_writers_than_a_files(fedcat_command, monkeypatch, tmp_path):
    monkeypatch.setitem(SOURCES, "femnist", femnist_source(b""))
    write(tmp_path / "data" / "femnist", leaf_files(writers(5)))
    words = ["--dataset", "femnist", "--data-dir", "data", "-d", "keep=1", "--rounds", "1", "--epochs", "1"]
    assert fedcat_command("run", *words, "-d", "writers=3", "--fraction", "0.5", "--out", "a")[0] == 0
    assert fedcat_command("run", "a/settings.toml", "-d", "writers=5", "--out", "b")[0] == 0
    assert tomllib.loads(Path("b/settings.toml").read_text())["clients"] == 5


def test_a_run_can_be_repeated_from_another_folder(fedcat_command, mnist, monkeypatch, tmp_path):
    monkeypatch.chdir(mnist.parent)
    assert (
        fedcat_command("run", "--dataset", "mnist", "--data-dir", mnist.name, *SHORT, "--out", str(tmp_path / "a"))[0]
        == 0
    )
    monkeypatch.chdir(tmp_path)
    assert fedcat_command("run", "a/settings.toml", "--out", "b")[0] == 0


def test_compare_sweeps_presets(fedcat_command, mnist):
    words = ["--sweep", "preset=lab,paper", "--seeds", "1", "--methods", "fedavg", "--out", "c"]
    code, _, _ = fedcat_command("compare", "--dataset", "mnist", "--data-dir", str(mnist), *words, *SHORT)
    assert code == 0
    nets = [tomllib.loads(path.read_text())["net"] for path in sorted(Path("c").glob("*/settings.toml"))]
    assert nets == ["lab-mnist", "mcmahan-mnist"]
