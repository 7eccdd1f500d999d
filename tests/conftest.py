"""Shared fixtures. Figures that tests measure are printed at the end; no test sees the user's own data or cache."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # kernels then run in Triton's interpreter; it wants to be told before it is imported
    os.environ["TRITON_INTERPRET"] = "1"

with contextlib.suppress(ImportError):
    import hypothesis

    hypothesis.settings.register_profile("fedcat", deadline=None)  # a busy machine is not a failure
    hypothesis.settings.load_profile("fedcat")


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # the tests were started in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

_KEY = "fedcat_figures"
_UNPACK = Path(__file__).parents[2] / "shared" / "data" / "unpack"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Give every test an empty cache folder, and return where fedcat keeps its files in it."""
    base = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("FEDCAT_DATA", raising=False)
    return base / "fedcat"


@pytest.fixture
def real_data(request, tmp_path_factory):
    """Return a function that gives a folder with the official files of a dataset, or skips the test."""

    def folder(name: str) -> Path:
        if not _UNPACK.exists():
            pytest.skip("the official files of the datasets are not on this machine")
        base = tmp_path_factory.getbasetemp()
        base = base.parent if hasattr(request.config, "workerinput") else base
        target = base / "official" / name
        if not target.exists():  # the first worker to get here unpacks for all
            mine = target.with_name(f"{name}.{os.getpid()}")
            mine.mkdir(parents=True)
            subprocess.run([sys.executable, _UNPACK, mine, name], check=True, capture_output=True)
            with contextlib.suppress(OSError):
                mine.rename(target)
        return target

    return folder


@pytest.fixture
def captured(monkeypatch):
    """Let the stacked engine train as on a GPU, only that nothing is captured where there is none."""
    monkeypatch.setattr("fedcat.engines.captured.CapturedLaunches.takes", lambda self, task: True)


@pytest.fixture
def record_figure(request):
    """Return a function that notes a figure and its limit for the summary."""

    def note(name: str, value: float, limit: float) -> None:
        request.node.user_properties.append((_KEY, f"{name}: {value:.1e} (at most {limit:.0e})"))

    return note


def pytest_terminal_summary(terminalreporter):
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    figures = [text for r in reports for key, text in r.user_properties if key == _KEY]
    if figures:
        terminalreporter.section("measured")
        for text in sorted(figures):
            terminalreporter.write_line(text)
