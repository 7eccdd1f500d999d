"""Carries prepared simulations out, side by side, and gathers what they gave."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcat.config.settings import Settings
from fedcat.core.errors import SettingError, unknown
from fedcat.core.interrupt import Brake
from fedcat.data.federation import Federation
from fedcat.runs.build import ONE_AT_A_TIME, Prepared, pinned
from fedcat.runs.folder import RunFolder, model_tensors
from fedcat.runs.simulation import Record, Simulation, run_together
from fedcat.version import __version__

Watch = Callable[[int, Record], None]
"""Called with a run's position and each round that it completes."""


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave.

    Attributes
    ----------
    settings : Settings
        With every default filled in.
    history : list of Record
        One a round.
    federation : Federation
        Who held what.
    status : str
        ``finished`` or ``interrupted``.
    summary : dict
        What ``run.json`` holds.
    folder : Path or None
        Where the run was written.
    """

    settings: Settings
    history: list[Record]
    federation: Federation
    status: str
    summary: dict[str, Any]
    folder: Path | None
    _prepared: Prepared

    @property
    def accuracies(self) -> list[float]:
        """The test accuracies of the evaluations, in their order."""
        return [record.accuracy for record in self.history if record.accuracy is not None]

    @property
    def accuracy(self) -> float:
        """The last test accuracy."""
        return self.accuracies[-1]

    @property
    def best(self) -> float:
        """The best test accuracy."""
        return max(self.accuracies)

    @property
    def last_five(self) -> float:
        """The mean of the last five test accuracies."""
        return statistics.fmean(self.accuracies[-5:])

    def model(self, which: str = "global") -> nn.Module:
        """Return the trained net, on the CPU, ready to evaluate; `which` may be ``average`` where one was kept."""
        simulation = self._prepared.simulation
        layout, rows = simulation.task.layout, simulation.method.models()
        if which not in rows:
            raise unknown("model", which, rows)
        net = deepcopy(layout.net)
        layout.write(rows[which], net)
        return net.cpu().eval()


def execute(prepared: Sequence[Prepared], folders: Sequence[Path | None], watch: Watch | None = None) -> list[Result]:
    """Run prepared simulations side by side; on an interrupt, write what there is and raise it again."""
    with ONE_AT_A_TIME:
        try:
            return _execute(prepared, folders, watch)
        finally:
            for engine in {ready.simulation.engine for ready in prepared}:
                engine.release()
            for ready in prepared[:1]:
                torch.set_num_threads(ready.threads_before)


def _execute(prepared: Sequence[Prepared], folders: Sequence[Path | None], watch: Watch | None) -> list[Result]:
    written = [
        None if path is None else RunFolder(path, pinned(ready.settings).toml())
        for ready, path in zip(prepared, folders, strict=True)
    ]

    def seen(position: int, record: Record) -> None:
        _write_up(prepared[position], written[position])
        if watch is not None:
            watch(position, record)

    simulations = [ready.simulation for ready in prepared]
    status, why = "failed", ""
    try:
        with Brake() as brake:
            run_together(simulations, seen, brake.check)
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
            for folder in filter(None, reversed(written)):
                folder.discard()
        else:
            pairs = zip(prepared, written, strict=True)
            results = [_result(ready, folder, status, why) for ready, folder in pairs]
    return results


def _write_up(ready: Prepared, folder: RunFolder | None) -> None:
    """Write the rounds that are complete and not yet in the run's folder."""
    if folder is not None:
        for record in ready.simulation.history[folder.rounds :]:
            folder.add(record.as_dict(), ready.simulation.ledger.ended(record.round))
            ready.simulation.ledger.forget(record.round)


def _result(ready: Prepared, folder: RunFolder | None, status: str, why: str) -> Result:
    """Gather what a run gave and close its folder; a run that was done before another one stopped is finished."""
    simulation = ready.simulation
    status, why = ("finished", "") if simulation.done else (status, why)
    final = simulation.score() if status == "interrupted" else None
    summary = _summary(ready, status, final)
    summary["notes"] += [why] if why else []
    devices = simulation.device_accuracies() if ready.settings.per_device and status == "finished" else None
    path = None
    if folder is not None:
        _write_up(ready, folder)
        whole = simulation.wrong_row() is None
        rows = simulation.method.models() if whole else {}
        folder.finish({n: model_tensors(simulation.task.layout, row) for n, row in rows.items()}, summary, devices)
        path = folder.path
    if devices is not None:
        summary["devices"] = devices
    return Result(pinned(ready.settings), simulation.history, ready.federation, status, summary, path, ready)


def _figures(scores: Sequence[float]) -> dict[str, float | None]:
    """Return the last, the best and the mean of the last five accuracies."""
    if not scores:
        return dict.fromkeys(("final", "best", "last_five"))
    return {"final": scores[-1], "best": max(scores), "last_five": statistics.fmean(scores[-5:])}


def _others(history: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in history for name in record.others))


def _relative_traffic(simulation: Simulation) -> float | None:
    """Return the bytes that passed over those of one model down and one up for every hop, which is FedAvg's traffic."""
    layout = simulation.task.layout
    hops = sum(len(record.devices) for record in simulation.history)
    return simulation.ledger.total / (2 * hops * layout.size * layout.dtype.itemsize) if hops else None


def _summary(ready: Prepared, status: str, final: float | None) -> dict[str, Any]:
    simulation, layout = ready.simulation, ready.simulation.task.layout
    history = simulation.history
    scores = [record.accuracy for record in history if record.accuracy is not None]
    others = {name: [r.others[name][0] for r in history if name in r.others] for name in _others(history)}
    lost = sum(len(record.lost) for record in history)
    notes = list(ready.notes)
    if lost:
        hops = sum(len(record.devices) for record in history)
        reason = next(record.lost[0] for record in history if record.lost)
        notes.append(f"{lost} of {hops} hops did not arrive; the first was {reason[1]}: {reason[2]}")
    if status != "failed" and not torch.isfinite(simulation.method.models()["global"]).all():
        notes.append("the global model holds numbers that are not finite")
    return {
        "status": status,
        "rounds": len(history),
        "accuracy": {**_figures(scores), **({} if final is None else {"final": final})},
        "others": {name: _figures(found) for name, found in others.items()},
        "bytes": {"up": simulation.ledger.up, "down": simulation.ledger.down},
        "relative_traffic": _relative_traffic(simulation),
        "seconds": round(simulation.seconds, 3),
        "engine": {
            "name": simulation.engine.name,
            "why": ready.engine_why,
            "exact": ready.settings.exact,
            "precision": ready.settings.precision,
            "kernels": simulation.engine.kernels(simulation.task),
        },
        "device": str(layout.device),
        "device_name": torch.cuda.get_device_name(layout.device)
        if layout.device.type == "cuda"
        else platform.machine(),
        "threads": torch.get_num_threads(),
        "net": {"parameters": layout.parameter_size, "buffers": layout.size - layout.parameter_size},
        "input_shape": list(ready.federation.train.shape),
        "classes": ready.federation.classes,
        "partition_hash": ready.federation.hash,
        "versions": {"fedcat": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "notes": notes,
    }
