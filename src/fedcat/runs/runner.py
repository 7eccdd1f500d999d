"""Executes prepared runs side by side, writes their folders and collects their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedcat.core.errors import SettingError
from fedcat.core.interrupt import DeferredInterrupt
from fedcat.runs.build import ONE_AT_A_TIME, PreparedRun, pytorch_threads
from fedcat.runs.folder import RunFolder, model_tensors
from fedcat.runs.simulation import Record, run_together
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
    folders = [
        None if path is None else RunFolder(path, run.settings.toml()) for run, path in zip(runs, paths, strict=True)
    ]

    def completed(position: int, record: Record) -> None:
        _write_rounds(runs[position], folders[position])
        if on_round is not None:
            on_round(position, record)

    simulations = [run.simulation for run in runs]
    status, why = "failed", ""
    try:
        with DeferredInterrupt() as interrupt:
            run_together(simulations, completed, interrupt.check)
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    except Exception as error:
        unstarted = isinstance(error, SettingError) and not any(s.history for s in simulations)
        status, why = "refused" if unstarted else "failed", f"{type(error).__name__}: {error}"
        raise
    finally:
        if status == "refused":
            for folder in filter(None, reversed(folders)):
                folder.discard()
        else:
            results = [_result(run, folder, status, why) for run, folder in zip(runs, folders, strict=True)]
    return results


def _write_rounds(run: PreparedRun, folder: RunFolder | None) -> None:
    """Write the rounds that are complete and not yet in the run's folder."""
    if folder is not None:
        for record in run.simulation.history[folder.rounds :]:
            folder.add(record.as_dict(), run.simulation.ledger.ended(record.round))
            run.simulation.ledger.forget(record.round)


def _result(run: PreparedRun, folder: RunFolder | None, status: str, why: str) -> Result:
    """Collect what a run gave and close its folder; a run that was done before another one stopped is finished."""
    simulation, layout = run.simulation, run.simulation.task.layout
    status, why = ("finished", "") if simulation.done else (status, why)
    final = simulation.score() if status == "interrupted" else None
    summary = summarize(run, status, final)
    summary["notes"] += [why] if why else []
    clients = simulation.client_accuracies() if run.settings.per_client and status == "finished" else None
    rows = simulation.method.models() if simulation.wrong_row() is None else {}
    if folder is not None:
        _write_rounds(run, folder)
        folder.finish({name: model_tensors(layout, row) for name, row in rows.items()}, summary, clients)
    if clients is not None:
        summary["clients"] = clients
    return Result(
        settings=run.settings,
        history=simulation.history,
        federation=run.federation,
        status=status,
        summary=summary,
        folder=None if folder is None else folder.path,
        _layout=layout,
        _rows={name: row.cpu() for name, row in rows.items()},
    )
