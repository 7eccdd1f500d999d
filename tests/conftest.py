"""Figures that tests measure are printed at the end of a run."""

from __future__ import annotations

import pytest

_KEY = "fedcat_figures"


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
        terminalreporter.section("sequential against stacked: norm of the difference over norm of the row")
        for text in sorted(figures):
            terminalreporter.write_line(text)
