"""Resuming: builds a run again from its directory and lets it go on from its last good checkpoint."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedcat.config.layers import LISTS, OPTION_TABLES, REGISTRIES, SettingsFile, as_layer, flat
from fedcat.config.settings import Settings
from fedcat.config.toml import read_toml
from fedcat.core.device import find_device
from fedcat.core.errors import SettingError, unknown_name
from fedcat.core.files import locked
from fedcat.core.options import Typed, options
from fedcat.core.registry import name_of
from fedcat.runs.build import Builder
from fedcat.runs.checkpoint import FOLDER, LAST, Saved, newest
from fedcat.runs.folder import RunFolder
from fedcat.runs.run import Run
from fedcat.runs.run_files import COMPARISON, SETTINGS, SUMMARY, read_history, read_summary, readable
from fedcat.runs.state import check_like
from fedcat.runs.summary import versions

PARTS = (*REGISTRIES, *LISTS)
"""Settings that name parts: they may be named again, so that they can be imported or are objects."""
FREE = ("rounds", "checkpoint_every", "data_dir", "memory", "device", "threads", "workers")
"""Settings that may change when a run goes on."""
PINNED = ("device", "engine", "exact", "threads", "workers")
"""Settings that a run takes from its checkpoint if they were left open: the same bits need the same decisions."""
COMPLETE = ("finished", "untrained")
"""How a run ends that has nothing left to do."""


@dataclass(frozen=True, eq=False)
class Resumed:
    """A run that is built again.

    Attributes
    ----------
    run : Run
        The run, not yet restored.
    path : Path
        Its directory.
    settings : str
        Its settings as they are written from now on.
    saved : Saved or None
        The checkpoint that it goes on from; None if it begins again.
    complete : bool
        Whether there is nothing left to do.
    passed_over : bool
        Whether the last checkpoint was not sound, so that it goes on from the one before.
    """

    run: Run
    path: Path
    settings: str
    saved: Saved | None
    complete: bool
    passed_over: bool = False

    def open(self) -> RunFolder:
        """Return the run's directory, ready to be written on."""
        return RunFolder(self.path, self.settings, reopen=True)

    @property
    def begins(self) -> str:
        """Where the run goes on, as a line."""
        if self.saved is None:
            return "it had no checkpoint yet, and begins again"
        return f"goes on after round {self.saved.state.get('rounds')} of {self.run.rounds}"

    def restore(self) -> None:
        """Put the run, whose callbacks are complete, into the state that was saved."""
        if self.saved is None:
            self.run.late_notes.append("it had no checkpoint yet, and was begun again")
            return
        try:
            check_like({**self.saved.state, "callbacks": []}, {**self.run.state(), "callbacks": []})
            self.run.restore(self.saved.state, read_history(self.path, self.saved.state["rounds"]))
            self.run.check_row()
        except SettingError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
            raise SettingError(f"the checkpoint of {str(self.path)!r} does not fit its run: {error!r}") from error
        if self.passed_over:  # or it could fit again by chance when the files have grown
            with suppress(OSError):
                (self.path / FOLDER / LAST).unlink()
        self.run.late_notes.append(f"resumed after round {len(self.run.history)}")


def build_again(builder: Builder, path: Path, given: Mapping[str, Any], trust: bool = False) -> Resumed:
    """Build the run of a directory again.

    Parameters
    ----------
    builder : Builder
        What builds it; one for all runs of a comparison.
    path : Path
        The run's directory.
    given : mapping
        Those of `FREE` that change, and parts that the user names again.
    trust : bool
        Whether to import what the directory names as ``module:attribute``.
    """
    for name in given:
        if name not in (*FREE, *PARTS):
            if name in Settings.__dataclass_fields__:
                raise SettingError(f"{name} cannot change when a run is resumed: only {', '.join(FREE)} can")
            raise unknown_name("setting", name, (*FREE, *PARTS))
    stored = _stored(path)
    summary = read_summary(path) if (path / SUMMARY).exists() else None
    status = summary.status if summary else ""
    complete = summary is not None and status in COMPLETE and summary.rounds == _rounds(given, stored)
    saved, trouble = (None, []) if complete else newest(path, _device(given, stored))
    if saved is None and not complete:
        _check_begins_again(path, stored, status)
    notes = list(trouble)
    pinned = {} if saved is None else _pinned(stored, saved, given)
    file = SettingsFile.read(path / SETTINGS, trust, given)
    layer = {**file.layer, **as_layer({name: value for name, value in given.items() if name in PARTS})}
    changes = {name: value for name, value in given.items() if name not in PARTS}
    run = builder.build({**pinned, **changes}, SettingsFile(file.name, layer), _name(path, saved))
    left_open = {name: stored.get(name, getattr(Settings, name)) for name in pinned}
    run.settings = replace(run.settings, **left_open)
    _check_same(path, saved.settings if saved else stored, run.settings)
    if summary is not None and summary.partition_hash != run.federation.hash:
        both = f"its federation is {summary.partition_hash!r}, this one's {run.federation.hash!r}"
        raise SettingError(f"run {str(path)!r} cannot go on: {both}; the data, its partition or their seed differ")
    if saved is not None:
        _check_rounds(saved.settings, run.settings)
        if saved.decisions.get("device") == "cpu" and run.decisions.device != "cpu":
            raise SettingError(f"device must be cpu: the run began on a CPU, got {run.decisions.device!r}")
        notes += _warnings(saved, run)
        if saved.decisions.get("engine") == run.decisions.engine:
            run.decisions = replace(run.decisions, reason=str(saved.decisions.get("reason")))
    run.early_notes = (*run.early_notes, *notes)
    return Resumed(run, path, run.settings.toml(), saved, complete, bool(trouble))


def parts_of(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the settings that are given for a comparison holds for one run: of parts, those that it names.

    Parts that differ between the runs may be given as a list.
    """
    stored = _stored(path)
    found = dict(given)
    for name in given.keys() & REGISTRIES.keys():
        several, own = found.pop(name), stored.get(name, getattr(Settings, name))
        parts = several if isinstance(several, (list, tuple)) else [several]
        if own in map(name_of, parts):
            found[name] = next(part for part in parts if name_of(part) == own)
    return found


def _rounds(given: Mapping[str, Any], stored: Mapping[str, Any]) -> Any:
    """Return the number of rounds that is wanted."""
    rounds = given.get("rounds", stored.get("rounds"))
    return rounds.read(int) if isinstance(rounds, Typed) else rounds


def _device(given: Mapping[str, Any], stored: Mapping[str, Any]) -> str | None:
    """Return the device that is named, or None."""
    name = str(given.get("device", stored.get("device", "auto")))
    return None if name == "auto" else str(find_device(name))


def _check_begins_again(path: Path, stored: Mapping[str, Any], status: str) -> None:
    """Raise a `SettingError` unless a run without a checkpoint may begin again: it was killed before its first one."""
    if stored.get("checkpoint_every", "never") == "never":
        raise SettingError(f"run {str(path)!r} cannot be resumed: it was run without checkpoints")
    if status in ("stopped", *COMPLETE):
        raise SettingError(f"run {str(path)!r} cannot be resumed: it has ended ({status}) and left no checkpoint")


def _name(path: Path, saved: Saved | None) -> str:
    """Return the run's name; a run that is begun again has the one that it gets by itself."""
    place = path.resolve()
    if saved is None:
        return place.name if (place.parent / COMPARISON).exists() else ""
    return str(saved.state.get("run", place.name))


def _stored(path: Path) -> dict[str, Any]:
    """Return the settings of a run's directory."""
    file = path / SETTINGS
    if not file.is_file() or not file.stat().st_size:
        made = path.parent if (path.parent / COMPARISON).exists() else path
        raise SettingError(
            f"directory {str(path)!r} holds no run that could be resumed: {SETTINGS} is missing or empty; if it was "
            f"being made when its process was killed, remove {str(made)!r} and start again"
        )
    return read_toml(file)


def _pinned(stored: Mapping[str, Any], saved: Saved, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decisions that a run was made with, for settings that were left open."""
    found = {n: saved.decisions.get(n) for n in PINNED if n not in given and stored.get(n) in (None, "auto")}
    if "device" in found:
        try:
            find_device(str(found["device"]))
        except SettingError:  # a GPU that is not here
            del found["device"]
    return {name: value for name, value in found.items() if value is not None}


def _check_same(path: Path, before: Mapping[str, Any], settings: Settings) -> None:
    """Raise a `SettingError` with both values if a setting is not what it was."""
    defaults = tomllib.loads(Settings().toml())  # of settings that the version before did not know
    old, new = flat({**defaults, **before}), flat(tomllib.loads(settings.toml()))
    names = [name for name in old if name not in (*FREE, *PINNED) and old[name] != new.get(name)]
    added = [name for name in new if name not in old and name not in (*FREE, *PINNED)]
    names += [name for name in added if not _is_default(name, new[name], settings)]
    if names:
        both = "; ".join(f"{n} was {old.get(n, 'not set')!r} and is {new.get(n, 'not set')!r}" for n in names)
        raise SettingError(f"run {str(path)!r} cannot be resumed with other settings: {both}")


def _is_default(name: str, value: Any, settings: Settings) -> bool:
    """Return whether an option that a version before did not know has the value that it has by itself."""
    table, _, option = name.rpartition(".")
    kind, _, method = table.partition(".")
    setting = {table: setting for setting, table, _ in OPTION_TABLES}.get(table, "method")
    part = method if kind == "options" else getattr(settings, setting)
    return bool(table) and part in REGISTRIES[setting] and options(REGISTRIES[setting].get(part)).get(option) == value


def _check_rounds(before: Mapping[str, Any], settings: Settings) -> None:
    """Raise a `SettingError` if the number of rounds is not one that the run can go on to."""
    if settings.rounds < before["rounds"]:
        raise SettingError(f"rounds can be raised, not lowered: they were {before['rounds']}, got {settings.rounds}")
    if settings.rounds > before["rounds"] and settings.lr_schedule == "cosine":
        raised = f"from {before['rounds']} to {settings.rounds}"
        raise SettingError(f"rounds cannot be raised {raised}: the lr_schedule 'cosine' depends on their number")


def _warnings(saved: Saved, run: Run) -> list[str]:
    """Return notes about what has changed since the checkpoint and may change bits."""
    now = {**versions(), **{name: asdict(run.decisions)[name] for name in PINNED}}
    before = {**saved.versions, **saved.decisions}
    changed = [
        f"{name} was {before.get(name)}, now {value}" for name, value in now.items() if before.get(name) != value
    ]
    return [f"the numbers may differ from those of an uninterrupted run: {', '.join(changed)}"] if changed else []


@contextmanager
def holding(path: Path) -> Iterator[None]:
    """Hold the directory of a run or of a comparison; of a run in a comparison, that of the comparison."""
    if not path.is_dir():
        raise SettingError(f"directory {str(path)!r} does not exist")
    parent = path.resolve().parent
    with locked(parent if (parent / COMPARISON).exists() else path):
        yield


def read_plan(path: Path) -> list[tuple[str, list[tuple[int, Path]]]]:
    """Return the labels of a comparison's variants, each with its seeds and the directories of its runs."""
    with readable(path / COMPARISON):
        lines = json.loads((path / COMPARISON).read_text(encoding="utf-8"))
        found = [
            (str(line["label"]), [(int(r["seed"]), path / str(r["folder"])) for r in line["runs"]]) for line in lines
        ]
    if not found or any(not runs for _, runs in found) or len({tuple(s for s, _ in runs) for _, runs in found}) > 1:
        raise SettingError(f"{str(path / COMPARISON)!r} is damaged: it must list labels with the same seeds")
    if any(folder.parent != path or folder.name == ".." for _, runs in found for _, folder in runs):
        raise SettingError(f"{str(path / COMPARISON)!r} is damaged: it names a directory that is not its own")
    return found
