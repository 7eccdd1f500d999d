"""The client's side of a method: what a client minimizes, and how its steps differ from plain SGD."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.models.layout import BoundNet, Tensors
from fedcat.models.losses import LossFunction, cross_entropy
from fedcat.protocol.hop import Hop

if TYPE_CHECKING:
    from fedcat.protocol.task import Task


@dataclass(frozen=True, eq=False)
class Batch:
    """A batch of one client.

    Attributes
    ----------
    x : Tensor
        The inputs, [B, ...].
    y : Tensor
        The targets, [B, ...]; class labels are [B].
    mask : Tensor or None
        1.0 where there is a sample and 0.0 where the batch is padded, [B]; None if it is not padded. What `x` and `y`
        hold in padded places is arbitrary.
    loss : callable
        The loss that the user chose, see `losses`.
    """

    x: Tensor
    y: Tensor
    mask: Tensor | None = None
    loss: LossFunction = cross_entropy

    def losses(self, outputs: Tensor) -> Tensor:
        """Return the loss of each sample, [B], by the loss that the user chose; by default the cross entropy."""
        return self.loss(outputs, self.y)

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of one value per sample, over the real samples only."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self._real

    @cached_property
    def _real(self) -> Tensor:
        """The number of real samples, counted once for all means of a loss."""
        assert self.mask is not None
        return self.mask.sum()


class ReadOnly(Mapping[str, Tensor]):
    """Tensors by name that a rule may read but not replace."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise KeyError(f"there is no tensor {name!r}, only: {', '.join(self._tensors) or 'none'}")
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __setitem__(self, name: str, value: object) -> NoReturn:
        raise SettingError(_no_state(f"set {name!r}"))


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss may use besides the net and the batch.

    Attributes
    ----------
    start : Tensor
        The parameters that the client started from, [P]; ``net.at(start)`` is the net with them.
    sent, memory : mapping of str to Tensor
        See `Hop`.
    local : mapping of str to Tensor
        What `LocalRule.local` returned for this client.
    drawn : mapping of str to Tensor
        This step's part of what `LocalRule.draw` returned.
    """

    start: Tensor
    sent: Tensors
    memory: Tensors
    local: Tensors
    drawn: Tensors

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "start":
                object.__setattr__(self, field.name, ReadOnly(getattr(self, field.name)))


@dataclass(frozen=True, eq=False)
class LocalRule:
    """Plain local training on the loss that the user chose; a method overrides what it does differently.

    A rule is a frozen dataclass: equal rules of several runs compare equal and run as one. What changes from round to
    round travels in `sent`. `loss`, `draw`, `local` and `report` see one client. The other hooks are row algebra over
    several clients at once: `p`, `g`, `start` and `end` are [R, P], parameters only; `steps`, `lr` and `momentum` are
    columns [R, 1]; every tensor of `sent` and `memory` has a leading dimension R. They return new tensors. A rule has
    no state that changes from step to step: `sent` and `memory` are read-only, and what is changed in place is an
    error. `finish` returns what a client keeps for its next hop.

    Attributes
    ----------
    needs_sgd : bool
        Whether the rule is made for steps of SGD, so that another local optimizer is refused.
    elementwise : bool
        Whether `gradient` and `after` add, subtract and multiply numbers at the same place only, with no sums or norms
        over a row. Exact mode then need not run them row by row. A class that overrides one of them says it anew.
    """

    needs_sgd: ClassVar[bool] = False
    elementwise: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        own = vars(cls)
        if "elementwise" not in own and ("gradient" in own or "after" in own):
            cls.elementwise = False

    def draw(self, rng: np.random.Generator, task: Task, hop: Hop, steps: int) -> dict[str, Tensor]:
        """Return the random numbers that `loss` needs: tensors with a leading dimension `steps`.

        All clients draw the same names and shapes. `rng` has its own key and cannot be spawned. For a GPU, several
        threads draw for several clients.
        """
        return {}

    def local(self, task: Task, client: int) -> dict[str, Tensor]:
        """Return what `loss` needs to know about the client's own data, such as its label counts. It does not travel.

        Tensors of the same name have the same shape on every client.
        """
        return {}

    def loss(self, net: BoundNet, batch: Batch, inputs: LossInputs) -> Tensor:
        """Return the loss of one batch on one client, a scalar.

        A batch may be padded: average one loss per sample with `Batch.mean`, which leaves out padded places. It runs
        under `torch.vmap`: no branches on values.
        """
        return batch.mean(batch.losses(net.logits(batch.x)))

    def gradient(self, g: Tensor, p: Tensor, start: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the gradient that the optimizer gets, before clipping, weight decay and momentum."""
        return g

    def after(self, p: Tensor, lr: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the parameters after the optimizer's step."""
        return p

    def finish(
        self,
        start: Tensor,
        end: Tensor,
        steps: Tensor,
        lr: Tensor,
        momentum: Tensor,
        sent: Tensors,
        memory: Tensors,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what the clients upload besides their rows, and what they keep, after the last step."""
        return {}, {}

    def report(self, task: Task, hop: Hop) -> dict[str, Tensor]:
        """Return what a client uploads about its own data, such as its label counts."""
        return {}

    @property
    def own_loss(self) -> bool:
        """Whether the rule overrides `loss`."""
        return type(self).loss is not LocalRule.loss


def call_hook(rule: LocalRule, hook: str, *arguments: Any) -> Any:
    """Call a hook with tensors and read-only mappings of tensors; raise an error if it changes one in place.

    Only the first argument of `gradient`, the gradient, may be changed in place.
    """
    given = [ReadOnly(value) if isinstance(value, Mapping) else value for value in arguments]
    with unchanged(rule, hook, *given[hook == "gradient" :]):
        return getattr(rule, hook)(*given)


@contextmanager
def protected(rule: LocalRule, hook: str, hop: Hop) -> Iterator[Hop]:
    """Yield a hop with read-only tensors for a hook; raise an error if the hook changes one in place."""
    with unchanged(rule, hook, hop.start, hop.sent, hop.memory):
        yield replace(hop, sent=ReadOnly(hop.sent), memory=ReadOnly(hop.memory))


@contextmanager
def unchanged(rule: LocalRule, hook: str, *values: Tensor | Tensors) -> Iterator[None]:
    """Raise an error if a tensor was changed in place: some engines pass copies, so the change would be lost."""
    named = [part for value in values for part in (value.items() if isinstance(value, Mapping) else [("", value)])]
    before = [tensor._version for _, tensor in named]

    def error(what: str) -> SettingError:
        return SettingError(f"{type(rule).__name__}.{hook}: {_no_state(f'changed {what} in place')}")

    try:
        yield
    except RuntimeError as raised:
        if "single memory location" in str(raised):  # PyTorch refuses it for a tensor that all clients of a stack share
            raise error("a tensor") from raised
        raise
    for (name, tensor), version in zip(named, before, strict=True):
        if tensor._version != version:
            raise error(repr(name) if name else "one of its arguments")


def _no_state(what: str) -> str:
    return (
        f"a rule {what}, which is read-only; return new tensors, and return what the client keeps for its next hop "
        "from finish"
    )
