"""How devices train: the contract of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from fedcat.federation.pool import Pool
from fedcat.hop import Hop, Reply
from fedcat.local import Task
from fedcat.models.layout import Layout

if TYPE_CHECKING:
    from collections.abc import Iterator

Job = tuple[Task, Hop]

EVALUATION_BATCH = 1000


class Engine(ABC):
    """Trains hops, of several simulations at once, and evaluates rows."""

    name: str

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact

    @abstractmethod
    def train(self, jobs: Sequence[Job]) -> list[Reply]:
        """Train every hop and return the replies in the order of the jobs."""

    def evaluate(
        self, layout: Layout, rows: Sequence[Tensor], pool: Pool, index: Tensor | None = None
    ) -> list[tuple[float, float]]:
        """Return accuracy and mean loss of each row on a pool, or on its samples at `index`."""
        where = torch.arange(len(pool), device=pool.x.device) if index is None else index
        layout.net.eval()
        results = []
        with torch.no_grad(), arithmetic():
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


@contextmanager
def arithmetic() -> Iterator[None]:
    """Within this float32 is float32 (no TF32), and no kernel is tuned by timing or may vary from run to run."""
    if not torch.cuda.is_available():
        yield
        return
    cudnn = torch.backends.cudnn
    wanted: list[tuple[Any, str, Any]] = [(cudnn, "benchmark", False), (cudnn, "deterministic", True)]
    if hasattr(cudnn, "conv"):  # PyTorch 2.9 and later; mixing it with the older switches is an error there
        wanted += [(part, "fp32_precision", "ieee") for part in (cudnn.conv, torch.backends.cuda.matmul)]
    else:
        wanted += [(part, "allow_tf32", False) for part in (cudnn, torch.backends.cuda.matmul)]
    before = [getattr(part, name) for part, name, _ in wanted]
    for part, name, value in wanted:
        setattr(part, name, value)
    try:
        yield
    finally:
        for (part, name, _), value in zip(wanted, before, strict=True):
            setattr(part, name, value)
