"""The paper's theorem, measured: how far F is above its minimum, and the bound.

The problem is strongly convex: softmax regression with an L2 penalty on the handwritten digits, divided over clients of
equal size, all of which train in every round. The step size decays with every SGD step, as the theorem has it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor, nn
from torch.nn import functional

from fedcat.data.dataset import DATASETS
from fedcat.data.federation import Federation
from fedcat.data.partitions import partition
from fedcat.data.pool import Pool
from fedcat.paper.case import LABELS
from fedcat.report.sheet import Sheet
from fedcat.runs.build import Builder
from fedcat.runs.callbacks import Callback
from fedcat.runs.history import Record
from fedcat.runs.run import Run
from fedcat.runs.runner import execute

CLIENTS, SAMPLES, BATCH, ALPHA, L2 = 10, 140, 20, 0.1, 0.5
"""Clients, samples of each, batch size, skew of the classes, and the penalty, which is mu."""
ROUNDS = 6000
METHODS = ("fedavg", "fedcat")
SAMPLINGS = {"replacement": "", "shuffle": ", shuffled"}
"""How batches are drawn: independently, as the theorem assumes; and every sample once per epoch, as one trains."""
POINTS = 60
"""Rounds at which F is measured, evenly spaced on a log axis."""
WINDOW = (10.0, math.inf)
"""Where the slope is fitted, in multiples of gamma: it was fixed before anything was measured."""


@dataclass(frozen=True)
class Constants:
    """What the bound is computed from.

    Attributes
    ----------
    smoothness, convexity : float
        L, the largest eigenvalue that a client's Hessian can have, and mu.
    steps, copies : int
        E, local steps in a round, and K, the number of clients and of copies.
    distance : float
        The squared distance from the start to the minimum.
    heterogeneity : float
        Gamma, the minimum of F minus the mean of the clients' own minima.
    gradient, variance : float
        G^2 and beta^2: the largest mean square of a stochastic gradient, and of its distance from the client's
        gradient, over clients and all points that were measured.
    """

    smoothness: float
    convexity: float
    steps: int
    copies: int
    distance: float
    heterogeneity: float
    gradient: float
    variance: float

    @property
    def gamma(self) -> float:
        """The offset of the step size 2 / (mu (gamma + t)): max(8 L / mu, K E)."""
        return offset(self.smoothness, self.convexity, self.copies * self.steps)

    def bound(self, t: float, chain: int) -> float:
        """Return the bound after t steps, for models that train `chain` steps between two averages."""
        drift = 8 * (chain - 1) ** 2 * self.gradient
        b = self.variance / self.copies + 6 * self.smoothness * self.heterogeneity + drift
        inside = 2 * b / self.convexity + self.convexity * self.gamma / 2 * self.distance
        return self.smoothness / (self.convexity * (self.gamma + t)) * inside

    def chain(self, label: str) -> int:
        """Return the steps between two averages: E of FedAvg, K E of FedCat."""
        return self.steps * (self.copies if label.startswith(LABELS["fedcat"]) else 1)


@dataclass(frozen=True)
class Measured:
    """What was measured.

    Attributes
    ----------
    constants : Constants
        Of the problem and of the trajectories.
    steps : list of int
        The numbers of SGD steps, t.
    gaps : mapping of str to list of list of float
        F of the mean of the copies minus its minimum, by label (method and sampling) and seed.
    """

    constants: Constants
    steps: list[int]
    gaps: dict[str, list[list[float]]] = field(default_factory=dict)

    def mean_gap(self, label: str) -> list[float]:
        """Return the gap at each time, averaged over seeds: the theorem is about the expectation."""
        return [float(value) for value in np.mean(self.gaps[label], axis=0)]

    def slope(self, label: str) -> float:
        """Return the slope of the gap over t on log axes, fitted over the window; NaN if it holds too few points."""
        low, high = (bound * self.constants.gamma for bound in WINDOW)
        points = [(t, gap) for t, gap in zip(self.steps, self.mean_gap(label), strict=True) if low <= t <= high]
        if len(points) < 3:
            return math.nan
        times, gaps = np.log(np.array(points)).T
        return float(np.polyfit(times, gaps, 1)[0])

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        bounds = {one: [self.constants.bound(t, self.constants.chain(one)) for t in self.steps] for one in self.gaps}
        return {
            "constants": {**asdict(self.constants), "gamma": self.constants.gamma},
            "steps": self.steps,
            "gaps": self.gaps,
            "bounds": bounds,
            "slopes": {label: self.slope(label) for label in self.gaps},
            "window": [bound * self.constants.gamma for bound in WINDOW],
        }


def offset(smoothness: float, convexity: float, chain: int) -> float:
    """Return gamma: max(8 L / mu, K E)."""
    return max(8 * smoothness / convexity, chain)


class Problem:
    """Softmax regression with an L2 penalty on all parameters, in double precision, on digits over clients."""

    def __init__(self, seed: int) -> None:
        digits = DATASETS.get("digits")()
        chosen = torch.from_numpy(np.random.default_rng(seed).permutation(len(digits.train))[: CLIENTS * SAMPLES])
        train = Pool(digits.train.x[chosen], digits.train.y[chosen], digits.train.normalize)
        owner = partition("dirichlet-hsu", train.y.numpy(), CLIENTS, seed, alpha=ALPHA)
        self.federation = Federation(train, digits.test, owner, digits.classes, CLIENTS, "digits")
        self.classes = digits.classes
        inputs = train.inputs(torch.arange(len(train)), torch.float64).flatten(1)
        self.x = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
        self.y = train.y
        self.mine = [torch.from_numpy(self.federation.indices(client)) for client in range(CLIENTS)]

    def net(self) -> nn.Module:
        """Return the net."""
        return nn.Sequential(nn.Flatten(), nn.Linear(self.x.shape[1] - 1, self.classes))

    def matrix(self, row: Tensor) -> Tensor:
        """Return a row, weight and bias, as the matrix that multiplies the inputs with a one at their end."""
        weight = row[: -self.classes].view(self.classes, -1)
        return torch.cat([weight, row[-self.classes :, None]], 1)

    def value(self, w: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return F, or the objective of some samples, at a matrix."""
        x, y = (self.x, self.y) if rows is None else (self.x[rows], self.y[rows])
        return functional.cross_entropy(x @ w.T, y) + L2 / 2 * (w * w).sum()

    def minimum(self, rows: Tensor | None = None) -> tuple[Tensor, float]:
        """Return the minimizer of F, or of some samples' objective, and the minimum."""
        shape = (self.classes, self.x.shape[1])

        def both(flat: Any) -> tuple[float, Any]:
            w = torch.from_numpy(flat.reshape(shape)).requires_grad_()
            value = self.value(w, rows)
            (gradient,) = torch.autograd.grad(value, w)
            return value.item(), gradient.numpy().ravel()

        options = {"maxiter": 10_000, "maxcor": 50, "ftol": 0.0, "gtol": 1e-12}
        found = minimize(both, np.zeros(math.prod(shape)), jac=True, method="L-BFGS-B", options=options)
        return torch.from_numpy(found.x.reshape(shape)), float(found.fun)

    def smoothness(self) -> float:
        """Return L: the Hessian of the cross entropy is at most half of the inputs' second moment."""
        moments = [self.x[mine].T @ self.x[mine] / len(mine) for mine in self.mine]
        return max(0.5 * float(torch.linalg.eigvalsh(moment)[-1]) for moment in moments) + L2

    def gradients(self, w: Tensor) -> tuple[float, float]:
        """Return the largest mean square, over clients, of a batch's gradient and of its distance from the client's.

        Batches are drawn independently, with replacement, so that both follow from the gradients of single samples.
        """
        errors = functional.softmax(self.x @ w.T, 1) - functional.one_hot(self.y, self.classes)
        square, variance = 0.0, 0.0
        for mine in self.mine:
            e, x = errors[mine], self.x[mine]
            mean = e.T @ x / len(mine)
            spread = float(((e * e).sum(1) * (x * x).sum(1)).mean() - (mean * mean).sum())
            of_batch = spread / BATCH
            square = max(square, float(((mean + L2 * w) ** 2).sum()) + of_batch)
            variance = max(variance, of_batch)
        return square, variance


class _Watch(Callback):
    """Measures F of the mean of the copies at chosen rounds, and the gradients at every copy."""

    def __init__(self, problem: Problem, rounds: Sequence[int], lowest: float) -> None:
        self.problem, self.rounds, self.lowest = problem, set(rounds), lowest
        self.gaps: list[float] = []
        self.square = self.variance = 0.0

    def on_start(self, run: Run) -> None:
        """Measure the gradients at the start."""
        self._look(run)

    def on_round(self, run: Run, record: Record) -> None:
        """Measure if it is time."""
        if record.round in self.rounds:
            rows = self._look(run)
            mean = self.problem.matrix(rows.get("mean", rows["global"]))
            self.gaps.append(float(self.problem.value(mean)) - self.lowest)

    def _look(self, run: Run) -> Mapping[str, Tensor]:
        rows = run.method.models("mean", "copies")
        for row in rows.values():
            square, variance = self.problem.gradients(self.problem.matrix(row))
            self.square, self.variance = max(self.square, square), max(self.variance, variance)
        return rows


def measure(seeds: Sequence[int], rounds: int = ROUNDS) -> Measured:
    """Measure FedAvg and FedCat on the problem of the first seed; each seed has its own start and batches.

    The steps are those of the theorem: 2 / (mu (gamma + t)) = lr / (1 + lr_decay t).
    """
    problem = Problem(seeds[0])
    best, lowest = problem.minimum()
    own = [problem.minimum(mine)[1] for mine in problem.mine]
    steps, smoothness = SAMPLES // BATCH, problem.smoothness()
    gamma = offset(smoothness, L2, CLIENTS * steps)
    times = sorted({round(r) for r in np.geomspace(1, rounds, POINTS)})
    data = {"dataset": problem.federation, "net": problem.net, "fraction": 1.0, "batch_size": BATCH, "epochs": 1}
    sgd = {"momentum": 0.0, "weight_decay": L2, "lr_schedule": "inverse-step"}
    rates = {"lr": 2 / (L2 * gamma), "lr_decay": 1 / gamma}
    machine = {"dtype": "float64", "device": "cpu", "workers": 1, "threads": 1}
    given = {**data, **sgd, **rates, **machine, "rounds": rounds, "evaluate_every": rounds}
    builder = Builder()
    labels = {(m, s): LABELS[m] + words for s, words in SAMPLINGS.items() for m in METHODS}
    made: list[dict[str, Any]] = [{"method": m, "sampling": s, "seed": seed} for m, s in labels for seed in seeds]
    runs = [builder.build({**given, **one}) for one in made]
    watches = [_Watch(problem, times, lowest) for _ in runs]
    starts = [problem.matrix(run.method.models()["global"]) for run in runs]
    for run, watch in zip(runs, watches, strict=True):
        run.callbacks.append(watch)
    execute(runs)
    constants = Constants(
        smoothness=smoothness,
        convexity=L2,
        steps=steps,
        copies=CLIENTS,
        distance=max(float(((start - best) ** 2).sum()) for start in starts),
        heterogeneity=lowest - float(np.mean(own)),
        gradient=max(watch.square for watch in watches),
        variance=max(watch.variance for watch in watches),
    )
    gaps: dict[str, list[list[float]]] = {label: [] for label in labels.values()}
    for one, watch in zip(made, watches, strict=True):
        gaps[labels[one["method"], one["sampling"]]].append(watch.gaps)
    return Measured(constants, [steps * time for time in times], gaps)


def theorem_sheets(found: Measured) -> list[Sheet]:
    """Return the constants, and measured gap, bound and their ratio along t."""
    c = found.constants
    named = {
        "L": c.smoothness,
        "mu": c.convexity,
        "E": c.steps,
        "K": c.copies,
        "gamma": c.gamma,
        "distance²": c.distance,
        "Gamma": c.heterogeneity,
        "G²": c.gradient,
        "beta²": c.variance,
    }
    constants = Sheet("Constants", list(named), [[f"{value:.4g}" for value in named.values()]])
    shown = np.unique(np.linspace(0, len(found.steps) - 1, 9).round().astype(int)).tolist()
    lines = []
    for label in found.gaps:
        gaps = found.mean_gap(label)
        for place in shown:
            t = found.steps[place]
            bound = c.bound(t, c.chain(label))
            lines.append([label, f"{t:,}", f"{gaps[place]:.3e}", f"{bound:.3e}", f"{bound / gaps[place]:.2e}"])
    low = WINDOW[0] * c.gamma
    slopes = "; ".join(f"{label} {found.slope(label):.2f}" for label in found.gaps)
    note = (
        "Batches are drawn independently, as the theorem assumes, and, where it says so, shuffled: every sample once "
        f"per epoch. Slope of the measured gap on log axes from t = {low:,.0f} on: {slopes}. The bound's is -1."
    )
    columns = ["", "t", "F(mean of copies) - F*", "bound", "bound / measured"]
    return [constants, Sheet("Measured gap and bound", columns, lines, [note])]
