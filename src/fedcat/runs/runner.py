"""Executes runs side by side, writes their folders and collects their results."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from copy import deepcopy
from pathlib import Path

from fedcat.core.errors import SettingError
from fedcat.core.interrupt import DeferredInterrupt
from fedcat.runs.build import ONE_AT_A_TIME, pytorch_threads
from fedcat.runs.callbacks import CallbackPart, make_callbacks
from fedcat.runs.checkpoint import Checkpoints
from fedcat.runs.collapse import CollapseWatch
from fedcat.runs.driver import Driver
from fedcat.runs.folder import RunFolder
from fedcat.runs.result import Result
from fedcat.runs.resume import Resumed, holding
from fedcat.runs.run import Run
from fedcat.runs.run_files import SUMMARY, model_path, models_in, read_clients, read_history, read_model, read_summary


def execute(
    runs: Sequence[Run],
    folders: Sequence[Path | Resumed] | None = None,
    callbacks: Sequence[CallbackPart] = (),
    hold: Path | None = None,
) -> list[Result]:
    """Execute runs side by side; on an interrupt, write what there is.

    Parameters
    ----------
    runs : sequence of Run
        The runs.
    folders : sequence, optional
        Where each is written: a directory that is free, or what a run is resumed from.
    callbacks : sequence of Callback
        Told of all runs; a class or function makes one for each run.
    hold : path, optional
        The directory to hold meanwhile, so that no other process writes there.
    """
    threads = runs[0].decisions.threads if runs else None
    with ONE_AT_A_TIME, pytorch_threads(threads):
        try:
            return _execute(runs, folders, callbacks, hold)
        finally:
            for run in runs:
                for callback in run.callbacks:
                    if isinstance(callback, RunFolder):
                        callback.sweep()
            for engine in {run.engine for run in runs}:
                engine.release()


def _execute(
    runs: Sequence[Run],
    places: Sequence[Path | Resumed] | None,
    callbacks: Sequence[CallbackPart],
    hold: Path | None,
) -> list[Result]:
    folders: list[RunFolder] = []
    with ExitStack() as held, ThreadPoolExecutor(1, "checkpoint") as writer, DeferredInterrupt() as interrupt:
        try:
            for run in runs:
                watch = CollapseWatch(run.settings.on_collapse, run.settings.evaluation_interval)
                run.callbacks += [watch, *make_callbacks(callbacks)]
            for run, place in zip(runs, places or [], strict=places is not None):
                folders.append(place.open() if isinstance(place, Resumed) else RunFolder(place, run.settings.toml()))
                _write_to(run, folders[-1], writer, len(runs))
            if hold is not None:
                held.enter_context(holding(hold))
            for place in places or []:
                if isinstance(place, Resumed):
                    place.restore()
        except BaseException:
            for folder in reversed(folders):
                folder.discard()
            raise
        Driver(runs).run(interrupt.check)
    if not folders:
        return [run.result() for run in runs]
    return [run.result(folder.path, folder.trouble) for run, folder in zip(runs, folders, strict=True)]


def _write_to(run: Run, folder: RunFolder, writer: ThreadPoolExecutor, runs: int) -> None:
    """Let a run write its directory and, unless that is not wanted, checkpoints."""
    run.callbacks.insert(0, folder)
    if run.settings.checkpoint_every != "never":
        run.callbacks.append(Checkpoints(folder, writer, run.settings.checkpoint_interval, runs))


def stored_result(place: Resumed) -> Result:
    """Return the result of a run that is complete, from its directory."""
    run, path = place.run, place.path
    layout, summary = run.task.layout, read_summary(path)
    if summary.monitor not in run.metrics or summary.metrics.get("global", {}).keys() != run.metrics.keys():
        raise SettingError(f"{str(path / SUMMARY)!r} is damaged: its metrics are not those of the settings")
    nets = {name: read_model(model_path(path, name), deepcopy(layout.net)) for name in models_in(path)}
    return Result(
        settings=run.settings,
        history=read_history(path),
        federation=run.federation,
        summary=summary,
        folder=path,
        unwritten="",
        error=None,
        clients=read_clients(path),
        _layout=layout,
        _rows={name: layout.pack(net).cpu() for name, net in nets.items()},
    )
