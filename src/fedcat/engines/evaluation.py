"""Evaluation: rows and samples give outputs, outputs and targets give metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.func import vmap

from fedcat.core.precision import plain_attention, precision_context
from fedcat.data.federation import EvaluationSet
from fedcat.models.layout import Layout, Tensors
from fedcat.models.metrics import ClientScores, Metric
from fedcat.models.traits import traits

Scores = dict[str, float]
"""Metrics by name."""

BATCH = 1000
"""Samples per forward pass of a single row."""
SAMPLES = 20_000
"""Samples per forward pass of several rows, counted once per row."""
ROWS = 40
"""Maximum number of rows per forward pass."""
OUTPUTS = 2**27
"""Outputs to hold at once; with more, fewer rows are evaluated together."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A job: evaluate a row on a set of samples.

    Attributes
    ----------
    layout : Layout
        The net.
    row : Tensor
        Its parameters and buffers, [D].
    on : EvaluationSet
        The samples, on the row's device.
    metrics : sequence of Metric
        What to compute.
    per_client : bool
        Whether to compute it for each client's samples rather than for all.
    together : bool
        Whether the row may share a forward pass on a GPU with others of its net; its last bits then depend on them.
    """

    layout: Layout
    row: Tensor
    on: EvaluationSet
    metrics: Sequence[Metric]
    per_client: bool = False
    together: bool = False

    def alone(self) -> Evaluation:
        """Return this job as one that shares no forward pass, which takes less memory."""
        return replace(self, together=False)


def evaluate(jobs: Sequence[Evaluation]) -> list[Scores | ClientScores]:
    """Return the metrics of each job, over all samples or by client."""
    found: dict[int, Scores | ClientScores] = {}
    totals: dict[int, list[tuple[Tensor, int]]] = {}
    for positions, outputs, targets in _outputs(jobs):
        for position in positions:
            job = jobs[position]
            if job.per_client:
                found[position] = _by_client(job, outputs, targets)
            else:
                totals[position] = [metric.total(outputs, targets) for metric in job.metrics]
    if totals:
        sums = iter(torch.stack([total for parts in totals.values() for total, _ in parts]).tolist())  # one transfer
        for position, parts in totals.items():
            names = [metric.name for metric in jobs[position].metrics]
            found[position] = {name: next(sums) / count for name, (_, count) in zip(names, parts, strict=True)}
    return [found[position] for position in range(len(jobs))]


def _by_client(job: Evaluation, outputs: Tensor, targets: Tensor) -> ClientScores:
    owner = job.on.owner
    assert owner is not None
    clients, samples = np.unique(owner[owner >= 0], return_counts=True)
    return ClientScores(clients, samples, {m.name: m.per_client(outputs, targets, owner) for m in job.metrics})


def _outputs(jobs: Sequence[Evaluation]) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Yield the outputs and targets of each distinct row and set, with the positions of the jobs that need them."""
    groups: dict[tuple[Layout, EvaluationSet, bool], dict[Tensor, list[int]]] = {}  # a tensor is equal to itself only
    for position, job in enumerate(jobs):
        groups.setdefault((job.layout, job.on, job.together), {}).setdefault(job.row, []).append(position)
    for (layout, on, together), places in groups.items():
        rows = [jobs[positions[0]].row for positions in places.values()]
        targets = on.targets(layout.dtype)
        stack = together and len(rows) > 1 and layout.device.type == "cuda"
        stack = stack and not traits(layout, on.pool).recurrent and not traits(layout, on.pool).unstackable
        outputs = outputs_stacked(layout, rows, on) if stack else (outputs_of(layout, row, on) for row in rows)
        for positions, out in zip(places.values(), outputs, strict=True):
            yield positions, out, targets


def outputs_of(layout: Layout, row: Tensor, on: EvaluationSet) -> Tensor:
    """Return a net's outputs for all samples, [n, ...]."""
    layout.net.eval()
    size = layout.parameter_size
    parameters, buffers = layout.parameter_views(row[:size]), layout.buffer_views(row[size:])
    with torch.no_grad(), precision_context():
        return torch.cat(
            [
                layout.bind(parameters, buffers).logits(on.pool.inputs(part, layout.dtype))
                for part in torch.split(on.index, BATCH)
            ]
        )


def outputs_stacked(layout: Layout, rows: Sequence[Tensor], on: EvaluationSet) -> Iterator[Tensor]:
    """Yield the outputs of several rows, evaluated together as far as memory allows."""
    for begin in range(0, len(rows), ROWS):
        yield from _stacked(layout, rows[begin : begin + ROWS], on)


def _stacked(layout: Layout, rows: Sequence[Tensor], on: EvaluationSet) -> Iterator[Tensor]:
    found = _try_stacked(layout, rows, on)
    if found is not None:
        yield from found
        return
    half = len(rows) // 2
    yield from _stacked(layout, rows[:half], on)
    yield from _stacked(layout, rows[half:], on)


def _try_stacked(layout: Layout, rows: Sequence[Tensor], on: EvaluationSet) -> Tensor | None:
    """Return the outputs of rows, [R, n, ...], or None if they are too many to hold."""
    layout.net.eval()
    size, stacked = layout.parameter_size, torch.stack(list(rows))
    parameters, buffers = layout.parameter_views(stacked[:, :size]), layout.buffer_views(stacked[:, size:])

    def logits(parameters: Tensors, buffers: Tensors, x: Tensor) -> Tensor:
        return layout.bind(parameters, buffers).logits(x)

    found: list[Tensor] = []
    with torch.no_grad(), precision_context(), plain_attention():
        for part in torch.split(on.index, max(100, SAMPLES // len(rows))):
            if found and len(rows) > 1 and found[0].numel() / found[0].shape[1] * len(on.index) > OUTPUTS:
                return None
            x = on.pool.inputs(part, layout.dtype)
            found.append(vmap(logits, in_dims=(0, 0, None))(parameters, buffers, x))
        return torch.cat(found, 1)
