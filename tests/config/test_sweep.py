import pytest

from fedcat.config.layers import SettingsFile, as_layer
from fedcat.config.sweep import variants
from fedcat.core.errors import SettingError
from fedcat.core.options import Typed
from fedcat.methods.server_optimizer import ServerOptimizer


def labels(methods, sweep=None, file=None, **given):
    return [label for label, _ in variants(methods, sweep or {}, given, SettingsFile("f", as_layer(file or {})))[0]]


def test_every_method_with_every_choice_that_it_takes():
    assert labels(["fedavg", "fedcat"], {"alpha": [0.1, 1], "epsilon": [0.0, 1.0]}) == [
        "fedavg alpha=0.1",
        "fedavg alpha=1",
        *(f"fedcat alpha={alpha} epsilon={epsilon}" for alpha in (0.1, 1) for epsilon in (0.0, 1.0)),
    ]
    assert labels(["fedavg"], {"lr": [Typed("0.10"), Typed("1")]}) == ["fedavg lr=0.1", "fedavg lr=1"]


def test_options_go_to_the_methods_that_have_them():
    found, _, _ = variants(["fedavg", "fedprox"], {}, {"method_options": {"mu": 2.0}}, SettingsFile())
    assert [layer["method_options"] for _, layer in found] == [{}, {"mu": 2.0}]
    with pytest.raises(SettingError, match="unknown option of fedavg, fedcat 'mu'"):
        variants(["fedavg", "fedcat"], {}, {"method_options": {"mu": 2.0}}, SettingsFile())


def test_further_models_go_to_the_methods_that_offer_them():
    found, _, _ = variants(["fedavg", "fedcat"], {}, {"evaluate": ["mean"]}, SettingsFile())
    assert [layer["evaluate"] for _, layer in found] == [[], ["mean"]]
    with pytest.raises(SettingError, match="unknown evaluate 'men': did you mean 'mean'"):
        variants(["fedavg", "fedcat"], {}, {"evaluate": ["men"]}, SettingsFile())


def test_options_of_datasets_go_to_the_datasets_that_have_them():
    sweep = {"dataset": ["digits", "cifar100"], "labels": ["coarse", "fine"]}
    assert labels(["fedavg"], sweep) == [
        "fedavg dataset=digits",
        "fedavg dataset=cifar100 labels=coarse",
        "fedavg dataset=cifar100 labels=fine",
    ]


def test_options_of_parts_of_ones_own_can_be_swept():
    def by_size(labels, clients, rng, *, ratio: float = 3.0):
        return rng.integers(clients, size=len(labels))

    class Slow(ServerOptimizer):
        def __init__(self, pace: float = 1.0):
            self.pace = pace

        def step(self, row, mean):
            return mean

    found, _, _ = variants(
        ["fedavg", "cyclic"], {"ratio": [1.0, 2.0]}, {"partition": by_size, "server_optimizer": Slow}, SettingsFile()
    )
    assert [label for label, _ in found] == [f"{m} ratio={r}" for m in ("fedavg", "cyclic") for r in (1.0, 2.0)]
    assert [layer["partition_options"] for _, layer in found] == [{"ratio": 1.0}, {"ratio": 2.0}] * 2
    assert labels(["fedavg", "cyclic"], {"server_pace": [1.0, 2.0]}, server_optimizer=Slow) == [
        "fedavg server_pace=1.0",
        "fedavg server_pace=2.0",
        "cyclic",
    ]
    assert labels(["fedavg"], {"partition": ["iid", by_size], "ratio": [1.0, 2.0]}) == [
        "fedavg partition=iid",
        "fedavg partition=by_size ratio=1.0",
        "fedavg partition=by_size ratio=2.0",
    ]


def test_the_servers_settings_of_a_file_reach_the_methods_that_take_them():
    file = {"method": "fedavg", "server_optimizer": "momentum", "server_lr": 0.5, "rounds": 3}
    found, below, notes = variants(["fedcat", "cyclic"], {}, {}, SettingsFile("f", as_layer(file)))
    assert [layer.get("server_optimizer") for _, layer in found] == ["momentum", None]
    assert [layer["server_options"] for _, layer in found] == [{"lr": 0.5}, {}]
    assert below.layer == {"rounds": 3}
    assert notes == ["server_lr, server_optimizer not used by cyclic, see `fedcat methods`"]


@pytest.mark.parametrize(
    ("given", "sweep", "message"),
    [
        ({"lr": 0.1}, {"lr": [0.1]}, "lr must be set or swept, got both"),
        ({"alpha": 0.1}, {"alpha": [0.1]}, "alpha must be set or swept, got both"),
        ({"method_options": {"epsilon": 1}}, {"epsilon": [1]}, "epsilon must be set or swept, got both"),
        ({"per_round": 3}, {"fraction": [0.5]}, "per_round must not be set if fraction is swept"),
        ({}, {"options": [{}]}, "unknown sweep 'options'"),
        ({}, {"devices": [1]}, "setting 'devices' is now called 'clients'"),
        ({}, {"method": ["fedavg"]}, "method cannot be swept: list the methods"),
        ({}, {"epsilom": [1]}, "unknown sweep 'epsilom': did you mean 'epsilon'"),
    ],
)
def test_what_cannot_be_swept(given, sweep, message):
    with pytest.raises(SettingError, match=message):
        labels(["fedcat"], sweep, **given)


def test_a_runs_own_file_can_be_swept_over_server_settings():
    """A run's settings.toml holds an empty server_optimizer and no further models: that sets nothing."""
    file = {"method": "fedavg", "server_optimizer": "", "evaluate": [], "server_lr": 0.1}
    layers = variants(["fedavg"], {"server_optimizer": ["mean", "momentum"]}, {}, SettingsFile("f", as_layer(file)))[0]
    assert [layer.get("server_options", {}) for _, layer in layers] == [{}, {}]
    assert labels(["fedavg"], {"server_lr": [0.5, 1.0]}, file) == ["fedavg server_lr=0.5", "fedavg server_lr=1.0"]


def test_further_models_of_a_file_that_no_method_offers_are_dropped():
    file = SettingsFile("f", as_layer({"method": "fedcat", "evaluate": ["mean"]}))
    assert [layer["evaluate"] for _, layer in variants(["fedavg"], {}, {}, file)[0]] == [[]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dataset_options": 5}, "dataset_options must be a table of options, got 5"),
        ({"evaluate": "mean"}, "evaluate must be a list of strings, got 'mean'"),
    ],
)
def test_types_are_checked_first(given, message):
    with pytest.raises(SettingError, match=message):
        labels(["fedcat"], {"lr": [0.1]}, **given)
