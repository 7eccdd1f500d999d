"""The files of a run's directory: their names, and how they are read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedcat.core.errors import SettingError
from fedcat.runs.history import Record
from fedcat.runs.summary import RunSummary

SETTINGS = "settings.toml"
HISTORY = "history.jsonl"
TRAFFIC = "traffic.csv"
MODEL = "model.safetensors"
SUMMARY = "run.json"
CLIENTS = "clients.json"
COMPARISON = "comparison.json"
COLUMNS = "round,client,copy,attempt,down,up,evaluation\n"
"""The first line of the traffic file."""


def model_path(folder: Path, name: str = "global") -> Path:
    """Return the path of a model in a run's directory."""
    return folder / (MODEL if name == "global" else f"{name}.safetensors")


def models_in(folder: Path) -> list[str]:
    """Return the names of the models in a run's directory."""
    return ["global" if path.name == MODEL else path.stem for path in sorted(folder.glob("*.safetensors"))]


def read_model(path: Path, net: nn.Module) -> nn.Module:
    """Load a file's weights into `net` and return it in evaluation mode."""
    if not path.exists():
        folder = str(path.parent)
        raise SettingError(f"directory {folder!r} holds no {path.name}: its run failed, see {SUMMARY}")
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise SettingError(f"{str(path)!r} is damaged: {error}") from error
    try:
        missing, unexpected = net.load_state_dict(stored, strict=False)
    except RuntimeError as error:
        raise SettingError(f"net does not match {path.name}: {' '.join(str(error).split())}") from error
    tied = {t.data_ptr() for n, t in net.state_dict().items() if n in stored}
    lost = [n for n in missing if net.state_dict()[n].data_ptr() not in tied]
    if lost or unexpected:
        raise SettingError(
            f"net does not match {path.name}: missing {lost or 'nothing'}, unexpected {unexpected or 'nothing'}"
        )
    return net.eval()


def read_summary(folder: Path) -> RunSummary:
    """Read a run's summary."""
    path = folder / SUMMARY
    if not path.exists():
        raise SettingError(f"directory {str(folder)!r} holds no finished run: {SUMMARY} is missing")
    with readable(path):
        return RunSummary.from_dict(json.loads(path.read_text(encoding="utf-8")))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong with the content of a file into a `SettingError` that names the file."""
    try:
        yield
    except SettingError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise SettingError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}") from error


def read_clients(folder: Path) -> list[dict[str, Any]] | None:
    """Read the final model's metrics on each client, if there are any."""
    path = folder / CLIENTS
    with readable(path):
        found: list[dict[str, Any]] | None = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return found


def read_history(folder: Path, rounds: int | None = None) -> list[Record]:
    """Read a run's history, or its first `rounds`; a last line that a killed process cut short is left out."""
    with readable(folder / HISTORY), (folder / HISTORY).open(encoding="utf-8") as file:
        lines = itertools.islice(file, rounds)
        return [Record.from_dict(json.loads(line)) for line in lines if line.endswith("\n")]
