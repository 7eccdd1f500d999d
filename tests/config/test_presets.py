import tomllib

import numpy as np
import pytest
import torch

import fedcat
from fedcat.config.presets import preset, preset_datasets, preset_names
from fedcat.config.resolve import resolve
from fedcat.config.settings import Settings
from fedcat.config.toml import toml
from fedcat.core.errors import SettingError
from fedcat.core.options import options
from fedcat.data.dataset import DATASETS, dataset_options
from fedcat.methods import METHODS
from fedcat.models.nets import NETS

ALL = [(name, dataset) for name in preset_names() for dataset in preset_datasets(name)]


def test_there_are_two_presets_for_four_datasets():
    assert preset_names() == ("lab", "paper")
    assert [preset_datasets(name) for name in preset_names()] == [("mnist", "cifar10", "cifar100", "femnist")] * 2


@pytest.mark.parametrize(("name", "dataset"), ALL)
def test_every_preset_is_made_of_settings_that_exist(name, dataset):
    found = preset(name, dataset)
    assert Settings.checked(found).preset == name
    assert found["net"] in NETS
    assert found["dataset_options"].keys() <= dataset_options(DATASETS.get(dataset)).keys()
    for method, table in found["options"].items():
        assert table.keys() <= options(METHODS.get(method)).keys()
    assert tomllib.loads(toml(found)) == found


def test_the_presets_are_what_was_decided():
    lab, paper = preset("lab", "cifar10"), preset("paper", "cifar10")
    assert (lab["net"], lab["momentum"], lab["rounds"]) == ("lab-cifar", 0.5, 1000)
    assert (paper["net"], paper["momentum"], paper["rounds"]) == ("mcmahan-cifar", 0.9, 1000)
    for found in (lab, paper):
        assert (found["lr"], found["batch_size"], found["epochs"]) == (0.01, 50, 5)
        assert (found["partition"], found["clients"], found["fraction"]) == ("dirichlet", 100, 0.1)
    assert preset("paper", "femnist")["net"] == "mcmahan-mnist"
    assert preset("lab", "femnist")["partition"] == "natural"
    assert preset("lab", "femnist")["dataset_options"]["writers"] == 180


@pytest.mark.parametrize(("dataset", "mu"), [("mnist", 0.1), ("cifar10", 0.01), ("cifar100", 0.001), ("femnist", 0.1)])
def test_a_method_gets_its_own_numbers_for_the_dataset(dataset, mu):
    assert preset("lab", dataset)["options"]["fedprox"] == {"mu": mu}


@pytest.mark.parametrize(
    ("dataset", "hidden", "noise", "batch", "lr", "a", "b", "decay"),
    [
        ("mnist", 256, 32, 32, 3e-4, 10, 10, 0.98),
        ("cifar10", 512, 100, 128, 3e-4, 0.2, 0.2, 1),
        ("cifar100", 512, 100, 128, 1e-4, 10, 1, 1),
        ("femnist", 512, 100, 128, 3e-4, 10, 10, 1),
    ],
)
def test_the_generators_numbers_are_those_of_the_experiments(dataset, hidden, noise, batch, lr, a, b, decay):
    found = preset("lab", dataset)["options"]["fedgen"]
    sizes = (found["hidden"], found["noise"], found["generator_batch"], found["generator_lr"])
    assert sizes == (hidden, noise, batch, lr)
    assert (found["a"], found["b"], found["decay"], found["generator_lr_decay"]) == (a, b, decay, decay)


def test_the_normalization_of_a_preset_is_the_datasets_own():
    for dataset in preset_datasets("lab"):
        known = dataset_options(DATASETS.get(dataset))
        for option in ("mean", "std"):
            assert tuple(preset("lab", dataset)["dataset_options"][option]) == known[option]


def test_a_preset_for_other_data_is_refused():
    for dataset in ("digits", fedcat.load_dataset("digits")):
        with pytest.raises(SettingError, match="preset 'lab' must be used with one of its datasets"):
            fedcat.run(preset="lab", dataset=dataset)
    with pytest.raises(SettingError, match="preset must be a string, got 5"):
        fedcat.run(preset=5)
    with pytest.raises(SettingError, match="unknown preset 'lba': did you mean 'lab'"):
        preset("lba", "mnist")
    assert Settings().preset == ""


def test_presets_are_not_shared():
    preset("lab", "mnist")["options"]["fedcat"]["epsilon"] = 7
    assert preset("lab", "mnist")["options"]["fedcat"]["epsilon"] == 0.5


def test_paths_and_numbers_of_numpy_are_taken(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 3), dtype=np.float32), y=np.arange(20) % 2)
    options = {"path": tmp_path / "a.npz", "test_fraction": np.float64(0.5)}
    given = {"net": torch.nn.Linear(3, 2), "clients": 2, "min_samples": 1, "rounds": 1, "partition": "iid"}
    found = resolve({"dataset": "npz", "dataset_options": options, "data_dir": tmp_path, **given})
    assert (len(found.data.train), found.settings.data_dir) == (10, str(tmp_path))
    assert len(fedcat.load_dataset("npz", **options).test) == 10


# the papers' and the authors' numbers as they were found, see docs/fidelity.md

COMMON = {
    "fraction": 0.1,
    "rounds": 1000,  # not printed
    "epochs": 5,
    "batch_size": 50,
    "lr": 0.01,
    "lr_schedule": "constant",
    "weight_decay": 0.0,
}
MOMENTUM = {"lab": 0.5, "paper": 0.9}
NET = {
    "lab": {"mnist": "lab-mnist", "cifar10": "lab-cifar", "cifar100": "lab-cifar", "femnist": "lab-femnist"},
    "paper": {
        "mnist": "mcmahan-mnist",
        "cifar10": "mcmahan-cifar",
        "cifar100": "mcmahan-cifar",
        "femnist": "mcmahan-mnist",
    },
}
DIVIDED = {"partition": "dirichlet", "clients": 100, "min_samples": 10}
DATA = {
    "mnist": {**DIVIDED, "dataset_options": {"mean": [0.1307], "std": [0.3081]}},
    "cifar10": {**DIVIDED, "dataset_options": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]}},
    "cifar100": {
        **DIVIDED,
        "dataset_options": {"labels": "coarse", "mean": [0.4914, 0.4822, 0.4465], "std": [0.2023, 0.1994, 0.2010]},
    },
    "femnist": {
        "partition": "natural",
        "dataset_options": {"writers": 180, "keep": 100, "mean": [0.5], "std": [-0.5]},
    },
}
CAT = {"epsilon": 0.5, "lambda": 1}  # not printed
MU = {"mnist": 0.1, "cifar10": 0.01, "cifar100": 0.001, "femnist": 0.1}
LARGE = {"hidden": 512, "noise": 100, "generator_batch": 128, "generator_lr_decay": 1.0, "decay": 1.0}
GENERATOR = {
    "mnist": {
        "hidden": 256,
        "noise": 32,
        "generator_batch": 32,
        "generator_lr": 3e-4,
        "generator_lr_decay": 0.98,
        "a": 10.0,
        "b": 10.0,
        "decay": 0.98,
    },
    "cifar10": {**LARGE, "generator_lr": 3e-4, "a": 0.2, "b": 0.2},
    "cifar100": {**LARGE, "generator_lr": 1e-4, "a": 10.0, "b": 1.0},
    "femnist": {**LARGE, "generator_lr": 3e-4, "a": 10.0, "b": 10.0},
}


@pytest.mark.parametrize(("name", "dataset"), ALL)
def test_every_number_of_every_preset(name, dataset):
    methods = {"fedcat": CAT, "fedcat-gc": CAT, "fedprox": {"mu": MU[dataset]}, "fedgen": GENERATOR[dataset]}
    assert preset(name, dataset) == {
        "preset": name,
        "dataset": dataset,
        **COMMON,
        "momentum": MOMENTUM[name],
        "net": NET[name][dataset],
        **DATA[dataset],
        "options": methods,
    }


def test_ten_percent_of_the_clients_are_ten_and_of_the_writers_eighteen():
    assert Settings.checked(preset("lab", "mnist")).k == 10
    assert Settings.checked({**preset("lab", "femnist"), "clients": 180}).k == 18
