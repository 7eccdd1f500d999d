import tomllib
from dataclasses import fields

import pytest

from fedcat.config.settings import Settings, make, parse, read_toml
from fedcat.core.errors import SettingError

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
    settings = make({"method": text, "lr": number, "seed": seed, "exact": flag, "options": options, "clip": None})
    assert make(tomllib.loads(settings.toml())) == settings


def test_a_datasets_defaults_lie_between_the_general_ones_and_the_users():
    settings = make({"rounds": 7}, {"rounds": 100, "devices": 50})
    assert (settings.rounds, settings.devices, settings.epochs) == (7, 50, 5)
    assert settings.k == 5
    assert make({"fraction": 0.001}).k == 1
    assert make({"per_round": 12}).k == 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alpha": 0}, "alpha must be > 0, got 0"),
        ({"alpha": -0.5}, "alpha must be > 0, got -0.5"),
        ({"alpha": float("nan")}, "alpha must be > 0, got nan"),
        ({"alpha": float("inf")}, "alpha must be > 0 and finite, got inf"),
        ({"lr": 0.0}, "lr must be > 0, got 0"),
        ({"rounds": 0}, "rounds must be at least 1, got 0"),
        ({"rounds": 2.5}, "rounds must be a whole number, got 2.5"),
        ({"rounds": True}, "rounds must be a whole number, got True"),
        ({"fraction": 1.1}, "fraction must be > 0 and at most 1, got 1.1"),
        ({"per_round": 101}, "per_round must be at least 1 and at most the 100 devices, got 101"),
        ({"per_round": 0}, "per_round must be at least 1"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, got 1"),
        ({"clip": 0.0}, "clip must be > 0, got 0"),
        ({"seed": -1}, "seed must be at least 0 and below 2\\*\\*63, got -1"),
        ({"data_seed": -1}, "data_seed must be at least 0"),
        ({"exact": "yes"}, "exact must be true or false, got 'yes'"),
        ({"method": 3}, "method must be a text, got 3"),
        ({"evaluate": "mean"}, "evaluate must be a list of texts, got 'mean'"),
        ({"evaluate": ["men"]}, "unknown evaluate 'men': did you mean 'mean'"),
        ({"engine": "staked"}, "unknown engine 'staked': did you mean 'stacked'"),
        ({"dtype": "float16"}, "unknown dtype 'float16'"),
        ({"lr_schedule": "x"}, "unknown lr_schedule 'x'"),
        ({"roundz": 1}, "unknown setting 'roundz': did you mean 'rounds'"),
        ({"threads": 0}, "threads must be at least 1, got 0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0, got -1"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_value_and_what_is_right(given, message):
    with pytest.raises(SettingError, match=message):
        make(given)


def test_whole_numbers_pass_for_numbers():
    assert make({"alpha": 1}).alpha == 1.0
    assert isinstance(make({"alpha": 1}).alpha, float)


def test_texts_are_read_by_the_setting_they_are_for():
    assert parse("alpha", "0.5") == 0.5
    assert parse("method", "1") == "1"
    assert parse("rounds", "ten") == "ten"
    assert parse("concatenation", "true") is True


def test_every_setting_is_explained():
    assert all(f.metadata["help"] for f in fields(Settings))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(SettingError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("alpha = = 3")
    with pytest.raises(SettingError, match="is not TOML"):
        read_toml(tmp_path / "bad.toml")
    with pytest.raises(SettingError, match="cannot be read"):
        read_toml(tmp_path)
