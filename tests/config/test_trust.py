"""What stands in a file is data: it is imported as code only with the user's consent."""

import json
import sys
from importlib import import_module

import pytest
import torch

import fedcat
from fedcat.config.layers import SettingsFile
from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry

MODULE = """
from pathlib import Path
Path({mark!r}).write_text("run")

def net(shape, classes):
    from torch import nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

def selector(round, rng, samples, k):
    return rng.choice(len(samples), k, replace=False)
"""


SELECTOR = MODULE[MODULE.index("def selector") :]


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """Put a module into the current directory that leaves a mark when it is imported; return the mark."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "stranger", raising=False)
    mark = tmp_path / "mark"
    (tmp_path / "stranger.py").write_text(MODULE.format(mark=str(mark)))
    yield mark
    sys.modules.pop("stranger", None)


SHORT = {"rounds": 2, "epochs": 1, "method": "fedavg"}


@pytest.mark.parametrize("setting", ["method", "dataset", "net", "partition", "selector", "server_optimizer"])
def test_a_settings_file_cannot_import_a_module(tmp_path, theirs, setting):
    (tmp_path / "s.toml").write_text(f'{setting} = "stranger:net"\n')
    with pytest.raises(SettingError, match=rf"{setting} 'stranger:net' would import the module 'stranger' and run its"):
        fedcat.run(settings=tmp_path / "s.toml")
    if setting != "method":  # which a comparison names itself
        with pytest.raises(SettingError, match=r"trust=True"):
            fedcat.compare(["fedavg"], 1, settings=tmp_path / "s.toml")
    assert not theirs.exists()


@pytest.mark.parametrize("method", ["fedavg", "fedcat"])
def test_nor_can_the_table_of_a_method(tmp_path, theirs, method):
    (tmp_path / "s.toml").write_text(f'[options.{method}]\noptimizer = "stranger:net"\n')
    with pytest.raises(SettingError, match=r"optimizer 'stranger:net' would import the module 'stranger' and run its"):
        fedcat.run(settings=tmp_path / "s.toml", optimizer="sgd", **SHORT)
    fedcat.run(out=tmp_path / "run", **SHORT)
    with (tmp_path / "run" / "settings.toml").open("a") as file:
        file.write((tmp_path / "s.toml").read_text().replace("fedavg", "'fedavg'"))
    with pytest.raises(SettingError):
        fedcat.resume(tmp_path / "run", rounds=4)
    assert not theirs.exists()


def test_what_the_user_replaces_is_not_imported(tmp_path, theirs):
    (tmp_path / "s.toml").write_text('net = "stranger:net"\nmethod = "stranger:selector"\n')
    assert fedcat.run(settings=tmp_path / "s.toml", net="digits-cnn", **SHORT).settings.net == "digits-cnn"
    words = {"net": "digits-cnn", "rounds": 2, "epochs": 1}
    assert fedcat.compare(["fedavg"], 1, settings=tmp_path / "s.toml", **words)[0].label == "fedavg"
    assert not theirs.exists()


@pytest.mark.parametrize("name", ["stranger:Path", "stranger:pathlib.Path", "stranger:os.system"])
def test_consent_to_a_module_is_no_consent_to_what_it_imports(tmp_path, theirs, name):
    (tmp_path / "stranger.py").write_text("import os, pathlib\nfrom pathlib import Path\n" + SELECTOR)
    (tmp_path / "s.toml").write_text(f'dataset = "{name}"\n')
    with pytest.raises(SettingError, match=r"would import the module|is a module that 'stranger' imports"):
        fedcat.run(settings=tmp_path / "s.toml", selector="stranger:selector", **SHORT)


def test_a_trusted_file_can(tmp_path, theirs):
    (tmp_path / "s.toml").write_text('net = "stranger:net"\n')
    assert fedcat.run(settings=tmp_path / "s.toml", trust=True, **SHORT).status == "finished"
    assert theirs.exists()


def test_a_module_that_the_user_names_too_can_be_imported(tmp_path, theirs):
    (tmp_path / "s.toml").write_text('net = "stranger:net"\n')
    assert fedcat.run(settings=tmp_path / "s.toml", selector="stranger:selector", **SHORT).status == "finished"
    with pytest.raises(SettingError, match="would import"):
        SettingsFile.read(tmp_path / "s.toml", given={"selector": "strangers:net", "lr": 0.1, "clip": None})


def test_on_the_command_line(tmp_path, theirs, monkeypatch, capsys):
    from fedcat.cli import app

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["fedcat", *words])
        with pytest.raises(SystemExit) as end:
            app.main()
        return end.value.code or 0, capsys.readouterr().err

    (tmp_path / "s.toml").write_text('net = "stranger:net"\nrounds = 2\nepochs = 1\nmethod = "fedavg"\n')
    (tmp_path / "d.toml").write_text('dataset = "stranger:net"\n')
    for words in (["run", "s.toml"], ["compare", "s.toml"], ["data", "show", "d.toml"]):
        code, err = command(*words)
        assert (code, len(err.splitlines())) == (2, 1)
        assert "would import the module 'stranger'" in err
        assert "--trust" in err
    assert not theirs.exists()
    assert command("run", "s.toml", "--trust", "--out", "a")[0] == 0
    assert command("run", "s.toml", "--net", "stranger:net", "--out", "b")[0] == 0
    assert command("data", "show", "a/settings.toml", "--trust", "--no-plot")[0] == 0


def test_a_model_is_loaded_without_importing_what_its_folder_names(tmp_path, theirs):
    sys.path.append(str(tmp_path))
    stranger = import_module("stranger")
    theirs.unlink()
    result = fedcat.run(net=stranger.net, out=tmp_path / "run", **SHORT)
    sys.modules.pop("stranger")
    with pytest.raises(SettingError, match="net 'stranger:net' would import the module 'stranger'"):
        fedcat.load_model(tmp_path / "run")
    assert not theirs.exists()
    assert torch.equal(
        fedcat.load_model(tmp_path / "run", net=stranger.net)[1].weight,
        fedcat.load_model(tmp_path / "run", trust=True)[1].weight,
    )
    assert torch.equal(fedcat.load_model(tmp_path / "run", trust=True)[1].weight, result.model()[1].weight)


def test_a_strangers_folder_runs_nothing(tmp_path):
    result = fedcat.run(out=tmp_path / "run", **SHORT)
    mark = tmp_path / "mark"
    settings = (result.folder / "settings.toml").read_text()
    (result.folder / "settings.toml").write_text(settings.replace('"digits-cnn"', '"subprocess:Popen"'))
    with pytest.raises(SettingError, match="would import the module 'subprocess'"):
        fedcat.load_model(result.folder)
    summary = json.loads((result.folder / "run.json").read_text())
    summary["input_shape"] = ["touch", str(mark)]
    (result.folder / "run.json").write_text(json.dumps(summary))
    with pytest.raises(SettingError, match="input_shape must be a list of integers"):
        fedcat.load_model(result.folder)
    assert not mark.exists()


@pytest.mark.parametrize(("key", "value"), [("net", '["a"]'), ("dtype", '"nope"')])
def test_a_damaged_folder_is_an_error_with_a_name(tmp_path, key, value):
    folder = fedcat.run(out=tmp_path / "run", **SHORT).folder
    lines = (folder / "settings.toml").read_text().splitlines()
    (folder / "settings.toml").write_text("\n".join(f"{key} = {value}" if s.startswith(key) else s for s in lines))
    with pytest.raises(SettingError, match=key):
        fedcat.load_model(folder)


def test_a_net_can_be_given_by_name(tmp_path):
    result = fedcat.run(out=tmp_path / "run", **SHORT)
    back = fedcat.load_model(tmp_path / "run", net="digits-cnn")
    assert torch.equal(back.head.weight, result.model().head.weight)


def test_the_current_directory_is_searched_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "colorsys.py").write_text("raise SystemExit('hidden')")
    sys.modules.pop("colorsys", None)
    assert Registry("thing").get("colorsys:rgb_to_hsv").__module__ == "colorsys"
    assert sys.path[-1] == str(tmp_path)
