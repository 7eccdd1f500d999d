"""The result of a run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedcat.config.settings import Settings
from fedcat.core.errors import unknown_name
from fedcat.data.federation import Federation
from fedcat.models.layout import Layout
from fedcat.runs.history import Record
from fedcat.runs.summary import RunSummary


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
    summary : RunSummary
        What ``run.json`` holds.
    folder : Path or None
        Where the run was written.
    unwritten : str
        Why the folder is incomplete; empty if it is complete.
    error : Exception or None
        What a callback raised, if that ended the run.
    clients : list of dict or None
        With `per_client`, the final model's metrics on each client's own data.
    """

    settings: Settings
    history: list[Record]
    federation: Federation
    summary: RunSummary
    folder: Path | None
    unwritten: str
    error: Exception | None
    clients: list[dict[str, Any]] | None
    _layout: Layout
    _rows: Mapping[str, Tensor]

    def __repr__(self) -> str:
        settings, summary = self.settings, self.summary
        final, best = self.final, self.best
        found = "not evaluated" if final is None else f"{summary.monitor} {_text(final)}, best {_text(best)}"
        rounds = f"{len(self.history)} of {settings.rounds} rounds"
        return f"<Result: {settings.method} on {self.federation.name}, {self.status} after {rounds}, {found}>"

    @property
    def status(self) -> str:
        """How the run ended, see `RunSummary`."""
        return self.summary.status

    def values(self, metric: str = "", model: str = "global") -> list[float]:
        """Return a metric on the test data at each evaluation, by default the one that is monitored."""
        name = metric or self.summary.monitor
        records = [record.metrics if model == "global" else record.others.get(model, {}) for record in self.history]
        return [found[name] for found in records if name in found]

    @property
    def accuracies(self) -> list[float]:
        """The test accuracies of the evaluations, in order."""
        return self.values("accuracy")

    @property
    def metrics(self) -> dict[str, float | None]:
        """The final model's metrics on the test data."""
        return {name: figures.final for name, figures in self.summary.metrics["global"].items()}

    @property
    def accuracy(self) -> float | None:
        """The final test accuracy; None if there are no classes."""
        return self.metrics.get("accuracy")

    @property
    def loss(self) -> float | None:
        """The final mean loss on the test data."""
        return self.metrics.get("loss")

    @property
    def final(self) -> float | None:
        """The last value of the monitored metric."""
        return self.summary.figures().final

    @property
    def best(self) -> float | None:
        """The best value of the monitored metric."""
        return self.summary.figures().best

    @property
    def last_five(self) -> float | None:
        """The mean of the last five values of the monitored metric."""
        return self.summary.figures().last_five

    def model(self, which: str = "global") -> nn.Module:
        """Return the trained net, on the CPU, in evaluation mode; `which` may be ``average`` if one was kept."""
        if which not in self._rows:
            raise unknown_name("model", which, self._rows)
        net = deepcopy(self._layout.net)
        self._layout.write(self._rows[which], net)
        return net.cpu().eval()


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
