from __future__ import annotations

import sys

import pytest

from fedcat.cli import app as cli


@pytest.fixture
def fedcat_command(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in an empty folder and gives exit code, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedcat", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return call
