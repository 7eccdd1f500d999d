"""Server optimizers: how the global parameters follow the mean of the clients' models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.options import Bounds, Option, arguments, check_options
from fedcat.core.registry import Registry, accepts_call


class ServerOptimizer(ABC):
    """Moves the global parameters once the clients' models have been averaged.

    Parameters of ``__init__`` with a default are the optimizer's options, set by ``server_options``; those of the
    registered optimizers are also settings and flags called ``server_lr`` and so on. One object serves one run.
    """

    @abstractmethod
    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Return the next global parameters.

        Parameters
        ----------
        row : Tensor
            The global parameters that the clients started from, [P].
        mean : Tensor
            The mean of the parameters that came back, [P].
        """

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue from here."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore from `state`."""


SERVER_OPTIMIZERS: Registry[Callable[..., ServerOptimizer]] = Registry("server_optimizer")

ServerLr = Annotated[float, Option("learning rate of the server optimizer", Bounds(above=0))]
ServerMomentum = Annotated[float, Option("momentum, or Adam's first beta", Bounds(at_least=0, below=1))]


@SERVER_OPTIMIZERS.register("mean", "take the mean itself, or go a fraction lr of the way to it")
class Mean(ServerOptimizer):
    """x += lr * (mean - x); at lr = 1 the mean itself, bit for bit."""

    def __init__(self, lr: ServerLr = 1.0) -> None:
        self.lr = lr

    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Return the mean, or a point on the line through it."""
        return mean if self.lr == 1 else row + self.lr * (mean - row)


@SERVER_OPTIMIZERS.register("momentum", "heavy-ball momentum on the mean change (FedAvgM, Hsu et al. 2019)")
class Momentum(ServerOptimizer):
    """v = momentum * v + (mean - x); x += lr * v."""

    def __init__(self, lr: ServerLr = 1.0, momentum: ServerMomentum = 0.9) -> None:
        self.lr, self.momentum = lr, momentum
        self.v: Tensor | None = None

    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Move along the decaying sum of changes."""
        change = mean - row
        self.v = change if self.v is None else self.momentum * self.v + change
        return row + self.lr * self.v

    def state(self) -> dict[str, Any]:
        """Return the momentum buffer."""
        return {} if self.v is None else {"v": self.v}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.v = state.get("v")


@SERVER_OPTIMIZERS.register("adam", "Adam on the mean change, without bias correction (FedAdam, Reddi et al. 2021)")
class Adam(ServerOptimizer):
    """m and v are running means of the change and of its square; x += lr * m / (sqrt(v) + tau).

    As in Algorithm 2 of Reddi et al. there is no bias correction; v starts at tau squared, m at zero.
    """

    def __init__(
        self,
        lr: ServerLr = 0.01,
        momentum: ServerMomentum = 0.9,
        beta2: Annotated[float, Option("Adam's second beta", Bounds(at_least=0, below=1))] = 0.99,
        tau: Annotated[float, Option("Adam's tau, added to the square root", Bounds(above=0))] = 1e-3,
    ) -> None:
        self.lr, self.momentum, self.beta2, self.tau = lr, momentum, beta2, tau
        self.m: Tensor | None = None
        self.v: Tensor | None = None

    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Move by the running mean of changes, each coordinate divided by the running size of its changes."""
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
        """Restore from `state`."""
        self.m, self.v = state.get("m"), state.get("v")


@dataclass(frozen=True)
class ServerOptimizerChoice:
    """The server optimizer that the user chose, if any.

    Attributes
    ----------
    name : str
        The optimizer's name; empty for the method's default.
    options : mapping
        The options that were set.
    factory : callable, optional
        The class or function that makes it; by default the one registered under `name`.
    """

    name: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    factory: Any = None

    def make(self, default: str | None, method: str) -> ServerOptimizer:
        """Return the optimizer for a method whose default is `default`, or None if the method takes none."""
        if default is None:
            if self.name or self.options:
                named = "server_optimizer" if self.name else f"server_{next(iter(self.options))}"
                raise SettingError(f"{named} cannot be set: the method {method} takes no server optimizer")
            return Mean()
        if self.name and default not in ("mean", self.name):
            raise SettingError(
                f"server_optimizer must be {default!r} or left out for the method {method}, got {self.name!r}"
            )
        name = self.name or default
        factory = SERVER_OPTIMIZERS.get(name) if self.factory is None else self.factory
        missing = ", ".join(sorted(getattr(factory, "__abstractmethods__", ())))
        if missing:
            raise SettingError(f"server_optimizer {name!r} must define {missing}")
        if not callable(factory):
            raise SettingError(f"server_optimizer must be a name, a class or a function, got {factory!r}")
        if not accepts_call(factory):
            raise SettingError(
                f"server_optimizer {name!r} must be a ServerOptimizer class whose parameters have defaults"
            )
        checked = check_options("server_optimizer", name, factory, self.options, prefix="server_")
        made = factory(**arguments(factory, checked))
        if not isinstance(made, ServerOptimizer):
            raise SettingError(f"server_optimizer {name!r} must make a ServerOptimizer, got {type(made).__name__}")
        return made
