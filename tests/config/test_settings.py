import math
import tomllib
from dataclasses import asdict, fields

import pytest

from fedcat.config.settings import Settings, value_type
from fedcat.config.toml import read_toml
from fedcat.core.errors import SettingError
from fedcat.core.options import Typed

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


@hypothesis.given(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.floats(0, exclude_min=True, allow_infinity=False, allow_nan=False),
    st.integers(0, 2**63 - 1),
    st.booleans(),
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
        st.dictionaries(st.text("ab-_ .\"'", min_size=1), st.one_of(st.booleans(), st.integers(), st.text('x\n"\\é'))),
        max_size=2,
    ),
)
@hypothesis.settings(max_examples=200, deadline=None)
def test_settings_come_back_from_their_toml(text, number, seed, flag, options):
    settings = Settings.checked(
        {"method": text, "lr": number, "seed": seed, "exact": flag, "options": options, "clip": None}
    )
    assert Settings.checked(tomllib.loads(settings.toml())) == settings


def test_clients_per_round():
    assert Settings.checked({"clients": 50}).k == 5
    assert Settings.checked({"fraction": 0.001}).k == 1
    assert Settings.checked({"per_round": 12}).k == 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 0.0}, "lr must be > 0, got 0"),
        ({"lr": float("nan")}, "lr must be > 0 and finite, got nan"),
        ({"lr": float("inf")}, "lr must be > 0 and finite, got inf"),
        ({"rounds": 0}, "rounds must be at least 1 and at most 1,000,000,000, got 0"),
        ({"rounds": 2.5}, "rounds must be an integer, got 2.5"),
        ({"rounds": True}, "rounds must be an integer, got True"),
        ({"fraction": 1.1}, "fraction must be > 0 and at most 1, got 1.1"),
        ({"per_round": 101}, "per_round must be at least 1 and at most the 100 clients, got 101"),
        ({"per_round": 0}, "per_round must be at least 1, got 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1"),
        ({"clip": 0.0}, "clip must be > 0, got 0"),
        ({"seed": -1}, "seed must be at least 0 and below 2\\*\\*63, got -1"),
        ({"data_seed": -1}, "data_seed must be at least 0"),
        ({"exact": "yes"}, "exact must be true or false, got 'yes'"),
        ({"method": 3}, "method must be a string, got 3"),
        ({"evaluate": "mean"}, "evaluate must be a list of strings, got 'mean'"),
        ({"engine": "staked"}, "unknown engine 'staked': did you mean 'stacked'"),
        ({"dtype": "float16"}, "unknown dtype 'float16'"),
        ({"lr_schedule": "x"}, "unknown lr_schedule 'x'"),
        ({"roundz": 1}, "unknown setting 'roundz': did you mean 'rounds'"),
        ({"threads": 0}, "threads must be at least 1 and at most 4,096, got 0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_value_and_what_is_right(given, message):
    with pytest.raises(SettingError, match=message):
        Settings.checked(given)


def test_the_defaults():
    assert asdict(Settings()) == {
        "preset": "",
        "method": "fedcat",
        "dataset": "digits",
        "data_dir": "",
        "net": "",
        "loss": "",
        "partition": "dirichlet",
        "min_samples": 10,
        "partition_tries": 1000,
        "clients": 100,
        "fraction": 0.1,
        "per_round": None,
        "rounds": 1000,
        "epochs": 5,
        "batch_size": 50,
        "optimizer": "sgd",
        "augment": [],
        "lr": 0.01,
        "sampling": "shuffle",
        "lr_schedule": "constant",
        "lr_decay": 0.5,
        "lr_every": 100,
        "momentum": 0.5,
        "weight_decay": 0.0,
        "clip": None,
        "dropout": 0.0,
        "straggler": "",
        "deadline": None,
        "step_seconds": 0.01,
        "bandwidth": 1.0,
        "corrupt": 0.0,
        "corrupt_kinds": [],
        "flip": 0.0,
        "bound": None,
        "guard": False,
        "ban_after": None,
        "on_collapse": "warn",
        "aggregator": "",
        "server_optimizer": "",
        "average": None,
        "selector": "",
        "seed": 0,
        "data_seed": None,
        "evaluate_every": None,
        "evaluate": [],
        "metrics": [],
        "monitor": "",
        "client_test": 0.0,
        "validation": 0.0,
        "per_client": False,
        "engine": "auto",
        "device": "auto",
        "dtype": "float32",
        "precision": "fp32",
        "memory": None,
        "exact": None,
        "threads": None,
        "workers": None,
        "checkpoint_every": "60s",
        "dataset_options": {},
        "partition_options": {},
        "optimizer_options": {},
        "aggregator_options": {},
        "server_options": {},
        "options": {},
    }
    assert Settings().evaluate is not Settings().evaluate


COUNTS = ("min_samples", "partition_tries", "clients", "rounds", "epochs", "batch_size", "lr_every", "evaluate_every")
CLOCK = ("deadline", "step_seconds", "bandwidth")
BOUNDS = [
    *((name, [1, 100], [0, -1]) for name in (*COUNTS, "per_round", "threads", "workers", "ban_after")),
    *((name, [1e-9, 5.0], [0.0, -1.0]) for name in ("lr", "clip", "bound", "memory", *CLOCK)),
    *((name, [0.0, 1.0], [-1e-9, 1.001]) for name in ("dropout", "corrupt", "flip")),
    *((name, [0.0, 5.0], [-1e-9]) for name in ("lr_decay", "weight_decay")),
    ("average", [0.0, 0.95, 4.0, 20.0], [-1e-9, 95.0]),
    *((name, [0.0, 0.999], [-1e-9, 1.0]) for name in ("momentum", "client_test", "validation")),
    ("fraction", [1e-9, 1.0], [0.0, 1.001]),
    *((name, [0, 2**63 - 1], [-1, 2**63]) for name in ("seed", "data_seed")),
]


@pytest.mark.parametrize(("name", "inside", "outside"), BOUNDS)
def test_bounds(name, inside, outside):
    for value in inside:
        assert getattr(Settings.checked({name: value}), name) == value
    for value in outside:
        with pytest.raises(SettingError, match=f"^{name} must be"):
            Settings.checked({name: value})


def test_every_number_has_bounds():
    numbers = {f.name for f in fields(Settings) if value_type(f.name) in (int, float)}
    assert numbers == {name for name, _, _ in BOUNDS}


@pytest.mark.parametrize("name", ["per_round", "clip", "bound", "average", "data_seed", "memory", "exact", "threads"])
def test_what_may_be_left_open(name):
    assert getattr(Settings.checked({name: None}), name) is None
    with pytest.raises(SettingError, match="rounds must be an integer, got None"):
        Settings.checked({"rounds": None})


@pytest.mark.parametrize(
    ("given", "k"),
    [
        ({"clients": 180}, 18),
        ({"clients": 24}, 2),
        ({"clients": 26}, 3),
        ({"clients": 3, "fraction": 1.0}, 3),
        ({"clients": 1}, 1),
        ({"clients": 100, "fraction": 0.5, "per_round": 1}, 1),
        ({"clients": 12, "per_round": 12}, 12),
    ],
)
def test_the_number_of_clients_per_round_is_rounded_and_at_least_one(given, k):
    assert Settings.checked(given).k == k


def test_the_partition_has_the_runs_seed_unless_it_has_its_own():
    assert Settings.checked({"seed": 4}).partition_seed == 4
    assert Settings.checked({"seed": 4, "data_seed": 0}).partition_seed == 0


def test_choices():
    for name, choices in {
        "dtype": ("float32", "float64"),
        "precision": ("fp32", "tf32", "bf16"),
        "engine": ("auto", "sequential", "stacked"),
        "lr_schedule": ("constant", "step", "inverse", "inverse-step", "cosine"),
    }.items():
        for choice in choices:
            assert getattr(Settings.checked({name: choice}), name) == choice
        with pytest.raises(SettingError, match=f"unknown {name} 'none of them'"):
            Settings.checked({name: "none of them"})


def test_what_does_not_go_together():
    Settings.checked({"dtype": "float64"})
    Settings.checked({"dtype": "float32", "precision": "bf16"})
    with pytest.raises(SettingError, match="precision must be fp32 if dtype is float64, got 'bf16'"):
        Settings.checked({"dtype": "float64", "precision": "bf16"})
    for table in ("dataset_options", "partition_options", "server_options", "options"):
        with pytest.raises(SettingError, match=f"{table} must have strings as keys, got 3"):
            Settings.checked({table: {3: {}}})
    with pytest.raises(SettingError, match="options of method 'fedcat' must be a table, got 5"):
        Settings.checked({"options": {"fedcat": 5}})


def test_text_that_no_file_can_hold_is_refused():
    with pytest.raises(SettingError, match="method must be a string"):
        Settings.checked({"method": "a\udcffb"})


def test_integers_pass_for_numbers():
    assert Settings.checked({"lr": 1}).lr == 1.0
    assert isinstance(Settings.checked({"lr": 1}).lr, float)


def test_typed_values_are_read_by_the_type_of_their_setting():
    typed = {"lr": "0.5", "method": "1", "evaluate": "mean, copies", "exact": "true", "per_round": "3"}
    made = Settings.checked({name: Typed(text) for name, text in typed.items()})
    assert (made.lr, made.method, made.evaluate, made.exact, made.per_round) == (0.5, "1", ["mean", "copies"], True, 3)
    with pytest.raises(SettingError, match="rounds must be an integer, got 'ten'"):
        Settings.checked({"rounds": Typed("ten")})
    assert (value_type("clip"), value_type("evaluate"), value_type("alpha")) == (float, list, None)


def test_every_setting_is_explained():
    assert all(f.metadata["help"] and f.metadata["panel"] for f in fields(Settings))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("alpha = = 3")
    with pytest.raises(SettingError, match="is not valid TOML"):
        read_toml(tmp_path / "bad.toml")
    with pytest.raises(SettingError, match="cannot be read"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    ("text", "interval"),
    [("60s", (60, 0)), ("1.5m", (90, 0)), ("2h", (7200, 0)), ("10r", (math.inf, 10)), ("never", (math.inf, 0))],
)
def test_how_often_checkpoints_are_written(text, interval):
    assert Settings.checked({"checkpoint_every": text}).checkpoint_interval == interval


@pytest.mark.parametrize("text", ["", "60", "0s", "-1s", "1.5r", "10 r", "often", "1e3s"])
def test_what_is_no_interval(text):
    with pytest.raises(SettingError, match=f"checkpoint_every must be a time such as 60s, .* got {text!r}"):
        Settings.checked({"checkpoint_every": text})


def test_slow_clients():
    assert Settings.checked({"straggler": "0.25,4"}).slow_clients == (0.25, 4.0)
    assert Settings().slow_clients == (0.0, 1.0)


@pytest.mark.parametrize("text", ["0.2", "0.2,5,1", "2,5", "-0.1,5", "0.2,0.5", "0.2,inf", "nan,2", "a,b", ","])
def test_what_is_no_share_of_slow_clients(text):
    with pytest.raises(SettingError, match="straggler must be a share from 0 to 1 and a factor of at least 1, such as"):
        Settings.checked({"straggler": text})


def test_kinds_of_corruption():
    assert Settings.checked({"corrupt_kinds": ["nan", "repeated"]}).corrupt_kinds == ["nan", "repeated"]
    with pytest.raises(SettingError, match="unknown corrupt_kinds 'man': did you mean 'nan'"):
        Settings.checked({"corrupt_kinds": ["man"]})
