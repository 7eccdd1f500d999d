"""The server's step: what becomes of the mean that a method's aggregation gives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcat.core.errors import SettingError, need
from fedcat.core.options import arguments, options
from fedcat.core.registry import Registry, takes


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
        need("server_lr", lr, 0, above=True)
        self.lr = lr

    def step(self, row: Tensor, mean: Tensor) -> Tensor:
        """Return the mean, or a point on the way to it or beyond."""
        return mean if self.lr == 1 else row + self.lr * (mean - row)


@SERVER_STEPS.register("momentum", "heavy-ball momentum on the mean change (FedAvgM, Hsu et al. 2019)")
class Momentum(ServerStep):
    """v = momentum * v + (mean - x); x += lr * v."""

    def __init__(self, lr: float = 1.0, momentum: float = 0.9) -> None:
        need("server_lr", lr, 0, above=True)
        need("server_momentum", momentum, 0, 1, below=True)
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
        need("server_lr", lr, 0, above=True)
        need("server_momentum", momentum, 0, 1, below=True)
        need("server_beta2", beta2, 0, 1, below=True)
        need("server_tau", tau, 0, above=True)
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


OPTIONS = ("lr", "momentum", "beta2", "tau")
"""Options of steps that are settings, called server_lr and so on."""
SETTINGS = ("server", *(f"server_{option}" for option in OPTIONS))
"""The settings of the server's step."""


@dataclass(frozen=True)
class ServerChoice:
    """What a user has chosen of the server's step: perhaps nothing.

    Attributes
    ----------
    name : str
        The step's name; empty for the method's own.
    options : mapping
        Those of `OPTIONS` that were set.
    part : callable, optional
        The user's own step, or what makes one.
    """

    name: str = ""
    options: Mapping[str, float] = field(default_factory=dict)
    part: Any = None

    def make(self, own: str | None, method: str) -> ServerStep:
        """Return the step for a method whose own step is called `own`, None where it takes none."""
        if own is None:
            named = ["server"] if self.name else [f"server_{option}" for option in self.options]
            if named:
                raise SettingError(f"{named[0]} cannot be set: the method {method} takes no server's step")
            return Mean()
        if self.name and own not in ("mean", self.name):
            raise SettingError(f"server must be {own!r} or left out for the method {method}, got {self.name!r}")
        name = self.name or own
        maker = SERVER_STEPS.get(name) if self.part is None else self.part
        missing = ", ".join(sorted(getattr(maker, "__abstractmethods__", ())))
        if missing:
            raise SettingError(f"server {name!r} must define {missing}")
        if not callable(maker):
            raise SettingError(f"server must be a name, a ServerStep class or what makes one, got {maker!r}")
        if not takes(maker):
            raise SettingError(f"server {name!r} must be a ServerStep class whose arguments have defaults")
        for option in self.options:
            if option not in options(maker):
                known = ", ".join(f"server_{o}" for o in options(maker) if o in OPTIONS) or "none of them"
                raise SettingError(f"server_{option} has no effect on the server's step {name!r}, which takes {known}")
        step = maker(**arguments("server", name, maker, self.options))
        if not isinstance(step, ServerStep):
            raise SettingError(f"server {name!r} must make a ServerStep, got {type(step).__name__}")
        return step


def own_step(factory: Any) -> str | None:
    """Return the name of the step that what `factory` makes has of its own, None where it takes none.

    It is empty for a function, of which that cannot be told before it has made its method.
    """
    found: str | None = getattr(getattr(factory, "func", factory), "server_step", "")
    return found


def idle_settings(own: str | None, settings: Mapping[str, Any]) -> set[str]:
    """Return those of the settings of the server's step that have no effect on a method whose own step is `own`."""
    names = {name for name in SETTINGS if settings.get(name) not in (None, "")}
    server = settings.get("server") or own
    if own == "" or not names:
        return set()
    if own is None or (own != "mean" and server != own):
        return names
    step: Any = SERVER_STEPS.get(server) if isinstance(server, str) else server
    taken = {f"server_{option}" for option in options(step)}
    return {name for name in names if name not in taken and (name != "server" or own != "mean")}
