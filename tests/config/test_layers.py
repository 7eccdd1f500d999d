import numpy as np
import pytest

from fedcat.config.layers import SettingsFile, as_layer, displaced, flat, merge_tables, option_settings, overlay
from fedcat.core.errors import SettingError
from fedcat.core.options import Typed
from fedcat.data.partitions import PARTITIONS


def test_tables_are_merged_entry_by_entry():
    below = {"lr": 0.1, "options": {"fedcat": {"epsilon": 1.0, "lambda": 2.0}, "fedprox": {"mu": 0.1}}}
    above = {"options": {"fedcat": {"epsilon": 0.0}, "mine": {}}, "dataset_options": {"labels": "fine"}}
    assert merge_tables(below, above) == {
        "lr": 0.1,
        "options": {"fedcat": {"epsilon": 0.0, "lambda": 2.0}, "fedprox": {"mu": 0.1}, "mine": {}},
        "dataset_options": {"labels": "fine"},
    }
    assert merge_tables({"options": {"a": 1}}, {"options": 5}) == {"options": 5}
    assert merge_tables({"options": 5}, {"options": {"a": 1}}) == {"options": {"a": 1}}


def test_the_result_shares_no_table_with_its_layers():
    below, above = {"options": {"a": {"b": 1}}}, {"options": {"c": {"d": 2}}}
    merged = merge_tables(below, above)
    merged["options"]["a"]["b"] = merged["options"]["c"]["d"] = 0
    assert (below, above) == ({"options": {"a": {"b": 1}}}, {"options": {"c": {"d": 2}}})


@pytest.mark.parametrize(
    ("below", "above", "gone"),
    [
        ({"per_round": 3}, {"fraction": 0.5}, {"per_round"}),
        ({"fraction": 0.5}, {"per_round": 3}, set()),
        ({"dataset": "mnist", "dataset_options": {"mean": [0.5]}}, {"dataset": "cifar10"}, {"dataset_options"}),
        ({"dataset": "mnist", "dataset_options": {"mean": [0.5]}}, {"dataset": "mnist"}, set()),
        ({"dataset_options": {"a": 1}}, {"dataset": "digits"}, set()),
        ({"dataset_options": {"a": 1}}, {"dataset": "mnist"}, {"dataset_options"}),
        (
            {"method": "fedavg", "server_optimizer": "adam", "server_options": {"lr": 1}},
            {"method": "fedcat"},
            {"server_optimizer", "server_options"},
        ),
        ({"server_optimizer": "adam", "server_options": {"lr": 1}}, {"method": "fedcat"}, set()),
        ({"method": "fedavg", "server_options": {"lr": 1}}, {"method": "fedavg", "server_lr": 2}, set()),
        ({"server_optimizer": "adam", "server_options": {"lr": 1}}, {"server_optimizer": "mean"}, {"server_options"}),
        (
            {"partition": "natural", "clients": 180, "min_samples": 3, "lr": 1.0},
            {"partition": "dirichlet"},
            {"partition", "clients", "min_samples"},
        ),
        ({"partition": "natural", "clients": 180}, {"partition": "natural"}, set()),
        ({"partition": "dirichlet", "clients": 180}, {"partition": "iid"}, set()),
        (
            {"dataset": "femnist", "partition": "natural", "clients": 180},
            {"dataset_options": {"writers": 9}},
            {"clients"},
        ),
        ({"partition": "natural", "clients": 9}, {"dataset_options": {"writers": 9}}, set()),
        ({"method": "fedcat", "evaluate": ["mean"], "lr": 0.1}, {"method": "fedavg"}, {"evaluate"}),
        ({"method": "fedcat", "evaluate": ["mean"]}, {"method": "fedcat"}, set()),
        ({"method": "fedcat", "evaluate": ["mean"]}, {"lr": 0.1}, set()),
        ({"method": None, "evaluate": ["mean"]}, {"method": "fedavg"}, set()),
        ({"server_optimizer": "adam", "server_options": {"lr": 1}}, {"server_optimizer": "adam"}, set()),
        ({"server_optimizer": "adam"}, {"server_options": {"lr": 1}}, set()),
        ({"per_round": 3, "fraction": 0.1}, {"fraction": 0.1}, {"per_round"}),
        ({"dataset": "mnist", "dataset_options": {"mean": [0.5]}}, {"dataset_options": {"std": [0.5]}}, set()),
        ({"dataset": "femnist", "partition": "natural", "clients": 180}, {"dataset_options": {}}, set()),
        ({"dataset": "femnist", "partition": "natural", "clients": 180}, {"partition": "iid"}, set()),
        ({"dataset": "femnist", "partition": "iid", "clients": 180}, {"dataset_options": {"writers": 9}}, set()),
        (
            {"dataset": "femnist", "partition": "natural", "clients": 180, "min_samples": 5, "lr": 1.0},
            {"dataset_options": {"writers": 9}},
            {"clients", "min_samples"},
        ),
    ],
)
def test_what_an_upper_layer_displaces(below, above, gone):
    assert displaced(below, above) == gone
    assert overlay(below, above) == merge_tables({n: v for n, v in below.items() if n not in gone}, above)


def test_entries_of_tables_by_name():
    assert flat({"lr": 1, "options": {"fedcat": {"epsilon": 0.5}}}) == {"lr": 1, "options.fedcat.epsilon": 0.5}
    assert flat({"a": {}, "b": {"c": {"d": {"e": 1}}, "f": None}}) == {"b.c.d.e": 1, "b.f": None}


def test_settings_become_a_layer():
    assert as_layer({"lr": 0.1, "method_options": {"mu": 1}}) == {"lr": 0.1, "method_options": {"mu": 1}}
    assert as_layer({"alpha": 0.3, "server_lr": 2.0, "shards": 4}) == {
        "partition_options": {"alpha": 0.3, "shards": 4},
        "server_options": {"lr": 2.0},
    }
    assert as_layer({"alpha": None, "clip": None}) == {"clip": None}
    assert as_layer({"alpha": 0.3, "partition_options": {"alpha": 0.1, "shards": 3}}) == {
        "partition_options": {"alpha": 0.3, "shards": 3}
    }
    assert as_layer({"lr": np.float64(0.5), "clients": np.int64(3)}) == {"lr": 0.5, "clients": 3}


def test_typed_settings_are_read_and_typed_options_wait_for_their_part():
    layer = as_layer({"lr": Typed("0.5"), "net": Typed("3"), "alpha": Typed("0.25")})
    assert (layer["lr"], layer["net"]) == (0.5, "3")
    assert isinstance(layer["partition_options"]["alpha"], Typed)


def test_a_table_displaces_in_its_own_layer_as_well():
    """An option beside the table of options is merged into it and takes nothing away."""
    layer = as_layer({"server_optimizer": "adam", "server_options": {"tau": 0.1}, "server_lr": 0.5})
    assert layer == {"server_optimizer": "adam", "server_options": {"tau": 0.1, "lr": 0.5}}


def own(labels, clients, rng, *, gamma: float = 1.0, lr: float = 3.0):
    return rng.integers(clients, size=len(labels))


def test_options_of_parts_that_are_named_are_known_and_settings_keep_their_names():
    assert "gamma" not in option_settings()
    for part in (own, "test_layers:own"):
        found = option_settings({"partition": part})
        assert found["gamma"] == ("partition_options", "gamma", float)
        assert "lr" not in found
    assert option_settings({"partition": "iid", "server_optimizer": None}) == option_settings()
    assert as_layer({"gamma": 2.0}, {"partition": own}) == {"partition_options": {"gamma": 2.0}}
    with pytest.raises(SettingError, match="unknown setting 'gamma'"):
        as_layer({"gamma": 2.0, "partition": own}, {})
    assert option_settings()["shards"] == ("partition_options", "shards", int)
    assert "own" not in PARTITIONS


def test_a_file_is_a_layer_with_a_name(tmp_path):
    assert SettingsFile.read(None) == SettingsFile("", {})
    path = tmp_path / "a.toml"
    path.write_text('alpha = 0.5\nmethod = "fedavg"\n')
    assert SettingsFile.read(path) == SettingsFile(str(path), {"method": "fedavg", "partition_options": {"alpha": 0.5}})
    path.write_text("alpah = 0.5\n")
    with pytest.raises(SettingError, match=r"settings file '.*a.toml': unknown setting 'alpah': did you mean 'alpha'"):
        SettingsFile.read(path)
