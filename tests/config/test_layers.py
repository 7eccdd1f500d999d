import pytest

from fedcat.config.layers import displaced, flat, merge_tables, overlay


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
    ],
)
def test_what_an_upper_layer_displaces(below, above, gone):
    assert displaced(below, above) == gone
    assert overlay(below, above) == {**{n: v for n, v in below.items() if n not in gone}, **above}


def test_entries_of_tables_by_name():
    assert flat({"lr": 1, "options": {"fedcat": {"epsilon": 0.5}}}) == {"lr": 1, "options.fedcat.epsilon": 0.5}
