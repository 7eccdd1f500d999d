"""Checkpoints: a run's state on the disk, from which it goes on after its process has ended in whatever way."""

from __future__ import annotations

import time
import tomllib
import warnings
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fedcat.core.errors import SettingError
from fedcat.core.files import flush
from fedcat.core.interrupt import Interrupt
from fedcat.runs.callbacks import Callback
from fedcat.runs.folder import RunFolder, check_written
from fedcat.runs.history import Record
from fedcat.runs.run import Run
from fedcat.runs.run_files import HISTORY, TRAFFIC
from fedcat.runs.state import Encoded, encode, load_state, write_encoded
from fedcat.runs.summary import versions

FOLDER = "checkpoint"
"""The directory of the checkpoints in a run's directory."""
LAST, PREVIOUS = "last.safetensors", "previous.safetensors"
SHARE = 0.02
"""The largest share of a run's time that checkpoints may take if their interval is a time."""


class Checkpoints(Callback):
    """Saves a run's state every so often, when a signal or a callback ends it, and before its last round is closed.

    The state is taken between two rounds and written by another thread. The last two checkpoints are kept. It must be
    the last of a run's callbacks, so that it finds the others in the state that they have after the round.

    Parameters
    ----------
    folder : RunFolder
        Where the run is written.
    writer : Executor
        The thread that writes.
    interval : tuple of float and int
        Seconds and rounds between checkpoints, see `Settings.checkpoint_interval`.
    runs : int
        How many runs share the time of checkpoints.
    """

    def __init__(self, folder: RunFolder, writer: Executor, interval: tuple[float, int], runs: int = 1) -> None:
        self.folder, self._writer, self._runs = folder, writer, runs
        self._seconds, self._rounds = interval
        self._pending: Future[float] | None = None
        self._since, self._cost = time.monotonic(), 0.0
        self._closed = self._off = False

    def on_start(self, run: Run) -> None:
        """Start the clock."""
        self._since = time.monotonic()

    def on_round(self, run: Run, record: Record) -> None:
        """Save the state if the interval has passed."""
        if self._rounds:
            due = record.round % self._rounds == 0
        else:
            due = time.monotonic() - self._since >= max(self._seconds, self._runs * self._cost / SHARE)
        if due and not run.done:
            self._save(run, wait=bool(self._rounds))

    def on_close(self, run: Run) -> None:
        """Save the state from which more rounds can follow."""
        self._save(run, wait=True)
        self._closed = True

    def on_end(self, run: Run) -> None:
        """Save the state of a run that a signal ended between two rounds, and wait until all is written."""
        if not self._closed and isinstance(run.error, Interrupt) and run.error.between:
            self._save(run, wait=True)
        self._settle()

    def _save(self, run: Run, wait: bool) -> None:
        """Take the state and let it be written; without `wait`, not if the last one is still being written."""
        if self._off or (not wait and self._pending is not None and not self._pending.done()):
            return
        self._settle()
        if self.folder.rounds < len(run.history):  # the directory cannot be written: the last good one is kept
            return
        begin = time.monotonic()
        content = {
            "settings": run.settings.toml(),
            "decisions": asdict(run.decisions),
            "versions": versions(),
            "state": run.state(),
        }
        try:
            encoded = encode(content)
        except TypeError as error:
            self._off = True
            warnings.warn(f"run {run.name!r} is not saved and cannot be resumed: {error}", stacklevel=2)
            return
        self._since = time.monotonic()
        self._pending = self._writer.submit(self._write, encoded, self._since - begin)

    def _write(self, encoded: Encoded, taken: float) -> float:
        """Write a state; return the seconds that it took to take and to write it."""
        begin, folder = time.monotonic(), self.folder.path
        for name in (HISTORY, TRAFFIC):
            flush(folder / name)
        path = folder / FOLDER
        path.mkdir(exist_ok=True)
        write_encoded(path / LAST, encoded, keep=path / PREVIOUS)
        return taken + time.monotonic() - begin

    def _settle(self) -> None:
        """Wait for the checkpoint that is being written; say so if it could not be."""
        pending, self._pending = self._pending, None
        try:
            if pending is not None:
                self._cost = pending.result()
        except OSError as error:
            kept = "the last good one is kept" if (self.folder.path / FOLDER / LAST).exists() else "there is none yet"
            why = error.strerror or error
            warnings.warn(f"a checkpoint of {str(self.folder.path)!r} is not written: {why}; {kept}", stacklevel=2)


@dataclass(frozen=True)
class Saved:
    """A checkpoint as it was read.

    Attributes
    ----------
    settings : mapping
        The run's settings.
    decisions : mapping
        What the builder had decided.
    versions : mapping
        Of fedcat, torch, numpy and python.
    state : mapping
        What `Run.restore` takes.
    """

    settings: Mapping[str, Any]
    decisions: Mapping[str, Any]
    versions: Mapping[str, str]
    state: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, device: torch.device | str | None = None) -> Saved:
        """Read a checkpoint; raise a `SettingError` if it is damaged."""
        found = load_state(path, device)
        try:
            content = {field.name: found[field.name] for field in fields(cls)}
            content["settings"] = tomllib.loads(content["settings"])
            if not all(isinstance(value, dict) for value in content.values()):
                raise TypeError("its parts must be tables")
            return cls(**content)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SettingError(f"{str(path)!r} is damaged, or not a checkpoint that fedcat wrote: {error}") from error


def newest(folder: Path, device: torch.device | str | None = None) -> tuple[Saved | None, list[str]]:
    """Return the newest checkpoint of a run that is sound and whose rounds are on the disk, and notes.

    It is None if the run has none. Raise a `SettingError` if there is one and none is sound.
    """
    trouble: list[str] = []
    for name in (LAST, PREVIOUS):
        path = folder / FOLDER / name
        if not path.exists():
            continue
        try:
            saved = Saved.read(path, device)
            for kind, state in saved.state["callbacks"]:
                if kind == RunFolder.__name__:
                    check_written(folder, state)
            return saved, [f"the last checkpoint was passed over: {why}" for why in trouble]
        except SettingError as error:
            trouble.append(str(error))
        except (KeyError, TypeError, ValueError) as error:
            trouble.append(f"{str(path)!r} does not hold the state of a run: {error!r}")
    if trouble:
        raise SettingError(f"run {str(folder)!r} cannot be resumed: {'; '.join(trouble)}")
    return None, []
