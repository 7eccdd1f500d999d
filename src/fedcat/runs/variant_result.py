"""The results of a comparison: one method with one choice of settings, over all seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedcat.core.text import plural
from fedcat.runs.result import Result

FIGURES = ("best", "last_five", "final")

SPREAD = {"mean": "mean", "weighted_mean": "weighted", "worst_decile": "worst tenth", "std": "deviation"}
"""How a metric spreads over clients, and the headings in tables."""


@dataclass(frozen=True, eq=False)
class VariantResult:
    """The results of one method with one choice of swept settings, over all seeds."""

    label: str
    results: list[Result]

    def __repr__(self) -> str:
        mean, std = self.mean_std("last_five")
        spread = "" if std is None else f" ± {std:.4f}"
        seeds = plural(len(self.results), "seed")
        return f"<VariantResult: {self.label}, {seeds}, last five {self.monitor} {mean:.4f}{spread}>"

    @property
    def monitor(self) -> str:
        """The metric that the figures are of."""
        return self.results[0].summary.monitor

    def mean_std(self, figure: str, model: str = "global", metric: str = "") -> tuple[float, float | None]:
        """Return mean and standard deviation over seeds of ``best``, ``last_five``, ``final`` or ``chosen``.

        They are those of the global model, or of another one of `others`; of the monitored metric, or of another one.
        ``chosen`` is the test score at the best validation score. One seed has no deviation; a run that was never
        evaluated counts as NaN.
        """
        return mean_std(self._values(figure, model, metric))

    def differences(self, other: VariantResult, figure: str = "last_five") -> list[float]:
        """Return by how much a figure exceeds that of another variant, seed by seed."""
        return [a - b for a, b in zip(self._values(figure), other._values(figure), strict=True)]

    def _values(self, figure: str, model: str = "global", metric: str = "") -> list[float]:
        name = metric or self.monitor
        if figure == "chosen":
            chosen = [result.summary.chosen for result in self.results]
            found = [None if one is None else one.metrics.get(name) for one in chosen]
        else:
            found = [getattr(result.summary.figures(model, name), figure) for result in self.results]
        return [math.nan if value is None else value for value in found]

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures that there are: ``chosen`` only with validation data."""
        return (*FIGURES, "chosen") if all(result.summary.chosen for result in self.results) else FIGURES

    @property
    def others(self) -> list[str]:
        """The models that were evaluated besides the global one in every run."""
        found = [result.summary.others for result in self.results]
        return [name for name in found[0] if all(name in one for one in found)]

    def client_test(self) -> dict[str, float]:
        """Return how the monitored metric spreads over the clients' own test data, averaged over seeds; or nothing."""
        found = [result.summary.client_test.get(self.monitor) for result in self.results]
        spreads = [one for one in found if one is not None]
        if len(spreads) < len(found):
            return {}
        return {name: statistics.fmean(one[name] for one in spreads) for name in spreads[0]}

    @property
    def relative_traffic(self) -> float:
        """Mean traffic over seeds, relative to one model down and one up per hop, which is FedAvg's."""
        found = [result.summary.relative_traffic for result in self.results]
        known = [value for value in found if value is not None]
        return statistics.fmean(known) if known else math.nan

    @property
    def traffic(self) -> float:
        """Mean bytes of a run's training over seeds, in both directions."""
        return statistics.fmean(r.summary.bytes["up"] + r.summary.bytes["down"] for r in self.results)

    @property
    def seconds(self) -> float:
        """Mean seconds of a run over seeds."""
        return statistics.fmean(result.summary.seconds for result in self.results)

    @property
    def seconds_estimated(self) -> bool:
        """Whether the seconds are shares of launches, and so an estimate."""
        return any(result.summary.seconds_estimated for result in self.results)

    def as_dict(self, first: VariantResult) -> dict[str, Any]:
        """Return the figures as plain values, and their differences to those of the first variant, seed by seed."""
        runs = [
            {
                "seed": result.settings.seed,
                "folder": result.folder.name if result.folder else None,
                "status": result.status,
                **asdict(result.summary.figures()),
            }
            for result in self.results
        ]
        metrics = [name for name in self.results[0].summary.metrics["global"] if name != self.monitor]
        return {
            "label": self.label,
            "monitor": self.monitor,
            **self._figures("global"),
            "metrics": {name: self._figures("global", name) for name in metrics},
            "client_test": self.client_test(),
            "others": {name: self._figures(name) for name in self.others},
            "bytes": self.traffic,
            "relative_traffic": _number(self.relative_traffic),
            "seconds": self.seconds,
            "seconds_estimated": self.seconds_estimated,
            "differences": {
                "to": first.label,
                **{figure: [_number(value) for value in self.differences(first, figure)] for figure in FIGURES},
            },
            "runs": runs,
        }

    def _figures(self, model: str, metric: str = "") -> dict[str, dict[str, float | None]]:
        figures = self.figures if model == "global" else FIGURES
        found = {figure: self.mean_std(figure, model, metric) for figure in figures}
        return {figure: {"mean": _number(mean), "std": _number(std)} for figure, (mean, std) in found.items()}


def _number(value: float | None) -> float | None:
    """Return a number for JSON, which knows no NaN."""
    return None if value is None or not math.isfinite(value) else value


def mean_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of values; a single one has no deviation, and NaN gives NaN."""
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan if len(values) > 1 else None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
