"""Timing of the engines, the plain loop, and the machine's matrix products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from fedcat.bench.plain_loop import PlainLoop
from fedcat.bench.workload import Workload
from fedcat.core.precision import precision_context
from fedcat.models.traits import traits
from fedcat.runs.driver import Driver

PASSES = 3
"""The arithmetic of a step, in forward passes: forward, backward to the inputs, backward to the weights."""
WARM = 8
"""Warm-up rounds on a GPU, until the steps of every number of rows have been captured."""


@dataclass(frozen=True)
class Case:
    """One way to do the work: an engine, a precision, and the number of runs side by side."""

    engine: str = "auto"
    precision: str = "fp32"
    runs: int = 1
    exact: bool | None = None


@dataclass(frozen=True)
class Timing:
    """The measurements of one case.

    Attributes
    ----------
    seconds : float
        Time of a round of one run, the median over the turns.
    ratio, loader_ratio : float
        How many times longer the plain loop took for the same work in the same turns, without and with a DataLoader.
    step : float
        Seconds per local step.
    start : float
        Seconds of the first round, which compiles kernels and captures steps.
    rate : float
        Operations per second of training.
    share : float
        `rate` as a fraction of the rate of large matrix products in the same precision.
    engine, kernels : str
        The engine and the kernels that trained.
    exact : bool
        Whether a row's bits were independent of the other rows.
    memory : float
        Peak GPU bytes in the first rounds, including the data and the plain loop; 0 on a CPU.
    """

    net: str
    case: Case
    engine: str
    kernels: str
    exact: bool
    seconds: float
    step: float
    ratio: float
    loader_ratio: float
    start: float
    rate: float
    share: float
    memory: float

    def as_dict(self) -> dict[str, Any]:
        """Return the measurements as plain values."""
        return asdict(self)


def clock(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes, including the work it starts on a GPU."""
    wait(device)
    begin = time.perf_counter()
    work()
    wait(device)
    return time.perf_counter() - begin


def round_of_all(driver: Driver) -> None:
    """Step until every run has recorded a round: a driver's step may be a round of some of them only."""
    before = {name: len(run.history) for name, run in driver.runs.items()}
    while any(len(run.history) == before[name] for name, run in driver.runs.items()):
        driver.step()


def wait(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matrix_rate(device: torch.device, precision: str) -> float:
    """Return the operations per second of large matrix products on this machine."""
    size = 8192 if device.type == "cuda" else 1024
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.rand(size, size, device=device).to(kind) for _ in range(2))
    with precision_context(precision):
        a @ b
        best = min(clock(lambda: a @ b, device) for _ in range(8))
    return 2 * size**3 / best


class Bench:
    """Times cases against the plain loop on the workload of one net.

    Parameters
    ----------
    work : Workload
        The workload.
    device : torch.device
        The device to train on.
    turns : int
        Rounds to time; the loop and the engine alternate.
    """

    def __init__(self, work: Workload, device: torch.device, turns: int = 3) -> None:
        self.work, self.device, self.turns = work, device, turns
        self.data = work.dataset()
        (like,) = work.runs(1, self.data, device=str(device), engine="sequential")
        self.like = like
        self.loops = {name: PlainLoop(work, like, loader) for name, loader in (("plain", False), ("loader", True))}
        self.threads = torch.get_num_threads()
        self.loop_threads = self._best_threads()
        self.flops = PASSES * traits(like.task.layout, like.task.pool).flops * work.batch_size
        self._rates: dict[str, float] = {}

    def _best_threads(self) -> int:
        """Return the number of threads with which the plain loop is fastest, timed on the same clients."""
        clients = [int(client) for client in range(min(self.work.per_round, self.work.clients))]
        for loop in self.loops.values():
            loop.prepare(clients)
        tried = {}
        for count in {1, self.threads} if self.device.type == "cpu" else {self.threads}:
            torch.set_num_threads(count)
            self.loops["plain"].round(clients[:1])
            tried[count] = clock(lambda: self.loops["plain"].round(clients[:3]), self.device)
        torch.set_num_threads(self.threads)
        return min(tried, key=lambda count: tried[count])

    def rate(self, precision: str) -> float:
        """Return the machine's matrix rate in a precision; it is measured once."""
        if precision not in self._rates:
            self._rates[precision] = matrix_rate(self.device, precision)
        return self._rates[precision]

    def time(self, case: Case) -> Timing:
        """Time one case, alternating with both loops."""
        settings = {"engine": case.engine, "precision": case.precision, "exact": case.exact}
        runs = self.work.runs(case.runs, self.data, device=str(self.device), **settings)
        engine, driver = runs[0].engine, Driver(runs)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        try:
            start = clock(lambda: round_of_all(driver), self.device)
            for _ in range(WARM if self.device.type == "cuda" else 1):
                round_of_all(driver)
            memory = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
            turns = [self._turn(driver) for _ in range(self.turns)]
            kernels = engine.kernels(runs[0].task)
        finally:
            torch.set_num_threads(self.threads)
            engine.release()
        ours, plain, loader, steps = (list(column) for column in zip(*turns, strict=True))
        step = sum(ours) / sum(steps)
        return Timing(
            net=self.work.net,
            case=case,
            engine=engine.name,
            kernels=kernels,
            exact=engine.exact,
            seconds=statistics.median(ours) / case.runs,
            step=step,
            ratio=sum(plain) / sum(ours),
            loader_ratio=sum(loader) / sum(ours),
            start=start,
            rate=self.flops / step,
            share=self.flops / step / self.rate(case.precision),
            memory=float(memory),
        )

    def _turn(self, driver: Driver) -> tuple[float, float, float, int]:
        """Return the seconds of one round of all runs, of both loops for as many steps, and the number of steps."""
        ours = clock(lambda: round_of_all(driver), self.device)
        runs = list(driver.runs.values())
        steps = sum(self.work.steps(run, run.history[-1].clients) for run in runs)
        clients = runs[0].history[-1].clients
        own = self.work.steps(runs[0], clients)
        times = []
        torch.set_num_threads(self.loop_threads)
        for loop in self.loops.values():
            loop.prepare(clients)
            times.append(clock(lambda loop=loop: loop.round(clients), self.device) * steps / own)  # type: ignore[misc]
        torch.set_num_threads(self.threads)
        return ours, times[0], times[1], steps
