"""Local optimizers: how a client steps along its gradient. Every hop begins with a fresh one."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from fedcat.core.errors import SettingError
from fedcat.core.options import Bounds, Option, arguments, check_options
from fedcat.core.registry import Registry

OPTIMIZERS: Registry[Any] = Registry("optimizer")

Beta1 = Annotated[float, Option("Adam's decay of the mean gradient", Bounds(at_least=0, below=1))]
Beta2 = Annotated[float, Option("Adam's decay of the mean squared gradient", Bounds(at_least=0, below=1))]
Eps = Annotated[float, Option("Adam's epsilon, added to the square root", Bounds(above=0))]


State = Sequence[Tensor]
"""The tensors that an optimizer keeps from step to step, [R, P]."""


class LocalOptimizer(ABC):
    """An optimizer of local training, without its state: equal ones of several runs train in one launch.

    Attributes
    ----------
    slots : int
        How many tensors of the size of the parameters it keeps from step to step.
    stackable : bool
        Whether `step` is defined, so that the rows of several clients can train as one stack.
    """

    slots: ClassVar[int] = 0
    stackable: ClassVar[bool] = True

    @abstractmethod
    def of(self, parameters: Sequence[Tensor], lr: float, momentum: float, weight_decay: float) -> Optimizer:
        """Return PyTorch's optimizer for the parameters of one client."""

    def step(
        self,
        p: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        t: Tensor,
        lr: Tensor,
        momentum: Tensor,
        decay: Tensor | None,
    ) -> Tensor:
        """Return the rows `p` [R, P] after step number `t`, from 1; `p` and `state` may be changed in place.

        It is what the optimizer of `of` does, as algebra on rows; `lr`, `momentum` and `decay` are columns [R, 1].
        """
        raise SettingError(f"optimizer {type(self).__name__} cannot train stacks")


@OPTIMIZERS.register("sgd", "SGD with the settings momentum and weight_decay; the fastest: fused kernels")
@dataclass(frozen=True)
class Sgd(LocalOptimizer):
    """v = momentum * v + g + decay * p; p -= lr * v."""

    slots: ClassVar[int] = 1

    def of(self, parameters: Sequence[Tensor], lr: float, momentum: float, weight_decay: float) -> Optimizer:
        """Return `torch.optim.SGD`."""
        fused = True if parameters[0].device.type == "cpu" else None
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=fused)

    def step(
        self,
        p: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        t: Tensor,
        lr: Tensor,
        momentum: Tensor,
        decay: Tensor | None,
    ) -> Tensor:
        """Take a step."""
        (v,) = state
        v.mul_(momentum).add_(g if decay is None else g + decay * p)
        return p.sub_(lr * v)


@OPTIMIZERS.register("adam", "Adam with weight_decay in the gradient; momentum has no effect")
@dataclass(frozen=True)
class Adam(LocalOptimizer):
    """m, v are running means of g and g^2; p -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)."""

    slots: ClassVar[int] = 2
    decoupled: ClassVar[bool] = False

    beta1: Beta1 = 0.9
    beta2: Beta2 = 0.999
    eps: Eps = 1e-8

    def of(self, parameters: Sequence[Tensor], lr: float, momentum: float, weight_decay: float) -> Optimizer:
        """Return `torch.optim.Adam` or `torch.optim.AdamW`."""
        kind = torch.optim.AdamW if self.decoupled else torch.optim.Adam
        return kind(parameters, lr=lr, betas=(self.beta1, self.beta2), eps=self.eps, weight_decay=weight_decay)

    def step(
        self,
        p: Tensor,
        g: Tensor,
        state: Sequence[Tensor],
        t: Tensor,
        lr: Tensor,
        momentum: Tensor,
        decay: Tensor | None,
    ) -> Tensor:
        """Take a step."""
        m, v = state
        if decay is not None and self.decoupled:
            p = p * (1 - lr * decay)
        elif decay is not None:
            g = g + decay * p
        m.mul_(self.beta1).add_(g, alpha=1 - self.beta1)
        v.mul_(self.beta2).addcmul_(g, g, value=1 - self.beta2)
        first, second = ((1 - beta ** t.double()).to(p.dtype) for beta in (self.beta1, self.beta2))  # float32 cancels
        root = (v / second).sqrt_().add_(self.eps)
        return p - lr / first * m / root


@OPTIMIZERS.register("adamw", "Adam with decoupled weight_decay; momentum has no effect")
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam whose weight decay does not pass through the gradient: p *= 1 - lr * decay before the step."""

    decoupled: ClassVar[bool] = True


@dataclass(frozen=True)
class TorchOptimizer(LocalOptimizer):
    """Any class like those of `torch.optim`; it trains one client after another."""

    stackable: ClassVar[bool] = False

    factory: Any
    options: tuple[tuple[str, Any], ...] = ()

    def of(self, parameters: Sequence[Tensor], lr: float, momentum: float, weight_decay: float) -> Optimizer:
        """Return the optimizer; the setting weight_decay is passed to classes that take it."""
        given = dict(self.options)
        if "weight_decay" in inspect.signature(self.factory).parameters:
            given["weight_decay"] = weight_decay
        made: Optimizer = self.factory(parameters, lr=lr, **given)
        return made


SETTINGS = ("lr", "weight_decay")
"""Parameters of PyTorch's optimizers that are settings."""


def make_optimizer(name: str, part: Any, given: Mapping[str, Any]) -> LocalOptimizer:
    """Return a local optimizer from a class and the options that the user set."""
    for option in SETTINGS:
        if option in given:
            raise SettingError(f"{option} is a setting, not an option of the optimizer: set {option} itself")
    if isinstance(part, LocalOptimizer):
        return part
    if not isinstance(part, type) or not issubclass(part, (LocalOptimizer, Optimizer)):
        raise SettingError(f"optimizer must be a name or a class of torch.optim, got {part!r}")
    checked = check_options("optimizer", name, part, given, prefix="optimizer_")
    if issubclass(part, LocalOptimizer):
        return part(**arguments(part, checked))
    closure = inspect.signature(part.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise SettingError(f"optimizer {name!r} evaluates the loss several times per step, which clients do not do")
    made = TorchOptimizer(part, tuple(checked.items()))
    try:
        trial = torch.zeros(2, requires_grad=True)
        optimizer = made.of([trial], 0.1, 0.0, 0.0)
        trial.grad = torch.ones(2)
        optimizer.step()
    except (RuntimeError, ValueError, TypeError) as error:
        raise SettingError(f"optimizer {name!r} cannot train: {error}") from error
    return made
