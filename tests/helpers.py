"""Small federations, nets and runs for the tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from fedcat import engines
from fedcat.config.settings import Settings
from fedcat.data.federation import Federation
from fedcat.data.pool import Pool
from fedcat.methods.base import Context
from fedcat.methods.server_optimizer import ServerOptimizer, ServerOptimizerChoice
from fedcat.models.layout import Layout
from fedcat.models.nets import NETS
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task
from fedcat.runs.driver import Driver
from fedcat.runs.history import Record
from fedcat.runs.run import Run
from fedcat.runs.summary import Decisions

COUNT = itertools.count()
QUICK = {"fedgen": {"generator_steps": 5}}
"""Options of methods that make a run short."""
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


class Lines(nn.Module):
    """Rows of an image as a sequence: a recurrent layer, whose last output counts."""

    def __init__(self, layer=nn.LSTM, **given):
        super().__init__()
        self.layer, self.head = layer(8, 5, batch_first=True, **given), nn.Linear(given.get("proj_size", 5), 10)

    def forward(self, x):
        return self.head(self.layer(x[:, 0])[0][:, -1])


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
    aggregator: Any = None,
    run_name: str = "",
    metrics: tuple[Any, ...] = (),
    monitor: str = "",
    **local: Any,
) -> Run:
    """Put a run together, not yet started."""
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
        aggregator=aggregator,
        blank=torch.zeros_like(fed.test.inputs(slice(0, 1), layout.dtype), device=layout.device),
        classes=fed.classes,
        exact=exact,
    )
    made = method(context, **(options or {}))
    pool = fed.train.to(layout.device)
    name = run_name or f"{type(made).__name__}-{next(COUNT)}"
    task = Task(seed, layout, fed, pool, made.rule, batch_size, run=name, **local)
    used = engines.make(engine, exact) if isinstance(engine, str) else engine
    settings = Settings(
        rounds=rounds, evaluate_every=evaluate_every, evaluate=list(evaluate), bound=bound, monitor=monitor, seed=seed
    )
    decisions = Decisions(str(layout.device), used.name, "as requested", exact, 1, torch.get_num_threads())
    return Run(name, settings, decisions, fed, made, task, used, metrics)


def drive(*runs: Run, **given: Any) -> Run:
    """Drive runs to their end, and return the first."""
    Driver(runs, **given).run()
    return runs[0]


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of the row."""
    return float((a - b).norm() / b.norm())


def step(run: Run) -> list[Record]:
    """Take a run one step further, and return the rounds that this completed."""
    before = len(run.history)
    Driver([run]).step()
    return run.history[before:]


class Unordered(engines.Engine):
    """Trains with another engine, and delivers replies in a random order, a few at a time, some of them twice."""

    def __init__(self, inner: engines.Engine, seed: int) -> None:
        super().__init__(inner.exact, inner.precision)
        self.inner, self.name, self.rng = inner, inner.name, random.Random(seed)
        self.waiting: list[Reply] = []
        self.delivered: list[Reply] = []

    def submit(self, jobs: Sequence[engines.base.Job]) -> None:
        """Train at once, and keep the replies."""
        self.waiting += self.inner.train(jobs)

    def collect(self, timeout: float | None = None) -> list[Reply]:
        """Deliver some of them."""
        self.rng.shuffle(self.waiting)
        count = self.rng.randint(1, len(self.waiting))
        fresh, self.waiting = self.waiting[:count], self.waiting[count:]
        again = self.rng.sample(self.delivered, min(1, len(self.delivered)))
        self.delivered += fresh
        return [*fresh, *again]


def one_by_one(run: Run, seed: int) -> Run:
    """Drive a run without a barrier, with replies that come late and out of order."""
    run.engine = Unordered(run.engine, seed)
    return drive(run, barrier=False)
