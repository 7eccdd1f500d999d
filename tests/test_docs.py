"""The documentation's programs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedcat.config.layers import LISTS, REGISTRIES

ROOT = Path(__file__).parents[1]


@pytest.fixture
def registries(monkeypatch):
    """Give back what a program registers."""
    for registry in [*REGISTRIES.values(), *LISTS.values()]:
        for table in ("_parts", "_notes"):
            monkeypatch.setattr(registry, table, dict(getattr(registry, table)))


@pytest.mark.parametrize("page", ["docs/extend.md", "docs/scaffold.md", "README.md"])
def test_the_blocks_of_a_page_run_as_one_program(page, registries, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    exec(compile("\n".join(blocks), page, "exec", dont_inherit=True), {"__name__": "page"})


def test_the_front_page_shows_both_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "make demo" in text
    assert "make test" in text
