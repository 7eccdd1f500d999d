"""The server's step: what becomes of the mean that a method's aggregation gives."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedcat.errors import SettingError
from fedcat.registry import Registry


class ServerStep(ABC):
    """Moves the global parameters when the devices' models have been averaged.

    A step's parameters with a default are its options: those called `lr`, `momentum`, `beta2` and `tau` are set by the
    settings ``server_lr`` and so on. One object serves one simulation.
    """

    @abstractmethod
    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Return the next global parameters.

        Parameters
        ----------
        row : Tensor
            The global parameters that the devices started from, [P].
        mean : Tensor
            The mean of what came back, [P].
        """

    def state(self) -> dict[str, Any]:
        """Return what a restored step needs."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Go on from a state."""


SERVER_STEPS: Registry[Callable[..., ServerStep]] = Registry("server")


@SERVER_STEPS.register("mean", "the mean itself, or a share lr of the way to it")
class Mean(ServerStep):
    """x += lr * (mean - x); at lr = 1 the mean itself, bit for bit."""

    def __init__(self, lr: float = 1.0) -> None:
        _positive("lr", lr)
        self.lr = lr

    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Return the mean, or a point on the way to it or beyond."""
        return mean if self.lr == 1 else row + self.lr * (mean - row)


@SERVER_STEPS.register("momentum", "heavy-ball momentum on the mean change (FedAvgM, Hsu et al. 2019)")
class Momentum(ServerStep):
    """v = momentum * v + (mean - x); x += lr * v."""

    def __init__(self, lr: float = 1.0, momentum: float = 0.9) -> None:
        _positive("lr", lr)
        _share("momentum", momentum)
        self.lr, self.momentum = lr, momentum
        self.v: Tensor | None = None

    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Move along the running sum of changes."""
        change = mean - row
        self.v = change if self.v is None else self.momentum * self.v + change
        return row + self.lr * self.v

    def state(self) -> dict[str, Any]:
        """Return the running sum."""
        return {} if self.v is None else {"v": self.v}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.v = state.get("v")


@SERVER_STEPS.register("adam", "Adam on the mean change, without bias correction (FedAdam, Reddi et al. 2021)")
class Adam(ServerStep):
    """m and v are running means of the change and of its square; x += lr * m / (sqrt(v) + tau).

    As in Algorithm 2 of Reddi et al. there is no bias correction; v starts at tau squared, m at zero.
    """

    def __init__(self, lr: float = 0.01, momentum: float = 0.9, beta2: float = 0.99, tau: float = 1e-3) -> None:
        _positive("lr", lr)
        _share("momentum", momentum)
        _share("beta2", beta2)
        _positive("tau", tau)
        self.lr, self.momentum, self.beta2, self.tau = lr, momentum, beta2, tau
        self.m: Tensor | None = None
        self.v: Tensor | None = None

    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Move by the running mean of changes, each coordinate over the running size of its changes."""
        change = mean - row
        m = torch.zeros_like(row) if self.m is None else self.m
        v = torch.full_like(row, self.tau**2) if self.v is None else self.v
        self.m = self.momentum * m + (1 - self.momentum) * change
        self.v = self.beta2 * v + (1 - self.beta2) * change.square()
        return row + self.lr * self.m / (self.v.sqrt() + self.tau)

    def state(self) -> dict[str, Any]:
        """Return the running means."""
        return {} if self.m is None else {"m": self.m, "v": self.v}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.m, self.v = state.get("m"), state.get("v")


def _positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise SettingError(f"server_{name} must be > 0 and finite, got {value:g}")


def _share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise SettingError(f"server_{name} must be at least 0 and below 1, got {value:g}")
