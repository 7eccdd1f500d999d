"""Executes runs side by side, writes their folders and collects their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedcat.core.interrupt import DeferredInterrupt
from fedcat.runs.build import ONE_AT_A_TIME, pytorch_threads
from fedcat.runs.callbacks import CallbackPart, make_callbacks
from fedcat.runs.driver import Driver
from fedcat.runs.folder import RunFolder
from fedcat.runs.result import Result
from fedcat.runs.run import Run


def execute(
    runs: Sequence[Run], folders: Sequence[Path] | None = None, callbacks: Sequence[CallbackPart] = ()
) -> list[Result]:
    """Execute runs side by side, each with a folder of its own or none; on an interrupt, write what there is."""
    threads = runs[0].decisions.threads if runs else None
    with ONE_AT_A_TIME, pytorch_threads(threads):
        try:
            return _execute(runs, folders, callbacks)
        finally:
            for engine in {run.engine for run in runs}:
                engine.release()


def _execute(runs: Sequence[Run], paths: Sequence[Path] | None, callbacks: Sequence[CallbackPart]) -> list[Result]:
    folders: list[RunFolder] = []
    try:
        for run in runs:
            run.callbacks += make_callbacks(callbacks)
        for run, path in zip(runs, paths or [], strict=paths is not None):
            folders.append(RunFolder(path, run.settings.toml()))
            run.callbacks.insert(0, folders[-1])
    except BaseException:
        for folder in reversed(folders):
            folder.discard()
        raise
    with DeferredInterrupt() as interrupt:
        Driver(runs).run(interrupt.check)
    if not folders:
        return [run.result() for run in runs]
    return [run.result(folder.path, folder.trouble) for run, folder in zip(runs, folders, strict=True)]
