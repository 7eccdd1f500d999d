"""Metrics: functions of a net's outputs and the targets of a whole evaluation set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry, accepts_call, label_of
from fedcat.models.losses import LossFunction, cross_entropy

MetricFunction = Callable[[Tensor, Tensor], Any]
"""(outputs, targets) -> a number, or one number per sample, whose mean is the metric."""

DECILE = 0.1
"""The share of the clients that are the worst."""


@dataclass(frozen=True)
class Metric:
    """A metric and how to read it.

    Attributes
    ----------
    function : callable
        (outputs [n, ...], targets [n, ...]) of all samples -> a number, or one number per sample, whose mean is taken.
    name : str
        The name in histories and tables; by default the function's.
    lower_is_better : bool
        Whether the best value is the smallest.
    percent : bool
        Whether tables show it in percent.
    needs_classes : bool
        Whether the targets must be class labels.
    """

    function: MetricFunction
    name: str = ""
    lower_is_better: bool = False
    percent: bool = False
    needs_classes: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function) or not accepts_call(self.function, None, None):
            raise SettingError(f"metric must be a function of (outputs, targets), got {self.function!r}")
        if not self.name:
            object.__setattr__(self, "name", label_of(self.function))

    def best(self, values: Sequence[float]) -> float:
        """Return the best of some values."""
        return (min if self.lower_is_better else max)(values)

    def better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one."""
        return value < other if self.lower_is_better else value > other

    def text(self, value: float) -> str:
        """Return a value as tables show it, with its unit."""
        return f"{100 * value:.2f} %" if self.percent else f"{value:.4g}"

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the metric as the function does: a tensor of no dimension, or one value per sample [n]."""
        found = torch.as_tensor(self.function(outputs, targets), device=outputs.device).detach()
        if found.shape not in ((), (1,), (len(outputs),)):
            raise SettingError(
                f"metric {self.name!r} must return a number or one number for each of the {len(outputs)} samples, "
                f"got shape {tuple(found.shape)}"
            )
        return found.to(torch.float64)

    def total(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        """Return the metric over all samples as a sum, a tensor of no dimension, and the number to divide it by."""
        found = self.of(outputs, targets)
        return found.sum(), found.numel()

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """Return the metric over all samples."""
        total, count = self.total(outputs, targets)
        return float(total) / count

    def per_client(self, outputs: Tensor, targets: Tensor, owner: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the metric of each client that owns samples, by client; samples of owner -1 are nobody's."""
        clients, position, counts = np.unique(owner, return_inverse=True, return_counts=True)
        first = int(np.searchsorted(clients, 0))
        found = self.of(outputs, targets)
        if found.shape == (len(outputs),) and len(outputs) > 1:
            means: NDArray[np.float64] = np.bincount(position, weights=found.cpu().numpy()) / counts
            return means[first:]
        places = [torch.from_numpy(np.flatnonzero(position == i)) for i in range(first, len(clients))]
        outputs, targets = outputs.cpu(), targets.cpu()
        return np.array([self.value(outputs[place], targets[place]) for place in places])


@dataclass(frozen=True, eq=False)
class ClientScores:
    """A model's metrics on each client's own samples.

    Attributes
    ----------
    clients, samples : numpy.ndarray
        The clients that have samples to evaluate on, ascending, and how many.
    values : mapping of str to numpy.ndarray
        The value of each client, by metric.
    """

    clients: NDArray[np.int64]
    samples: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]

    def spread(self, metric: Metric) -> dict[str, float]:
        """Return mean, mean weighted by samples, mean of the worst tenth of the clients, and standard deviation.

        Clients on whose samples the metric is not defined (not finite) are left out.
        """
        finite = np.isfinite(self.values[metric.name])
        values, samples = self.values[metric.name][finite], self.samples[finite]
        if not len(values):
            return dict.fromkeys(("mean", "weighted_mean", "worst_decile", "std"), math.nan)
        worst = np.sort(values)[:: -1 if metric.lower_is_better else 1][: int(np.ceil(DECILE * len(values)))]
        return {
            "mean": float(values.mean()),
            "weighted_mean": float(values @ samples / samples.sum()),
            "worst_decile": float(worst.mean()),
            "std": float(values.std()),
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return one mapping per client: its number, its samples and its values."""
        columns = {name: values.tolist() for name, values in self.values.items()}
        return [
            {"client": client, "samples": samples, **{name: column[i] for name, column in columns.items()}}
            for i, (client, samples) in enumerate(zip(self.clients.tolist(), self.samples.tolist(), strict=True))
        ]


METRICS: Registry[Any] = Registry("metric")


def _accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    return outputs.argmax(-1) == labels


def _top5(outputs: Tensor, labels: Tensor) -> Tensor:
    most = outputs.topk(min(5, outputs.shape[-1]), -1).indices
    return (most == labels[:, None]).any(-1)


def _confusion(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return how often each class (row) was taken for each class (column)."""
    size = outputs.shape[-1]
    return torch.bincount(labels * size + outputs.argmax(-1), minlength=size * size).reshape(size, size).double()


def _balanced_accuracy(outputs: Tensor, labels: Tensor) -> Tensor:
    counts = _confusion(outputs, labels)
    present = counts.sum(1) > 0
    return (counts.diagonal() / counts.sum(1).clamp(min=1)).sum() / present.sum()


def _macro_f1(outputs: Tensor, labels: Tensor) -> Tensor:
    counts = _confusion(outputs, labels)
    both = counts.sum(0) + counts.sum(1)
    return (2 * counts.diagonal() / both.clamp(min=1)).sum() / (both > 0).sum()


for name, function, note in (
    ("accuracy", _accuracy, "share of the samples whose class has the largest output; always recorded"),
    ("balanced-accuracy", _balanced_accuracy, "mean over the classes of the share of their samples that are right"),
    ("macro-f1", _macro_f1, "mean over the classes of F1, of those that occur or are predicted"),
    ("top5", _top5, "share of the samples whose class is among the five largest outputs"),
):
    METRICS.add(name, Metric(function, name, percent=True, needs_classes=True), note)


METRICS.add("loss", Metric(cross_entropy, "loss", lower_is_better=True), "mean loss of the samples; always recorded")


def loss_metric(loss: LossFunction) -> Metric:
    """Return the mean loss as a metric."""
    return Metric(loss, "loss", lower_is_better=True)


def make_metrics(parts: Sequence[Any], loss: LossFunction, classes: bool) -> dict[str, Metric]:
    """Return the metrics of a run by name: accuracy if there are classes, the loss, and those of `parts`."""
    always = [*([METRICS.get("accuracy")] if classes else []), loss_metric(loss)]
    found: dict[str, Metric] = {metric.name: metric for metric in always}
    for part in parts:
        if part is METRICS.get("loss"):  # recorded anyway, as the run's own loss
            continue
        metric = part if isinstance(part, Metric) else Metric(part)
        if metric.needs_classes and not classes:
            raise SettingError(f"metric {metric.name!r} needs class labels: the targets of this data are values")
        known = found.setdefault(metric.name, metric)
        if known != metric:
            raise SettingError(f"metrics must have different names, got {metric.name!r} twice: set Metric(name=...)")
    return found


def try_metrics(metrics: Iterable[Metric], outputs: Tensor, targets: Tensor) -> None:
    """Raise a `SettingError` if a metric fails on a few samples, before the first round and not after it."""
    for metric in metrics:
        try:
            metric.value(outputs, targets)
        except SettingError:
            raise
        except Exception as error:  # whatever a user's metric raises
            raise SettingError(
                f"metric {metric.name!r} fails on outputs of shape {tuple(outputs.shape)}: "
                f"{type(error).__name__}: {error}"
            ) from error


def make_monitor(name: str, metrics: Mapping[str, Metric]) -> Metric:
    """Return the metric by which models are compared: the first one unless another is named."""
    if name and name not in metrics:
        raise SettingError(f"monitor must be one of the metrics {', '.join(metrics)}, got {name!r}")
    return metrics[name or next(iter(metrics))]
