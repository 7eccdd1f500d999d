"""What is the same for every engine: the order of a client's batches, and what its rule draws, knows and reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from fedcat.core.errors import SettingError
from fedcat.core.rng import Purpose, random_stream
from fedcat.models.layout import Tensors
from fedcat.protocol.hop import Hop
from fedcat.protocol.local_rule import LocalRule, protected
from fedcat.protocol.task import Task

Ints = NDArray[np.int64]


def batch_lengths(samples: int, batch_size: int, join_lone: bool = False) -> list[int]:
    """Return the lengths of one epoch's batches; the last may be shorter.

    With `join_lone`, a last batch of one sample joins the batch before it.
    """
    full, rest = divmod(samples, batch_size)
    lengths = [batch_size] * full + ([rest] if rest else [])
    if join_lone and rest == 1 and full:
        lengths = [*lengths[:-2], batch_size + 1]
    return lengths


def steps_of(task: Task, hop: Hop) -> int:
    """Return the number of steps of a hop."""
    return hop.epochs * len(batch_lengths(task.samples(hop.client), task.batch_size, task.join_lone))


def learning_rate(task: Task, hop: Hop, steps: int) -> tuple[float, float]:
    """Return the learning rate of a hop's first step and its decay: step s uses first / (1 + decay * s)."""
    scale = 1 + task.lr_decay * hop.round * steps
    return hop.lr / scale, task.lr_decay / scale


def mean_learning_rate(task: Task, hop: Hop, steps: int) -> float:
    """Return the mean of the learning rates of a hop's steps."""
    first, decay = learning_rate(task, hop, steps)
    return first if not decay else float((first / (1 + decay * np.arange(steps))).mean())


class BatchOrder:
    """A hop's batches, epoch by epoch.

    Attributes
    ----------
    steps : int
        Number of batches over all epochs.
    """

    def __init__(self, task: Task, hop: Hop) -> None:
        self._mine = task.federation.indices(hop.client)
        self._rng = random_stream(task.seed, Purpose.BATCHES, hop.round, hop.client, hop.visit)
        self._replacement = task.replacement
        self.lengths = batch_lengths(len(self._mine), task.batch_size, task.join_lone)
        self.steps = hop.epochs * len(self.lengths)

    def write(self, index: NDArray[np.integer[Any]]) -> int:
        """Write the next epoch's positions in the pool into the first of the batches [S, B]; return how many there are.

        Shorter batches are padded with -1.
        """
        count = len(self._mine)
        order = self._mine[self._rng.integers(count, size=count) if self._replacement else self._rng.permutation(count)]
        batches, size = len(self.lengths), self.lengths[0]
        equal = batches - (self.lengths[-1] != size)  # only the last batch may have another length
        rest = order[equal * size :]
        index[:equal, :size] = order[: equal * size].reshape(equal, size)
        index[:equal, size:] = -1
        if len(rest):
            index[equal, : len(rest)] = rest
            index[equal, len(rest) :] = -1
        return batches


def drawn_by(job: tuple[Task, Hop], steps: int) -> dict[str, Tensor]:
    """Return the random numbers that a hop's loss needs, [steps, ...]."""
    task, hop = job
    rng = random_stream(task.seed, Purpose.RULE, hop.round, hop.client, hop.visit)
    with protected(task.rule, "draw", hop) as given:
        return task.rule.draw(rng, task, given, steps)


def augment_numbers(job: tuple[Task, Hop], steps: int, length: int = 0) -> Tensor | None:
    """Return the random numbers that augment a hop's batches, [steps, length, numbers]; None if nothing does.

    They are padded with zeros to `length` places per batch.
    """
    task, hop = job
    if not task.augment:
        return None
    rng = random_stream(task.seed, Purpose.AUGMENT, hop.round, hop.client, hop.visit)
    own = max(batch_lengths(task.samples(hop.client), task.batch_size, task.join_lone))
    drawn = torch.from_numpy(rng.random((steps, own, task.augment.numbers), dtype=np.float32))
    return functional.pad(drawn, (0, 0, 0, max(0, length - own)))


def local_of(job: tuple[Task, Hop]) -> Tensors:
    """Return what a job's rule needs to know about the client's own data."""
    task, hop = job
    found = task.rule.local(task, hop.client)
    for name, value in found.items():
        if not isinstance(value, Tensor):
            rule = type(task.rule).__name__
            raise SettingError(f"{rule}.local must return tensors, got {type(value).__name__} for {name!r}")
    return {n: t.to(hop.start.device) for n, t in found.items()}


def reported_by(job: tuple[Task, Hop]) -> dict[str, Tensor]:
    """Return what the client of a job uploads about its own data."""
    task, hop = job
    if type(task.rule).report is LocalRule.report:
        return {}
    with protected(task.rule, "report", hop) as given:
        return task.rule.report(task, given)


def batches(task: Task, hop: Hop) -> tuple[Ints, Ints]:
    """Return a hop's batches.

    Returns
    -------
    index : numpy.ndarray
        Positions in the pool, [steps, length]; shorter batches are padded with -1.
    lengths : numpy.ndarray
        Number of real positions in each step, [steps].
    """
    order = BatchOrder(task, hop)
    index = np.empty((order.steps, max(order.lengths)), np.int64)
    for begin in range(0, order.steps, len(order.lengths)):
        order.write(index[begin:])
    return index, np.tile(order.lengths, hop.epochs)
