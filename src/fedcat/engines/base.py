"""The interface of engines, which train clients."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fedcat.core.precision import precision_context
from fedcat.data.pool import Pool
from fedcat.models.layout import Layout
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task

Job = tuple[Task, Hop]

EVALUATION_BATCH = 1000


def timed(train: Callable[[], list[Reply]]) -> list[Reply]:
    """Train a launch and return its replies with their seconds, shared by steps."""
    begin = time.perf_counter()
    replies = train()
    share = (time.perf_counter() - begin) / max(1, sum(reply.steps for reply in replies))
    return [replace(reply, seconds=share * reply.steps) for reply in replies]


class Engine(ABC):
    """Trains the hops of one or more runs, and evaluates rows.

    Parameters
    ----------
    exact : bool
        Give the same bits no matter what else is trained at the same time.
    precision : str
        Precision of products in training: ``fp32``, ``tf32`` or ``bf16``. Evaluation always uses full precision.
    memory : float, optional
        Limit on GPU memory in bytes, met by splitting stacks; by default the free memory.
    """

    name: str

    def __init__(self, exact: bool = False, precision: str = "fp32", memory: float | None = None) -> None:
        self.exact, self.precision, self.memory = exact, precision, memory

    @abstractmethod
    def train(self, jobs: Sequence[Job]) -> list[Reply]:
        """Train every hop and return the replies in the order of the jobs."""

    def kernels(self, task: Task) -> str:
        """Return a description of what computes a task's steps."""
        return "PyTorch"

    def release(self) -> None:  # noqa: B027  (most engines keep nothing)
        """Free memory that was kept for the next call."""

    def evaluate(
        self, layout: Layout, rows: Sequence[Tensor], pool: Pool, index: Tensor | None = None
    ) -> list[tuple[float, float]]:
        """Return accuracy and mean loss of each row on a pool, or on its samples at `index`."""
        where = torch.arange(len(pool), device=pool.x.device) if index is None else index
        layout.net.eval()
        results = []
        with torch.no_grad(), precision_context():
            for row in rows:
                parameters = layout.parameter_views(row[: layout.parameter_size])
                buffers = layout.buffer_views(row[layout.parameter_size :])
                right = torch.zeros((), dtype=torch.int64, device=row.device)
                loss = torch.zeros((), dtype=torch.float64, device=row.device)
                for part in torch.split(where, EVALUATION_BATCH):
                    y = pool.y[part]
                    net = layout.bind(parameters, buffers)
                    logits = net.logits(pool.inputs(part, layout.dtype))
                    right += (logits.argmax(-1) == y).sum()
                    loss += functional.cross_entropy(logits, y, reduction="sum").to(torch.float64)
                results.append((int(right) / len(where), float(loss) / len(where)))
        return results
