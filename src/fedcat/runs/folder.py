"""The output directory of a run, and the callback that writes it."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.files import remove_temporary, replacing, save_tensors
from fedcat.core.text import json_text
from fedcat.models.layout import Layout
from fedcat.runs.callbacks import Callback
from fedcat.runs.history import Record
from fedcat.runs.run import Run
from fedcat.runs.run_files import CLIENTS, COLUMNS, COMPARISON, HISTORY, SETTINGS, SUMMARY, TRAFFIC, model_path
from fedcat.runs.summary import RunSummary


def check_free(path: Path) -> None:
    """Raise a `SettingError` unless `path` is free for a run: missing or an empty directory."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.is_file():
        raise SettingError(f"out directory {str(path)!r} is a file: choose another")
    if (path / SETTINGS).exists() or (path / COMPARISON).exists():
        raise SettingError(f"out directory {str(path)!r} already holds a run: choose another or remove it")
    if path.exists():
        raise SettingError(f"out directory {str(path)!r} is not empty: choose another")


def reserve(stem: str, parent: Path = Path("runs")) -> Path:
    """Make the first of PARENT/STEM-1, PARENT/STEM-2, ... that does not exist, and return it.

    Several processes may ask at once: a directory is made by one of them only.
    """
    stem = stem.replace(":", "-").replace("/", "-")
    path = parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            path = parent / f"{stem}-{number}"
            with suppress(FileExistsError):
                path.mkdir()
                break
    except OSError as error:
        raise SettingError(f"out directory {str(path)!r} cannot be written: {error.strerror}") from error
    return path


def claim(path: Path, name: str, text: str) -> list[Path]:
    """Make a directory if it is missing and write its first file; return the directories that were made.

    Only one process can claim a directory. Raises a `SettingError` if it is not free or cannot be written.
    """
    check_free(path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with (path / name).open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        raise SettingError(f"out directory {str(path)!r} already holds a run: choose another or remove it") from None
    except OSError as error:
        raise SettingError(f"out directory {str(path)!r} cannot be written: {error.strerror}") from error
    return made


def unclaim(made: Iterable[Path], *files: Path) -> None:
    """Remove the first files of a run that could not start, and the directories that were made and are empty."""
    for file in files:
        file.unlink(missing_ok=True)
    for folder in made:
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


class RunFolder(Callback):
    """The directory of one run, written during the run.

    A directory that can no longer be written, because it was removed or the disk is full, does not stop the run:
    a warning and `trouble` say why, and what is missing is written later if that becomes possible.

    Parameters
    ----------
    path : Path
        The directory; it must be missing or empty, unless it is reopened.
    settings : str
        The settings as TOML.
    reopen : bool
        Whether the directory is that of a run that goes on: its files are left as they are until the run starts.
    """

    keeps_history = True

    def __init__(self, path: Path, settings: str, reopen: bool = False) -> None:
        self.path, self.settings = path, settings
        self._bytes = (0, 0, 0)  # down, up and of evaluation, that are written
        self.trouble = ""
        self._written = (0, 0, 0)  # rounds, and the bytes that they take in the two files
        self._made = None if reopen else claim(path, SETTINGS, settings)
        if self._made is not None:
            self._cut_back()

    def on_start(self, run: Run) -> None:
        """In a directory that was reopened, drop what lies behind the rounds that the run goes on from."""
        if self._made is not None:
            return
        with self._noting_trouble():
            if (self.path / SETTINGS).read_text(encoding="utf-8") != self.settings:
                write_text(self.path / SETTINGS, self.settings)
            for name in (SUMMARY, CLIENTS):
                (self.path / name).unlink(missing_ok=True)
            remove_temporary(self.path)
        self._cut_back()

    def _cut_back(self) -> None:
        _, traffic, history = self._written
        with self._noting_trouble():
            self._put(TRAFFIC, traffic, "" if traffic else COLUMNS)
            self._put(HISTORY, history, "")

    @property
    def rounds(self) -> int:
        """The number of rounds written."""
        return self._written[0]

    def on_round(self, run: Run, record: Record) -> None:
        """Write the rounds that are complete and not yet written."""
        for one in run.history[self.rounds :]:
            if not self.add(one):
                return

    def on_end(self, run: Run) -> None:
        """Write what is missing, the models, the clients and, last, the summary."""
        if isinstance(run.error, SettingError) and not run.history and not run.error_in_callback:  # it could not start
            self.discard()
            return
        layout = run.task.layout
        models = {name: model_tensors(layout, row) for name, row in run.rows().items()}
        self.on_round(run, Record(0))
        self._add_last_bytes(run)
        self._note(run)
        self.finish(models, run.summary(), run.clients)
        self._note(run)

    def _add_last_bytes(self, run: Run) -> None:
        """Write what was sent after the last round: to evaluate on each client, or for hops that were under way."""
        totals = (run.ledger.down, run.ledger.up, run.ledger.evaluation)
        lines = self._other_bytes(len(run.history), totals, (0, 0, 0))
        if lines and self.rounds == len(run.history):
            with self._noting_trouble():
                rounds, traffic, history = self._written
                traffic = self._put(TRAFFIC, traffic, "".join([*([] if traffic else [COLUMNS]), *lines]))
                self._written, self._bytes = (rounds, traffic, history), totals

    def _note(self, run: Run) -> None:
        note = f"the run is not completely written: {self.trouble}"
        if self.trouble and note not in run.late_notes:
            run.late_notes.append(note)

    def state(self) -> dict[str, Any]:
        """Return how many rounds are written, and how many bytes of the two files they take."""
        return {"written": list(self._written), "bytes": list(self._bytes)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`: what lies behind in the files is dropped when the run starts."""
        check_written(self.path, state)
        rounds, traffic, history = state["written"]
        down, up, evaluation = state["bytes"]
        self._written, self._bytes = (rounds, traffic, history), (down, up, evaluation)

    def add(self, record: Record) -> bool:
        """Append one round to the traffic file, then to the history; return whether that was possible.

        If an interrupt cuts this short, the round counts as not written, and adding it again overwrites it. A round
        that stands in the history is complete in both files.
        """
        lines = [f"{record.round},{h.client},{h.copy},{h.attempt},{h.down},{h.up},0\n" for h in record.hops]
        by_hops = (sum(hop.down for hop in record.hops), sum(hop.up for hop in record.hops), 0)
        totals = (record.down, record.up, record.evaluation)
        lines += self._other_bytes(record.round, totals, by_hops)
        rounds, traffic, history = self._written
        with self._noting_trouble():
            traffic = self._put(TRAFFIC, traffic, "".join([*([] if traffic else [COLUMNS]), *lines]))
            history = self._put(HISTORY, history, json_text(record.as_dict()) + "\n")
            self._written, self._bytes = (rounds + 1, traffic, history), totals
            self.trouble = ""
            return True
        return False

    def _other_bytes(self, round: int, totals: tuple[int, int, int], by_hops: tuple[int, int, int]) -> list[str]:
        """Return a line with what was sent besides a round's hops: for evaluation, or late by hops of before."""
        other = [total - before - hops for total, before, hops in zip(totals, self._bytes, by_hops, strict=True)]
        return [f"{round},,,,{other[0]},{other[1]},{other[2]}\n"] if any(other) else []

    def _put(self, name: str, end: int, text: str) -> int:
        """Write a text at `end`, drop what lies behind it, and return the new end.

        The file is open only meanwhile: a comparison may have more runs than a process may have open files.
        """
        content = text.encode()
        binary = getattr(os, "O_BINARY", 0)  # Windows
        file = os.open(self.path / name, os.O_WRONLY | binary | (0 if end else os.O_CREAT), 0o666)
        try:
            os.ftruncate(file, end)
            os.lseek(file, end, os.SEEK_SET)
            while content:
                written = os.write(file, content)
                end, content = end + written, content[written:]
        finally:
            os.close(file)
        return end

    @contextmanager
    def _noting_trouble(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            before, self.trouble = self.trouble, f"{str(self.path)!r} cannot be written: {error.strerror or error}"
            if not before:
                warnings.warn(f"{self.trouble}; the run goes on, and writes what is missing if it can", stacklevel=4)

    def discard(self) -> None:
        """Remove the files and the directories created for a run that could not start; a reopened one stays."""
        if self._made is not None:
            unclaim(self._made, *(self.path / name for name in (SETTINGS, HISTORY, TRAFFIC)))

    def sweep(self) -> None:
        """Remove the directories that were made and are empty, once the lock of a run that could not start is gone."""
        unclaim(self._made or [])

    def finish(
        self,
        models: Mapping[str, dict[str, Tensor]],
        summary: RunSummary,
        clients: list[dict[str, Any]] | None = None,
    ) -> None:
        """Write the models (the global one and others by name), the clients and, last, the summary."""
        with self._noting_trouble():
            for name, tensors in models.items():
                save_tensors(model_path(self.path, name), tensors)
            if clients is not None:
                write_text(self.path / CLIENTS, json_text(clients, indent=1) + "\n")
            write_text(self.path / SUMMARY, json_text(summary.as_dict(), indent=2) + "\n")


def check_written(path: Path, state: Mapping[str, Any]) -> None:
    """Raise a `SettingError` if a run's files hold less than the state of its `RunFolder` says."""
    _, *ends = state["written"]
    for name, end in zip((TRAFFIC, HISTORY), ends, strict=True):
        if not (path / name).is_file() or (path / name).stat().st_size < end:
            raise SettingError(f"{str(path / name)!r} is missing or shorter than the state says")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: under a temporary name, then renamed."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def model_tensors(layout: Layout, row: Tensor) -> dict[str, Tensor]:
    """Return all tensors of a net to save: those in the row, and the constants outside it."""
    return {**layout.unpack(row), **layout.kept}
