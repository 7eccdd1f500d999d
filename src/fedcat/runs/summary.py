"""What a run gave, in figures: what ``run.json`` holds."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedcat.core.errors import SettingError
from fedcat.models.metrics import Metric
from fedcat.runs.evaluations import score
from fedcat.runs.history import Record
from fedcat.version import __version__

if TYPE_CHECKING:
    from fedcat.runs.run import Run

VERSION = 2
"""The version of run.json and of the history; 1 had no hops and no metrics besides accuracy and loss."""


@dataclass(frozen=True)
class Figures:
    """What is reported about one metric of one model over a run.

    Attributes
    ----------
    final : float or None
        The last value.
    best : float or None
        The best value.
    last_five : float or None
        The mean of the last five values.
    """

    final: float | None = None
    best: float | None = None
    last_five: float | None = None

    @classmethod
    def of(cls, values: Sequence[float], metric: Metric) -> Figures:
        """Return the figures of a metric's values, in order; those that are not finite count for nothing."""
        finite = [value for value in values if math.isfinite(value)]
        if not finite:
            return cls()
        return cls(finite[-1], metric.best(finite), statistics.fmean(finite[-5:]))


@dataclass(frozen=True)
class Choice:
    """The evaluation with the best validation score.

    Attributes
    ----------
    round : int
        When it took place.
    validation : float
        The monitored metric on the clients' validation data, weighted by samples.
    metrics : mapping of str to float
        The global model's metrics on the test data at that time.
    """

    round: int
    validation: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Decisions:
    """What the builder decided, as opposed to what the user asked for.

    Attributes
    ----------
    device : str
        Where the run trains.
    engine, reason : str
        How, and why so.
    exact : bool
        Whether no bit depends on what else runs in the comparison.
    workers, threads : int
        Training processes, and PyTorch's threads.
    """

    device: str
    engine: str
    reason: str
    exact: bool
    workers: int
    threads: int


@dataclass(frozen=True)
class RunSummary:
    """What a run gave.

    Attributes
    ----------
    name : str
        The run's name.
    status : str
        ``finished``, ``untrained`` (no hop ever arrived, the model is the initial one), ``stopped`` by a callback,
        ``interrupted`` or ``failed``.
    rounds : int
        The rounds completed.
    monitor : str
        The metric that models are compared by.
    metrics : mapping
        `Figures` on the test data by model, ``global`` first, and metric.
    chosen : Choice or None
        The evaluation with the best validation score, if there is validation data.
    validation, client_test : mapping
        How metrics on the clients' own held-out data spread over clients at the last evaluation, by metric.
    bytes : mapping
        Training traffic ``up`` and ``down``, and the traffic of ``evaluation`` on clients.
    relative_traffic : float or None
        Training traffic relative to one model down and one up per hop, which is FedAvg's.
    seconds, seconds_estimated : float, bool
        Seconds, and whether they are an estimate because other runs shared launches.
    decisions : Decisions
        What the builder decided.
    kernels, device_name : str
        What computed the steps, and on what.
    net : mapping
        The number of parameters and of buffers.
    input_shape, classes, outputs : list of int, int, int
        The shape of one input, the number of classes (0 if targets are values) and of outputs.
    partition_hash : str
        The SHA-256 of the data and of its partition.
    versions : mapping
        Of fedcat, torch, numpy and python.
    notes : list of str
        Lines that the user should read.
    version : int
        Of this format.
    """

    name: str
    status: str
    rounds: int
    monitor: str
    metrics: dict[str, dict[str, Figures]]
    chosen: Choice | None
    validation: dict[str, dict[str, float]]
    client_test: dict[str, dict[str, float]]
    bytes: dict[str, int]
    relative_traffic: float | None
    seconds: float
    seconds_estimated: bool
    decisions: Decisions
    kernels: str
    device_name: str
    net: dict[str, int]
    input_shape: list[int]
    classes: int
    outputs: int
    partition_hash: str
    versions: dict[str, str]
    notes: list[str]
    version: int = VERSION

    def figures(self, model: str = "global", metric: str = "") -> Figures:
        """Return the figures of a model's metric, by default of the one that is monitored."""
        return self.metrics.get(model, {}).get(metric or self.monitor, Figures())

    @property
    def others(self) -> list[str]:
        """The models that were evaluated besides the global one."""
        return [name for name in self.metrics if name != "global"]

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, as ``run.json`` holds them."""
        return {"version": self.version, **asdict(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> RunSummary:
        """Return the summary that `as_dict` wrote; raise a `SettingError` if it is of another version."""
        if plain.get("version", 1) != VERSION:
            raise SettingError(
                f"the run was written in format {plain.get('version', 1)}, and this version of fedcat reads {VERSION}"
            )
        given = {field.name: plain[field.name] for field in fields(cls)}
        for name, kind in (("name", str), ("status", str), ("monitor", str), ("rounds", int), ("outputs", int)):
            if type(given[name]) is not kind:
                raise TypeError(f"{name} must be {kind.__name__}, got {given[name]!r}")
        sent = [given["bytes"][name] for name in ("up", "down", "evaluation")]
        if not all(map(_is_number, (given["seconds"], *sent))):
            raise TypeError("seconds and bytes must be finite numbers")
        if not all(type(size) is int for size in given["input_shape"]):
            raise TypeError(f"input_shape must be a list of integers, got {given['input_shape']!r}")
        given["metrics"] = {
            model: {name: Figures(**figures) for name, figures in found.items()}
            for model, found in plain["metrics"].items()
        }
        figures = [
            value for found in given["metrics"].values() for one in found.values() for value in vars(one).values()
        ]
        if not all(value is None or _is_number(value) for value in figures):
            raise TypeError("metrics must be numbers")
        given["decisions"] = Decisions(**plain["decisions"])
        given["chosen"] = None if plain["chosen"] is None else Choice(**plain["chosen"])
        return cls(**given)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def summarize(run: Run) -> RunSummary:
    """Return what a run has given so far."""
    layout, federation, history, ledger = run.task.layout, run.federation, run.history, run.ledger
    figures = figures_of(history, run.metrics)
    if run.status in ("stopped", "interrupted") and run.rows() and not (history and history[-1].evaluated):
        for name, value in score(run).items():
            figures["global"][name] = replace(figures["global"][name], final=value)
    last = next((record for record in reversed(history) if record.evaluated), Record(0))
    hops, moved = sum(len(record.hops) for record in history), sum(ledger.until(len(history)))
    cuda = layout.device.type == "cuda"
    return RunSummary(
        name=run.name,
        status=run.status,
        rounds=len(history),
        monitor=run.monitor.name,
        metrics=figures,
        chosen=choose(history, run.monitor),
        validation=last.validation,
        client_test=last.client_test,
        bytes={"up": ledger.up, "down": ledger.down, "evaluation": ledger.evaluation},
        relative_traffic=moved / (2 * hops * layout.size * layout.dtype.itemsize) if hops else None,
        seconds=round(run.seconds, 3),
        seconds_estimated=not run.alone,
        decisions=run.decisions,
        kernels=run.engine.kernels(run.task),
        device_name=torch.cuda.get_device_name(layout.device) if cuda else platform.machine(),
        net={"parameters": layout.parameter_size, "buffers": layout.size - layout.parameter_size},
        input_shape=list(federation.train.shape),
        classes=federation.classes,
        outputs=federation.outputs,
        partition_hash=federation.hash,
        versions=versions(),
        notes=run.notes,
    )


def versions() -> dict[str, str]:
    """Return the versions that a run's bits may depend on."""
    return {
        "fedcat": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def figures_of(history: Sequence[Record], metrics: Mapping[str, Metric]) -> dict[str, dict[str, Figures]]:
    """Return the figures of each model and metric of a history."""
    scores: dict[str, dict[str, list[float]]] = {"global": {name: [] for name in metrics}}
    for record in history:
        for model, found in {"global": record.metrics, **record.others}.items():
            for name, value in found.items():
                scores.setdefault(model, {}).setdefault(name, []).append(value)
    return {
        model: {name: Figures.of(values, metrics[name]) for name, values in found.items()}
        for model, found in scores.items()
    }


def choose(history: Sequence[Record], monitor: Metric) -> Choice | None:
    """Return the first of the evaluations with the best validation score."""
    chosen: Choice | None = None
    for record in history:
        if record.evaluated and monitor.name in record.validation:
            score = record.validation[monitor.name]["weighted_mean"]
            if math.isfinite(score) and (chosen is None or monitor.better(score, chosen.validation)):
                chosen = Choice(record.round, score, dict(record.metrics))
    return chosen
