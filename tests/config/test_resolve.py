import numpy as np
import pytest
from torch import nn

import fedcat
from fedcat.config.layers import RENAMED, SettingsFile, as_layer, option_settings
from fedcat.config.resolve import resolve
from fedcat.core.errors import DataError, SettingError
from fedcat.core.options import Typed


def settings_of(given, file=None):
    return resolve(given, SettingsFile("a.toml", as_layer(file or {}))).settings


def test_layers_lie_over_each_other():
    """General defaults, the dataset's, the file's, what is given; a preset directly below the layer that names it."""
    data = fedcat.Dataset.from_arrays(np.zeros((40, 2)), np.arange(40) % 2, defaults={"clients": 4, "lr": 0.3})
    given = {"dataset": data, "net": nn.Linear(2, 2), "partition": "iid", "min_samples": 1}
    found = settings_of({**given, "rounds": 7}, {"rounds": 9, "momentum": 0.1})
    assert (found.epochs, found.clients, found.lr, found.momentum, found.rounds) == (5, 4, 0.3, 0.1, 7)
    assert settings_of(given, {"lr": 0.2}).lr == 0.2


def test_options_of_partitions_and_server_optimizers_are_settings_too():
    names = option_settings()
    assert {name: place[:2] for name, place in names.items()} == {
        "alpha": ("partition_options", "alpha"),
        "shards": ("partition_options", "shards"),
        "optimizer_beta1": ("optimizer_options", "beta1"),
        "optimizer_beta2": ("optimizer_options", "beta2"),
        "optimizer_eps": ("optimizer_options", "eps"),
        "server_lr": ("server_options", "lr"),
        "server_momentum": ("server_options", "momentum"),
        "server_beta2": ("server_options", "beta2"),
        "server_tau": ("server_options", "tau"),
        "aggregator_norm": ("aggregator_options", "norm"),
        "aggregator_iterations": ("aggregator_options", "iterations"),
        "aggregator_smoothing": ("aggregator_options", "smoothing"),
        "aggregator_liars": ("aggregator_options", "liars"),
        "aggregator_keep": ("aggregator_options", "keep"),
        "aggregator_trim": ("aggregator_options", "trim"),
    }
    given = {"alpha": 0.3, "server_optimizer": "momentum", "server_lr": 0.9}
    for way in (
        given,
        {"partition_options": {"alpha": 0.3}, "server_optimizer": "momentum", "server_options": {"lr": 0.9}},
    ):
        found = settings_of({"method": "fedavg", **way})
        assert (found.partition_options, found.server_options) == ({"alpha": 0.3}, {"lr": 0.9})


def test_options_are_completed_and_typed():
    found = settings_of({"partition": "shards", "method": "fedprox", "method_options": {"mu": Typed("2")}})
    assert found.partition_options == {"shards": 2}
    assert found.options == {"fedprox": {"mu": 2.0, "weighting": "samples"}}
    assert isinstance(found.options["fedprox"]["mu"], float)
    assert settings_of({"alpha": Typed("0.25"), "clients": Typed("20")}).partition_options == {"alpha": 0.25}


def test_options_that_the_partition_does_not_take():
    assert resolve({"partition": "iid", "alpha": 0.1}).notes == ("alpha has no effect with the partition 'iid'",)
    assert resolve({"shards": 3}).notes == ("shards has no effect with the partition 'dirichlet'",)
    found = resolve({"partition": "iid"}, SettingsFile("a.toml", as_layer({"alpha": 0.1})))
    assert (found.settings.partition_options, found.notes) == ({}, ())
    with pytest.raises(SettingError, match="unknown option of dirichlet 'alhpa': did you mean 'alpha'"):
        resolve({"partition_options": {"alhpa": 0.1}})


def test_options_of_ones_own_partition_are_settings_too():
    def by_size(labels, clients, rng, *, ratio: float = 3.0):
        return rng.integers(clients, size=len(labels))

    assert settings_of({"partition": by_size, "ratio": 2}).partition_options == {"ratio": 2.0}
    with pytest.raises(SettingError, match="unknown setting 'ratio'"):
        resolve({"ratio": 2})

    def seeded(labels, clients, rng, *, seed: int = 0):
        return rng.integers(clients, size=len(labels))

    with pytest.raises(SettingError, match="partition '<seeded>' must not have an option called 'seed'"):
        resolve({"partition": seeded})


def test_fraction_beside_per_round_is_refused():
    with pytest.raises(SettingError, match=r"per_round 3 and fraction 0.5 are both set: leave one out"):
        resolve({"fraction": 0.5, "per_round": 3})
    assert resolve({"per_round": 3}, SettingsFile("f", {"fraction": 0.5})).notes == ()


def test_objects_stand_in_the_settings_by_their_names():
    def halves(labels, clients, rng, *, share: float = 0.5):
        return (rng.random(len(labels)) < share) * (clients - 1)

    found = resolve({"partition": halves, "partition_options": {"share": 0.25}, "clients": 2, "method": fedcat.FedAvg})
    assert (found.settings.partition, found.settings.method) == ("<halves>", "fedcat.methods.fedavg:FedAvg")
    assert (found.parts["partition"], found.parts["method"]) == (halves, fedcat.FedAvg)
    assert found.settings.partition_options == {"share": 0.25}
    sizes = fedcat.run(partition=halves, clients=2, rounds=1, epochs=1, fraction=1.0, min_samples=9).federation.sizes
    assert len(sizes) == 2


@pytest.mark.parametrize("old", RENAMED)
def test_former_names_are_refused_with_the_new_ones(old, tmp_path):
    message = f"setting '{old}' is now called '{RENAMED[old]}'"
    with pytest.raises(SettingError, match=message):
        fedcat.run(**{old: 3})
    (tmp_path / "old.toml").write_text(f"{old} = 3\n")
    with pytest.raises(SettingError, match=rf"settings file '.*old.toml': {message}"):
        fedcat.run(settings=tmp_path / "old.toml")


def test_a_preset_lies_below_the_layer_that_names_it():
    file = {"dataset": "femnist", "momentum": 0.1, "per_round": 3, "options": {"fedcat": {"epsilon": 1.0}}}
    data = fedcat.load_dataset("digits")

    def load(factory, name, arguments):
        return fedcat.Dataset(
            "femnist", data.train, data.test, 10, {"clients": 5, "min_samples": 1, "partition": "iid"}
        )

    def found(given, stored):
        made = resolve({**given, "partition": "iid", "clients": 5}, SettingsFile("f", as_layer(stored)), load)
        return made.settings.momentum, made.settings.k, made.settings.options["fedcat"]["epsilon"], made.notes

    assert found({}, file)[:3] == (0.1, 3, 1.0)
    assert found({}, {**file, "preset": "lab"})[:3] == (0.1, 3, 1.0)
    assert found({"preset": "paper"}, file) == (
        0.9,
        1,
        0.5,
        ("preset 'paper' overrides these settings of f: momentum 0.1, options.fedcat.epsilon 1.0, per_round 3",),
    )
    assert found({"preset": "paper", "momentum": 0.2}, file)[0] == 0.2


def test_a_federation_cannot_be_divided_again():
    data = fedcat.load_dataset("digits")
    made = data.divide(10, "iid")
    for given in ({"alpha": 0.1}, {"partition": "iid"}, {"min_samples": 3}, {"data_seed": 1}):
        with pytest.raises(
            SettingError, match=f"{next(iter(given))} cannot be set: the federation 'digits' is already"
        ):
            resolve({"dataset": made, "net": "digits-cnn", **given})
    assert resolve({"dataset": made, "net": "digits-cnn"}).settings.partition == "given"


def test_names_that_nobody_knows():
    with pytest.raises(SettingError, match="unknown setting 'alhpa': did you mean 'alpha'"):
        resolve({"alhpa": 1})
    with pytest.raises(SettingError, match="unknown setting 'server_lt': did you mean 'server_lr'"):
        resolve({"server_lt": 1})
    with pytest.raises(SettingError, match="unknown option of fedcat 'mu'"):
        resolve({"method_options": {"mu": 1}})


def test_a_partition_is_given_only_by_a_federation():
    with pytest.raises(SettingError, match="partition 'given' needs a federation that is divided already"):
        resolve({"partition": "given"})


def test_a_file_for_another_dataset_keeps_its_preset_and_loses_its_options():
    file = SettingsFile("f", as_layer({"preset": "lab", "dataset": "mnist", "dataset_options": {"mean": [0.7]}}))
    seen = {}

    def load(factory, name, arguments):
        seen.update(arguments)
        return fedcat.load_dataset("digits")

    found = resolve({"dataset": "cifar100", "net": "digits-cnn", "min_samples": 1}, file, load).settings
    assert (found.preset, seen["labels"], seen["mean"]) == ("lab", "coarse", (0.4914, 0.4822, 0.4465))


def test_an_empty_preset_switches_a_files_preset_off():
    file = SettingsFile("f", as_layer({"preset": "paper", "dataset": "mnist"}))
    found = resolve({"preset": "", "dataset": "digits"}, file).settings
    assert (found.preset, found.net, found.momentum) == ("", "digits-cnn", 0.5)


def test_options_in_a_datasets_defaults_may_name_a_class_alone():
    class Mine(fedcat.FedAvg):
        def __init__(self, context, *, zeta: float = 1.0):
            super().__init__(context)

    defaults = {"options": {"Mine": {"zeta": 9.0}}, "partition": "iid", "min_samples": 1, "clients": 2}
    data = fedcat.Dataset.from_arrays(np.zeros((9, 2)), np.arange(9) % 2, defaults=defaults)
    found = resolve({"dataset": data, "method": Mine, "net": nn.Linear(2, 2)}).settings
    assert found.options["<Mine>"] == {"zeta": 9.0}


def test_options_of_a_partition_that_another_layer_replaces_are_dropped():
    def own(labels, clients, rng, *, gamma: float = 1.0):
        return rng.integers(clients, size=len(labels))

    file = SettingsFile("f", as_layer({"partition": own, "partition_options": {"gamma": 2.0}}))
    assert resolve({"min_samples": 1}, file).settings.partition_options == {"gamma": 2.0}
    assert resolve({"partition": "iid"}, file).settings.partition_options == {}
    with pytest.raises(SettingError, match="partition 'iid' has no options, got 'gamma'"):
        resolve({"partition": "iid", "partition_options": {"gamma": 2.0}}, file)
    with pytest.raises(SettingError, match="alpha must be > 0, got -1"):
        resolve({"partition": "iid", "alpha": -1})


def test_owners_of_samples_in_files():
    data = fedcat.Dataset.from_arrays(np.zeros((20, 2)), np.arange(20) % 2, owner=np.arange(20) % 5)
    given = {"dataset": data, "net": nn.Linear(2, 2)}
    assert settings_of(given).clients == 5
    with pytest.raises(SettingError, match="alpha has no effect on 'custom', whose clients are the owners"):
        settings_of(given, {"alpha": 0.1})
    file = {"partition": "natural", "dataset": "x", "clients": 5, "min_samples": 3}
    assert settings_of({**given, "partition": "iid"}, file).clients == 5


def test_annotations_that_only_a_type_checker_reads_hide_no_option():
    def odd(labels, clients, rng, *, a: "Nothing | None" = None, alpha: "np.Missing" = 0.5, gamma: float = 1.0):  # noqa: F821
        return rng.integers(clients, size=len(labels))

    found = settings_of({"partition": odd, "partition_options": {"gamma": 3}, "min_samples": 1})
    assert found.partition_options == {"alpha": 0.5, "gamma": 3.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"mu": 0.1},
            r"'mu' is not a setting but an option of the method fedprox: pass options=\{\"fedprox\": \{\"mu\":",
        ),
        ({"options": {"mu": 0.1}}, r"pass options=\{\"fedprox\": \{\"mu\": 0\.1\}\}"),
        ({"labels": "fine"}, r"option of the dataset cifar100: pass dataset_options=\{\"labels\": 'fine'\}"),
        (
            {"dataset": ([1.0], [2])},
            r"got an object of type tuple: make a dataset of arrays with .*from_arrays\(x, y, test",
        ),
    ],
)
def test_what_a_newcomer_writes_first_gets_a_hint(given, message):
    with pytest.raises(SettingError, match=message):
        resolve(given)


def custom(**more):
    """A small dataset, and settings with which it can be divided."""
    data = fedcat.Dataset.from_arrays(np.zeros((40, 2)), np.arange(40) % 2, **more)
    return {"dataset": data, "net": nn.Linear(2, 2), "partition": "iid", "min_samples": 1, "clients": 4}


@pytest.mark.parametrize(
    ("above", "lr"),
    [
        ([], 0.01),
        (["dataset"], 0.2),
        (["dataset", "file"], 0.3),
        (["dataset", "file", "given"], 0.4),
        (["file"], 0.3),
        (["given"], 0.4),
        (["dataset", "given"], 0.4),
        (["file", "given"], 0.4),
    ],
)
def test_the_uppermost_layer_that_sets_something_decides(above, lr):
    given = custom(defaults={"lr": 0.2} if "dataset" in above else {})
    given |= {"lr": 0.4} if "given" in above else {}
    assert settings_of(given, {"lr": 0.3} if "file" in above else {}).lr == lr


def test_a_dataset_is_loaded_with_the_partitions_seed_its_directory_and_its_options(tmp_path):
    seen = {}

    def load(factory, name, arguments):
        seen.update(arguments, name=name)
        return fedcat.load_dataset("digits")

    given = {"dataset": "femnist", "seed": 3, "partition": "iid", "clients": 5, "min_samples": 1}
    given |= {"dataset_options": {"writers": 7}, "data_dir": str(tmp_path)}
    found = resolve(given, load=load).settings
    assert seen == {"name": "femnist", "seed": 3, "data_dir": str(tmp_path), "writers": 7}
    assert found.dataset_options == {"writers": 7, "keep": 100, "mean": (0.5,), "std": (-0.5,)}
    assert found.data_dir == str(tmp_path)
    resolve({**given, "data_seed": 9}, load=load)
    assert seen["seed"] == 9


def test_a_relative_directory_of_data_becomes_absolute(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert settings_of({"data_dir": "here"}).data_dir == str(tmp_path / "here")
    assert settings_of({}).data_dir == ""
    with pytest.raises(DataError, match="data_dir must be an existing directory, got 'there'"):
        resolve({"data_dir": "there"})


def test_what_is_wrong_whatever_the_data_is_said_before_any_is_loaded():
    def load(factory, name, arguments):
        raise AssertionError("loaded too early")

    for given, message in (
        ({"lr": -1.0}, "lr must be > 0"),
        ({"method": "fedcat", "method_options": {"mu": 1}}, "unknown option of fedcat 'mu'"),
        ({"partition": "shards", "shards": 0}, "shards must be at least 1, got 0"),
        ({"alpha": 0.0}, "alpha must be > 0, got 0"),
        ({"net": "lab-cifra"}, "unknown net 'lab-cifra'"),
        ({"selector": "unifrom"}, "unknown selector 'unifrom'"),
        ({"device": "cudda"}, "device"),
        ({"clients": 5, "per_round": 6}, "per_round must be at least 1 and at most the 5 clients, got 6"),
    ):
        with pytest.raises(SettingError, match=message):
            resolve({"dataset": "mnist", **given}, load=load)


def test_the_number_of_clients_may_be_the_datasets_own():
    assert settings_of({"per_round": 50}).k == 50
    with pytest.raises(SettingError, match="per_round must be at least 1 and at most the 50 clients, got 51"):
        resolve({"per_round": 51})
    with pytest.raises(SettingError, match="per_round must be at least 1, got 0"):
        resolve({"per_round": 0})


def test_data_that_is_there_already_takes_no_options():
    given = custom()
    with pytest.raises(SettingError, match="dataset_options cannot be set: 'custom' is a dataset already"):
        resolve({**given, "dataset_options": {"a": 1}})
    with pytest.raises(SettingError, match="dataset must be a name, a Dataset, a Federation or a function"):
        resolve({"dataset": object()})


def test_a_federation_decides_how_many_clients_there_are_and_what_the_smallest_holds():
    made = fedcat.load_dataset("digits").divide(10, "shards")
    given = {"dataset": made, "net": "digits-cnn"}
    found = settings_of({**given, "clients": 10})
    assert (found.clients, found.partition, found.min_samples) == (10, "given", int(made.sizes.min()))
    assert settings_of({**given, "partition": "given", "min_samples": 7}).min_samples == 7
    with pytest.raises(SettingError, match="clients must be 10 as in the federation, got 9"):
        resolve({**given, "clients": 9})
    with pytest.raises(SettingError, match="alpha cannot be set: the federation 'digits' is already divided"):
        resolve({**given, "alpha": 0.5, "min_samples": 1})


def test_options_of_the_method_lie_over_its_table_and_other_tables_stay():
    file = {"options": {"fedprox": {"mu": 0.5}, "fedcat": {"epsilon": 0.1, "lambda": 2.0}}}
    found = settings_of({"method": "fedcat", "method_options": {"epsilon": 0.9}}, file).options
    assert found["fedprox"] == {"mu": 0.5}
    assert found["fedcat"] == {"grouping": True, "concatenation": True, "epsilon": 0.9, "lambda": 2.0, "retry": 0}
    assert settings_of({"method": "fedprox"}, file).options["fedprox"] == {"mu": 0.5, "weighting": "samples"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"fedcta": {}}}, "unknown method in options 'fedcta': did you mean 'fedcat'"),
        ({"options": 5}, "options must be a table of options, got 5"),
        ({"partition_options": 5}, "partition_options must be a table of options, got 5"),
        ({"method_options": 5}, "method_options must be a table of options, got 5"),
        ({"options": {3: {}}}, "options must have strings as keys, got 3"),
        ({"options": {"fedcat": 3}}, "options of method 'fedcat' must be a table, got 3"),
        ({"method": "fedavg", "server_options": {"tau": 1.0}}, "server_tau needs server_optimizer adam"),
        ({"method": "fedavg", "server_optimizer": "adam", "server_tau": 0}, "server_tau must be > 0, got 0"),
    ],
)
def test_tables_that_cannot_be_used(given, message):
    with pytest.raises(SettingError, match=message):
        resolve(given)


def test_a_pytorch_dataset_gets_a_hint():
    from torch import rand
    from torch.utils.data import TensorDataset

    with pytest.raises(SettingError, match=r"of a PyTorch dataset with fedcat\.Dataset\.from_torch\(dataset\)"):
        resolve({"dataset": TensorDataset(rand(4, 2))})


@pytest.mark.parametrize(
    ("given", "unused"),
    [
        ({"lr_decay": 0.1}, ["lr_decay"]),
        ({"lr_schedule": "cosine", "lr_every": 3, "lr_decay": 0.2}, ["lr_decay", "lr_every"]),
        ({"lr_schedule": "inverse", "lr_every": 3, "lr_decay": 0.2}, ["lr_every"]),
        ({"lr_schedule": "step", "lr_every": 3, "lr_decay": 0.2}, []),
    ],
)
def test_a_setting_of_another_schedule_is_noted(given, unused):
    name = given.get("lr_schedule", "constant")
    assert list(resolve(given).notes) == [f"{one} has no effect with lr_schedule {name!r}" for one in unused]


def test_an_array_is_no_dataset():
    from numpy import ones

    with pytest.raises(SettingError, match=r"dataset must be a name, a Dataset, .* got an object of type ndarray"):
        resolve({"dataset": ones((4, 2))})


def test_options_of_methods_of_ones_own_may_stand_beside_those_of_others():
    found = settings_of({"method": "fedavg", "options": {"mine:Method": {"a": 1}, "<local>": {"b": 2}}}).options
    assert found == {"mine:Method": {"a": 1}, "<local>": {"b": 2}, "fedavg": {"weighting": "samples"}}


def test_parts_are_found_by_name_and_what_is_not_named_is_none():
    found = resolve({"method": "fedavg", "selector": "multinomial"}).parts
    assert found["selector"] is fedcat.SELECTORS.get("multinomial")
    assert found["partition"] is fedcat.PARTITIONS.get("dirichlet")
    assert found["net"] is fedcat.NETS.get("digits-cnn")
    assert found["method"] is fedcat.FedAvg
    assert found["server_optimizer"] is None
    assert "dataset" not in found


def test_options_of_the_server_optimizer_are_read_by_its_types():
    found = settings_of({"method": "fedavg", "server_optimizer": "adam", "server_lr": Typed("1"), "server_beta2": 0.5})
    assert found.server_options == {"lr": 1.0, "beta2": 0.5}
    assert isinstance(found.server_options["lr"], float)
    assert settings_of({"method": "fedadam", "server_tau": Typed("0.5")}).server_options == {"tau": 0.5}


def test_fraction_in_an_upper_layer_displaces_per_round_in_a_lower_one():
    assert settings_of({"fraction": 0.5}, {"per_round": 3}).k == 25
    assert settings_of({"per_round": 3}, {"fraction": 0.5}).k == 3
    assert resolve({"fraction": 0.5}, SettingsFile("f", {"per_round": 3})).notes == ()


def test_a_preset_that_agrees_with_the_file_overrides_nothing():
    data = fedcat.load_dataset("digits")

    def load(factory, name, arguments):
        return fedcat.Dataset("mnist", data.train, data.test, 10, {})

    given = {"preset": "lab", "dataset": "mnist", "net": "digits-cnn", "min_samples": 1, "clients": 10}
    for stored, notes in (
        ({"momentum": 0.5, "rounds": 1000}, ()),
        ({"momentum": 0.9}, ("preset 'lab' overrides these settings of f: momentum 0.9",)),
        ({"momentum": 0.9, "preset": "paper"}, ("preset 'lab' overrides these settings of f: momentum 0.9",)),
        ({"clients": 7}, ()),
    ):
        found = resolve(given, SettingsFile("f", as_layer(stored)), load)
        assert (found.settings.momentum, found.settings.preset, found.notes) == (0.5, "lab", notes)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epochs", 3),
        ("batch_size", 7),
        ("lr", 0.5),
        ("momentum", 0.1),
        ("weight_decay", 0.01),
        ("clip", 2.0),
        ("average", 4.0),
    ],
)
def test_some_settings_may_stand_in_a_methods_table(name, value):
    found = resolve({"method": "scaffold", "options": {"scaffold": {name: value}, "fedavg": {name: value}}}).settings
    assert getattr(found, name) == value
    assert name not in found.options["scaffold"]
    other = resolve({"method": "fedprox", "options": {"scaffold": {name: value}}}).settings
    assert getattr(other, name) == getattr(resolve({}).settings, name)


def test_other_settings_may_not():
    with pytest.raises(SettingError, match="unknown option of scaffold 'rounds'"):
        resolve({"method": "scaffold", "options": {"scaffold": {"rounds": 3}}})


@pytest.mark.parametrize("name", ["how", "labels", "clients", "partition", "seed", "min_samples", "tries"])
def test_no_option_of_a_partition_is_called_like_a_parameter_of_partition(name):
    namespace = {}
    exec(f"def odd(labels_, clients_, rng, *, {name}=1): return None", namespace)
    with pytest.raises(SettingError, match=f"partition '<odd>' must not have an option called '{name}'"):
        resolve({"partition": namespace["odd"]})


def test_a_hint_at_a_setting_names_its_flag():
    with pytest.raises(SettingError, match=r"is a setting, not an option: use --weight-decay, in Python weight"):
        resolve({"method_options": {"weight_decay": 0.1}})


def test_an_object_of_no_known_kind_gets_no_hint():
    with pytest.raises(SettingError, match=r"got an object of type object$"):
        resolve({"dataset": object()})


def test_a_table_of_options_needs_names():
    with pytest.raises(SettingError, match="options must have strings as keys, got 3"):
        resolve({"options": {3: {}}})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "fedavg", "weighting": "equal"}, r"an option of the method fedavg: pass options=\{\"fedavg\":"),
        ({"method": "fedcat", "mu": 1}, r"an option of the method fedprox and not of fedcat: pass"),
        ({"options": {"clip": 10}}, r"clip is a setting, not an option: use --clip"),
        (
            {"method": "scaffold", "options": {"scaffold": {"clp": 1}}},
            r"unknown option of scaffold 'clp': did you mean 'clip'",
        ),
        ({"learning_rate": 0.1}, r"unknown setting 'learning_rate': it is called 'lr' here"),
        ({"K": 3}, r"it is called 'per_round' here"),
        ({"server_momentum": 0.5}, r"server_momentum needs server_optimizer adam or momentum"),
        ({"dataset": {"x": [1]}}, r"got a dictionary: make a dataset of arrays with fedcat\.Dataset\.from_arrays"),
        ({"dataset": np.zeros(3)}, r"type ndarray: make a dataset of arrays with fedcat\.Dataset\.from_arrays"),
    ],
)
def test_hints_name_what_was_meant(given, message):
    with pytest.raises(SettingError, match=message):
        resolve(given)


def test_options_of_another_method_are_noted():
    assert resolve({"method": "fedavg", "options": {"fedprox": {"mu": 1.0}}}).notes == (
        "options of fedprox have no effect on fedavg",
    )


def test_the_path_of_a_dataset_is_kept_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("mine.npz", x=np.zeros((40, 2), np.float32), y=np.arange(40) % 2)
    given = {"dataset": "npz", "dataset_options": {"path": "mine.npz"}, "net": "mlp", "clients": 4, "min_samples": 1}
    assert resolve({**given, "partition": "iid"}).settings.dataset_options["path"] == str(tmp_path / "mine.npz")
    with pytest.raises(DataError, match=r"min\.npz does not exist"):
        resolve({**given, "dataset_options": {"path": "min.npz"}})


def test_typed_options_of_other_methods_are_stored_in_their_types():
    options = {"fedprox": {"mu": Typed("0.5")}, "scaffold": {"variant": Typed("plain")}}
    found = resolve({"method": "fedavg", "options": options}).settings.options
    assert found["fedprox"] == {"mu": 0.5}
    assert type(found["fedprox"]["mu"]) is float
    assert found["scaffold"] == {"variant": "plain"}
