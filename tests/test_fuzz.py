"""A small share of benchmarks/fuzz.py: bad settings, command lines and directories give one line, never a traceback."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")


@pytest.fixture(scope="module")
def fuzz():
    path = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"
    spec = importlib.util.spec_from_file_location("fuzz", path)
    module = sys.modules["fuzz"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fuzz"]


@pytest.fixture(scope="module")
def made(fuzz, tmp_path_factory):
    """Make the directories that are damaged once."""
    return fuzz.Fuzz(tmp_path_factory.mktemp("fuzz").resolve())


@pytest.fixture
def tried(made):
    """Return what tries inputs, with nothing found yet."""
    made.counts.clear()
    made.failures.clear()
    return made


def test_a_settings_file_gives_a_run_or_one_line(fuzz, tried):
    fuzz.explore(fuzz.settings_files(), tried.file, 40)
    assert not tried.failures, tried.report()
    assert tried.counts["file: valid"] >= 10
    assert tried.counts["file: error"] >= 10


def test_a_command_line_gives_a_result_or_one_line(fuzz, tried):
    fuzz.explore(fuzz.command_lines(), tried.line, 40)
    assert not tried.failures, tried.report()
    assert tried.counts["line: valid"] >= 5
    assert tried.counts["line: error"] >= 5


def test_a_damaged_directory_is_resumed_or_refused_in_one_line(fuzz, tried):
    fuzz.explore(fuzz.damaged_folders, tried.folder, 40)
    assert not tried.failures, tried.report()
    assert tried.counts["resume: valid"] >= 5
    assert tried.counts["resume: error"] >= 5
