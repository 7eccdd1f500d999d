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


def layers(methods, sweep=None, file=None, **given):
    return [layer for _, layer in variants(methods, sweep or {}, given, SettingsFile("f", as_layer(file or {})))[0]]


def test_choices_are_combined_in_the_order_of_the_sweep_the_last_changing_first():
    assert labels(["fedavg"], {"lr": [0.1, 0.2], "epochs": [1, 2], "momentum": [0.0]}) == [
        f"fedavg lr={lr} epochs={epochs} momentum=0.0" for lr in (0.1, 0.2) for epochs in (1, 2)
    ]
    found = layers(["fedavg"], {"lr": [0.1, 0.2], "epochs": [1, 2]}, rounds=7)
    assert [(f["lr"], f["epochs"], f["rounds"], f["method"]) for f in found] == [
        (lr, epochs, 7, "fedavg") for lr in (0.1, 0.2) for epochs in (1, 2)
    ]


def test_swept_values_go_where_they_belong():
    sweep = {
        "alpha": [0.1],
        "epsilon": [1.0],
        "lr": [0.2],
        "server_lr": [0.5],
        "dataset": ["cifar100"],
        "labels": ["fine"],
    }
    (found,) = layers(["fedcat"], sweep, server_optimizer="momentum")
    assert found == {
        "method": "fedcat",
        "lr": 0.2,
        "dataset": "cifar100",
        "server_optimizer": "momentum",
        "partition_options": {"alpha": 0.1},
        "method_options": {"epsilon": 1.0},
        "server_options": {"lr": 0.5},
        "dataset_options": {"labels": "fine"},
    }


def test_swept_options_are_merged_with_those_that_are_given():
    found = layers(["fedcat"], {"epsilon": [0.0, 1.0]}, method_options={"lambda": 2.0})
    assert [f["method_options"] for f in found] == [{"lambda": 2.0, "epsilon": e} for e in (0.0, 1.0)]


def test_labels_show_values_as_they_are_written():
    class Mine:
        name = "mine"

    assert labels(["fedavg"], {"clip": [None, 1.0]}) == ["fedavg clip=None", "fedavg clip=1.0"]
    assert labels(["fedavg"], {"evaluate": [[]]}) == ["fedavg evaluate=none"]
    assert labels(["fedavg"], {"net": [Mine()]}) == ["fedavg net=mine"]

    class Own(ServerOptimizer):
        def step(self, row, mean):
            return mean

    assert labels(["fedavg"], {"server_optimizer": [Own, "adam"]}) == [
        "fedavg server_optimizer=Own",
        "fedavg server_optimizer=adam",
    ]


def test_methods_may_be_objects_and_are_called_by_their_names():
    def made(context, *, gamma: float = 1.0):
        return None

    found = variants(["fedavg", made], {"gamma": [1.0, 2.0]}, {}, SettingsFile())[0]
    assert [label for label, _ in found] == ["fedavg", "made gamma=1.0", "made gamma=2.0"]
    assert [layer["method"] for _, layer in found] == ["fedavg", made, made]
    assert [layer.get("method_options", {}) for _, layer in found] == [{}, {"gamma": 1.0}, {"gamma": 2.0}]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"lr": "0.1"}, "sweep of lr must be a list of values, got '0.1'"),
        ({"lr": 0.1}, "sweep of lr must be a list of values, got 0.1"),
        ({"lr": []}, "sweep of lr must list at least one value, got none"),
        ({"seed": [1]}, "unknown sweep 'seed'"),
        ({"threads": [1]}, "unknown sweep 'threads'"),
    ],
)
def test_sweeps_that_are_none(sweep, message):
    with pytest.raises(SettingError, match=message):
        labels(["fedcat"], sweep)


@pytest.mark.parametrize(
    ("given", "sweep", "name"),
    [
        ({"server_lr": 0.1}, {"server_lr": [0.5]}, "server_lr"),
        ({"dataset": "cifar100", "dataset_options": {"labels": "fine"}}, {"labels": ["coarse"]}, "labels"),
        ({"partition_options": {"alpha": 0.1}}, {"alpha": [0.5]}, "alpha"),
    ],
)
def test_options_are_set_or_swept(given, sweep, name):
    with pytest.raises(SettingError, match=f"{name} must be set or swept, got both"):
        labels(["fedavg"], sweep, **given)
    assert labels(["fedavg"], {"lr": [0.5]}, server_lr=0.1) == ["fedavg lr=0.5"]


def test_per_round_may_be_open_while_fraction_is_swept():
    assert len(labels(["fedavg"], {"fraction": [0.1, 0.5]}, per_round=None)) == 2
    assert labels(["fedavg"], {"per_round": [3]}, fraction=0.5) == ["fedavg per_round=3"]


def test_what_is_given_lies_over_what_the_file_gives_to_each_method():
    file = {"method": "fedavg", "server_optimizer": "momentum", "server_lr": 0.5, "method_options": {"epsilon": 0.1}}
    (found,) = layers(["fedcat"], {}, file, server_lr=0.25)
    assert (found["server_optimizer"], found["server_options"]) == ("momentum", {"lr": 0.25})
    assert found["method_options"] == {"epsilon": 0.1}
    (found,) = layers(["fedcat"], {}, file, server_optimizer="adam")
    assert (found["server_optimizer"], found.get("server_options", {})) == ("adam", {})
    (found,) = layers(["fedcat"], {}, file, method_options={"epsilon": 0.2})
    assert found["method_options"] == {"epsilon": 0.2}


def test_what_the_file_sets_for_a_method_is_no_mistake_if_no_method_takes_it():
    file = {"method": "fedcat", "method_options": {"epsilon": 0.1}, "server_lr": 0.1}
    (found,) = layers(["cyclic"], {}, file)
    assert (found["method_options"], found["server_options"]) == ({}, {})
    with pytest.raises(SettingError, match="unknown option of cyclic 'epsilon'"):
        layers(["cyclic"], method_options={"epsilon": 0.1})
    with pytest.raises(SettingError, match="server_lr has no effect on any of the methods cyclic"):
        layers(["cyclic"], server_lr=0.1)


def test_a_method_with_its_own_server_optimizer_takes_its_options_but_no_other():
    found = layers(["fedavgm", "fedadam", "fedavg"], server_momentum=0.5)
    assert [f["server_options"] for f in found] == [{"momentum": 0.5}, {"momentum": 0.5}, {}]
    found = layers(["fedavgm", "fedavg"], server_optimizer="momentum", server_momentum=0.5)
    assert [f.get("server_optimizer") for f in found] == [None, "momentum"]
    assert [f["server_options"] for f in found] == [{"momentum": 0.5}] * 2
    notes = variants(["fedavgm", "fedavg"], {}, {"server_optimizer": "momentum"}, SettingsFile())[2]
    assert notes == []
    notes = variants(["fedavgm", "fedavg"], {}, {"server_optimizer": "adam"}, SettingsFile())[2]
    assert notes == ["server_optimizer not used by fedavgm, see `fedcat methods`"]


def test_options_of_a_method_can_stand_beside_a_sweep_of_something_else():
    assert labels(["fedprox"], {"lr": [0.1, 0.2]}, options={"fedprox": {"mu": 0.3}}) == [
        "fedprox lr=0.1",
        "fedprox lr=0.2",
    ]
