import sys

import pytest

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry, import_path


@pytest.fixture
def registry():
    made = Registry("thing")
    made.add("alpha", 1, "the first")
    made.add("beta", 2)
    return made


def test_names_are_found_and_listed_in_order(registry):
    assert registry.get("beta") == 2
    assert list(registry) == [("alpha", "the first"), ("beta", "")]
    assert "alpha" in registry


def test_an_unknown_name_brings_the_nearest(registry):
    with pytest.raises(SettingError, match=r"unknown thing 'alpa': did you mean 'alpha'\? available: alpha, beta"):
        registry.get("alpa")


def test_a_name_like_no_other_brings_the_list_alone(registry):
    with pytest.raises(SettingError, match="unknown thing 'xyz': available: alpha, beta"):
        registry.get("xyz")


def test_a_name_is_taken_once(registry):
    with pytest.raises(SettingError, match="'alpha' is already registered"):
        registry.register("alpha")(3)


def test_a_users_part_is_imported_from_the_current_folder(registry, tmp_path, monkeypatch):
    (tmp_path / "their_parts.py").write_text("class Box:\n    inner = 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert registry.get("their_parts:Box.inner") == 5


@pytest.mark.parametrize("name", ["no_such_module:part", "math:no_such_part", ":part", ".:part"])
def test_a_part_that_cannot_be_imported_is_named(registry, name):
    with pytest.raises(SettingError, match=f"thing '{name}' cannot be imported"):
        registry.get(name)


def test_only_what_can_be_imported_has_a_name():
    def local():
        pass

    assert import_path(Registry) == "fedcat.core.registry:Registry"
    assert import_path(local) is None
    assert import_path(lambda: 0) is None
    assert import_path(3) is None
