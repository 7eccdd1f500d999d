"""What a run gave: its result, and the summary that ``run.json`` holds."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcat.config.settings import Settings
from fedcat.core.errors import unknown_name
from fedcat.data.federation import Federation
from fedcat.models.layout import Layout
from fedcat.protocol.reply_check import NOT_FINITE
from fedcat.runs.build import PreparedRun
from fedcat.runs.simulation import Record, Simulation
from fedcat.version import __version__


@dataclass(frozen=True, eq=False)
class Result:
    """What a run gave.

    Attributes
    ----------
    settings : Settings
        What was asked for, with every default filled in.
    history : list of Record
        One record per round.
    federation : Federation
        Who held what.
    status : str
        ``finished``, ``untrained`` (no hop ever arrived, the model is the initial one), ``interrupted`` or ``failed``.
    summary : dict
        What ``run.json`` holds.
    folder : Path or None
        Where the run was written.
    unwritten : str
        Why the folder is incomplete; empty if it is complete.
    """

    settings: Settings
    history: list[Record]
    federation: Federation
    status: str
    summary: dict[str, Any]
    folder: Path | None
    unwritten: str
    _layout: Layout
    _rows: Mapping[str, Tensor]

    def __repr__(self) -> str:
        settings, scores = self.settings, self.accuracies
        found = f"accuracy {scores[-1]:.2%}, best {max(scores):.2%}" if scores else "not evaluated"
        rounds = f"{len(self.history)} of {settings.rounds} rounds"
        return f"<Result: {settings.method} on {self.federation.name}, {self.status} after {rounds}, {found}>"

    @property
    def accuracies(self) -> list[float]:
        """The test accuracies of the evaluations, in order."""
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
        """Return the trained net, on the CPU, in evaluation mode; `which` may be ``average`` if one was kept."""
        if which not in self._rows:
            raise unknown_name("model", which, self._rows)
        net = deepcopy(self._layout.net)
        self._layout.write(self._rows[which], net)
        return net.cpu().eval()


def summarize(run: PreparedRun, status: str, final: float | None) -> dict[str, Any]:
    """Return the summary of a run; `final` is its last accuracy if it was taken outside the history."""
    simulation, history = run.simulation, run.simulation.history
    layout = simulation.task.layout
    scores = [record.accuracy for record in history if record.accuracy is not None]
    names = dict.fromkeys(name for record in history for name in record.others)
    others = {name: [record.others[name][0] for record in history if name in record.others] for name in names}
    device = layout.device
    return {
        "status": status,
        "rounds": len(history),
        "accuracy": {**_figures(scores), **({} if final is None else {"final": final})},
        "others": {name: _figures(found) for name, found in others.items()},
        "bytes": {"up": simulation.ledger.up, "down": simulation.ledger.down},
        "relative_traffic": _relative_traffic(simulation),
        "seconds": round(simulation.seconds, 3),
        "seconds_estimated": not simulation.alone,
        "decisions": run.decisions.as_dict(),
        "kernels": simulation.engine.kernels(simulation.task),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "net": {"parameters": layout.parameter_size, "buffers": layout.size - layout.parameter_size},
        "input_shape": list(run.federation.train.shape),
        "classes": run.federation.classes,
        "partition_hash": run.federation.hash,
        "versions": {
            "fedcat": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "notes": [*run.notes, *_notes(simulation, status)],
    }


def _figures(scores: Sequence[float]) -> dict[str, float | None]:
    """Return the last, the best and the mean of the last five accuracies."""
    if not scores:
        return dict.fromkeys(("final", "best", "last_five"))
    return {"final": scores[-1], "best": max(scores), "last_five": statistics.fmean(scores[-5:])}


def _relative_traffic(simulation: Simulation) -> float | None:
    """Return the traffic relative to one model down and one up per hop, which is FedAvg's."""
    layout = simulation.task.layout
    hops = sum(len(record.clients) for record in simulation.history)
    return simulation.ledger.total / (2 * hops * layout.size * layout.dtype.itemsize) if hops else None


def _notes(simulation: Simulation, status: str) -> list[str]:
    history, notes = simulation.history, []
    lost = [hop for record in history for hop in record.lost]
    hops = sum(len(record.clients) for record in history)
    if lost and status == "untrained":
        notes.append(f"no hop arrived: the model is the initial one; the first hop was {lost[0][1]}: {lost[0][2]}")
    elif lost:
        notes.append(f"the replies of {len(lost)} of {hops} hops are missing; the first was {lost[0][1]}: {lost[0][2]}")
    if any(NOT_FINITE in str(hop[2]) for hop in lost):
        notes[-1] += "; training diverges, try a smaller lr"
    if status != "failed" and not torch.isfinite(simulation.method.models()["global"]).all():
        notes.append("the global model contains numbers that are not finite")
    return notes
