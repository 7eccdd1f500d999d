"""Executes prepared runs side by side, writes their folders and collects their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from fedcat.core.errors import SettingError
from fedcat.core.interrupt import DeferredInterrupt
from fedcat.runs.build import ONE_AT_A_TIME, PreparedRun, pytorch_threads
from fedcat.runs.folder import RunFolder, model_tensors
from fedcat.runs.simulation import Record, Simulation, run_together
from fedcat.runs.summary import Result, summarize

OnRound = Callable[[int, Record], None]
"""Called with a run's position and each round that it completes."""


def execute(
    runs: Sequence[PreparedRun], folders: Sequence[Path | None], on_round: OnRound | None = None
) -> list[Result]:
    """Execute runs side by side; on an interrupt, write what there is and raise it again."""
    threads = runs[0].decisions.threads if runs else None
    with ONE_AT_A_TIME, pytorch_threads(threads):
        try:
            return _execute(runs, folders, on_round)
        finally:
            for engine in {run.simulation.engine for run in runs}:
                engine.release()


def _execute(runs: Sequence[PreparedRun], paths: Sequence[Path | None], on_round: OnRound | None) -> list[Result]:
    folders: list[RunFolder | None] = []
    try:
        for run, path in zip(runs, paths, strict=True):
            folders.append(None if path is None else RunFolder(path, run.settings.toml()))
    except BaseException:
        _discard(folders)
        raise

    def completed(position: int, record: Record) -> None:
        _write_rounds(runs[position], folders[position])
        if on_round is not None:
            on_round(position, record)

    simulations = [run.simulation for run in runs]
    stopped: BaseException | None = None
    try:
        with DeferredInterrupt() as interrupt:
            run_together(simulations, completed, interrupt.check)
    except BaseException as error:
        stopped = error
    if isinstance(stopped, SettingError) and not any(simulation.history for simulation in simulations):
        _discard(folders)
        raise stopped
    results = []
    for run, folder in zip(runs, folders, strict=True):
        try:
            results.append(_result(run, folder, stopped))
        except Exception as error:  # the other runs are written all the same
            stopped = stopped or error
    if stopped is not None:
        raise stopped
    return results


def _discard(folders: Sequence[RunFolder | None]) -> None:
    """Remove what was created for runs that did not start."""
    for folder in filter(None, reversed(folders)):
        folder.discard()


def _write_rounds(run: PreparedRun, folder: RunFolder | None) -> None:
    """Write the rounds that are complete and not yet in the run's folder; the ledger then keeps their totals only."""
    simulation = run.simulation
    for record in simulation.history[folder.rounds :] if folder is not None else simulation.history[-1:]:
        if folder is not None and not folder.add(record.as_dict(), simulation.ledger.ended(record.round)):
            return
        simulation.ledger.forget(record.round)


def _status(simulation: Simulation, stopped: BaseException | None) -> str:
    """Return how a run ended; one that was done before another stopped is finished."""
    if simulation.done:
        arrived = any(len(record.lost) < len(record.clients) for record in simulation.history)
        return "finished" if arrived else "untrained"
    return "interrupted" if isinstance(stopped, KeyboardInterrupt) else "failed"


def _result(run: PreparedRun, folder: RunFolder | None, stopped: BaseException | None) -> Result:
    """Collect what a run gave and complete its folder."""
    simulation, layout = run.simulation, run.simulation.task.layout
    status = _status(simulation, stopped)
    final = simulation.score() if status == "interrupted" else None
    summary = summarize(run, status, final)
    if status == "failed":
        summary["notes"].append(f"{type(stopped).__name__}: {stopped}")
    clients = simulation.client_accuracies() if run.settings.per_client and simulation.done else None
    rows = simulation.method.models() if simulation.wrong_row() is None else {}
    if folder is not None:
        models = {name: model_tensors(layout, row) for name, row in rows.items()}
        for write in (partial(_write_rounds, run, folder), partial(folder.finish, models, summary, clients)):
            write()
            note = f"the run is not completely written: {folder.trouble}"
            summary["notes"] += [note] if folder.trouble and note not in summary["notes"] else []
    if clients is not None:
        summary["clients"] = clients
    return Result(
        settings=run.settings,
        history=simulation.history,
        federation=run.federation,
        status=status,
        summary=summary,
        folder=None if folder is None else folder.path,
        unwritten="" if folder is None else folder.trouble,
        _layout=layout,
        _rows={name: row.cpu() for name, row in rows.items()},
    )
