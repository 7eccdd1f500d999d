"""Small federations, nets and simulations for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcat import engines
from fedcat.data.federation import Federation
from fedcat.data.pool import Pool
from fedcat.methods.base import Context
from fedcat.methods.server_optimizer import ServerOptimizer, ServerOptimizerChoice
from fedcat.models.layout import Layout
from fedcat.models.nets import NETS
from fedcat.protocol.task import Task
from fedcat.runs.simulation import Simulation

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def philox(seed: int, purpose: int, round: int = 0, client: int = 0, visit: int = 0) -> np.random.Generator:
    """Make the random stream with this key from NumPy alone, to check what the code draws from its own."""
    key = np.array([seed, purpose], np.uint64)
    return np.random.Generator(np.random.Philox(counter=np.array([0, visit, client, round], np.uint64), key=key))


def federation(sizes: list[int], shape: tuple[int, ...] = (1, 8, 8), classes: int = 10, seed: int = 0) -> Federation:
    """Make clients that hold random samples, as many as `sizes` says."""
    rng = np.random.default_rng(seed)
    total = sum(sizes)
    x = rng.normal(size=(total, *shape)).astype(np.float64)
    y = rng.integers(classes, size=total)
    owner = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    test = Pool(rng.normal(size=(12, *shape)), rng.integers(classes, size=12))
    return Federation(Pool(x, y), test, owner, classes, len(sizes))


def small_net(seed: int = 0, classes: int = 10) -> nn.Module:
    """Make a tiny net for inputs of shape (1, 8, 8)."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, classes))


def digits_net(seed: int = 0) -> nn.Module:
    """Make the digits' own net, in two parts."""
    torch.manual_seed(seed)
    return NETS.get("digits-cnn")((1, 8, 8), 10)


class Attention(nn.Module):
    """Rows of an image as a sequence: one encoder layer, without dropout."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.encoder(x.flatten(1, -2)).mean(1))


def layout_of(net: nn.Module, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Layout:
    """Make a layout of a net on a device."""
    return Layout(net.to(device=device, dtype=dtype))


def simulate(
    method: Any,
    fed: Federation,
    layout: Layout,
    engine: str | engines.Engine = "sequential",
    *,
    rounds: int = 4,
    k: int = 3,
    seed: int = 0,
    epochs: int = 2,
    lr: float | Callable[[int], float] = 0.1,
    batch_size: int = 4,
    exact: bool = False,
    start: torch.Tensor | None = None,
    selector: Any = None,
    evaluate_every: int = 10,
    evaluate: tuple[str, ...] = (),
    bound: float | None = None,
    options: dict[str, Any] | None = None,
    server_optimizer: ServerOptimizer | None = None,
    average: float | None = None,
    **local: Any,
) -> Simulation:
    """Put a simulation together, not yet run."""
    row = layout.pack(layout.net) if start is None else start
    context = Context(
        seed,
        layout,
        row,
        fed.sizes,
        k,
        epochs,
        lr if callable(lr) else lambda r: lr,
        selector,
        server_optimizer=ServerOptimizerChoice(factory=None if server_optimizer is None else lambda: server_optimizer),
        average=average,
        blank=torch.zeros_like(fed.test.inputs(slice(0, 1), layout.dtype), device=layout.device),
        classes=fed.classes,
        exact=exact,
    )
    made = method(context, **(options or {}))
    pool, test = fed.train.to(layout.device), fed.test.to(layout.device)
    task = Task(seed, layout, fed, pool, made.rule, batch_size, **local)
    used = engines.make(engine, exact) if isinstance(engine, str) else engine
    return Simulation(made, task, used, test, rounds, evaluate_every, evaluate, bound)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the row."""
    return float((a - b).norm() / b.norm())
