"""What can be said about the runs in a directory without building them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedcat.config.toml import read_toml
from fedcat.core.errors import SettingError
from fedcat.core.files import is_locked
from fedcat.models.metrics import METRICS
from fedcat.runs.run_files import COMPARISON, SETTINGS, SUMMARY, read_history, read_summary


@dataclass(frozen=True)
class Listed:
    """A run in a list.

    Attributes
    ----------
    path : Path
        Its directory.
    status : str
        How it ended, see `RunSummary`; ``running`` or ``killed`` if it has not; ``damaged`` if that cannot be read.
    rounds, planned : int
        The rounds that are complete, and those that were asked for.
    metric, last, best : str
        The metric that is monitored, its value at the last evaluation and its best one, as text.
    why : str
        What is damaged.
    """

    path: Path
    status: str
    rounds: int = 0
    planned: int = 0
    metric: str = ""
    last: str = ""
    best: str = ""
    why: str = ""


def find_runs(folder: Path) -> Iterator[Path]:
    """Yield the directories of runs: this one, those in it, and those in the comparisons in it, by name."""
    if (folder / SETTINGS).is_file():
        yield folder
        return
    for path in sorted(folder.iterdir()):
        if (path / SETTINGS).is_file() or (path / COMPARISON).is_file():
            yield from find_runs(path)


def listed(path: Path) -> Listed:
    """Return the line of one run; a run that cannot be read is `damaged`."""
    try:
        planned = int(read_toml(path / SETTINGS).get("rounds", 0))
        if (path / SUMMARY).exists():
            summary = read_summary(path)
            figures, name = summary.figures(), summary.monitor
            last, best = _text(name, figures.final), _text(name, figures.best)
            return Listed(path, str(summary.status), int(summary.rounds), planned, str(name), last, best)
        parent = path.resolve().parent
        held = is_locked(path) or ((parent / COMPARISON).exists() and is_locked(parent))
        history = read_history(path)
        seen = [record.accuracy for record in history if record.accuracy is not None]
        found = ("accuracy", _text("accuracy", seen[-1]), _text("accuracy", max(seen))) if seen else ()
        return Listed(path, "running" if held else "killed", len(history), planned, *found)
    except (SettingError, OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        return Listed(path, "damaged", why=str(error) or type(error).__name__)


def _text(metric: str, value: float | None) -> str:
    """Return a metric's value, in percent if it is usually shown so."""
    if value is None:
        return ""
    percent = metric in METRICS and METRICS.get(metric).percent
    return f"{100 * value:.2f} %" if percent else f"{value:.4g}"
