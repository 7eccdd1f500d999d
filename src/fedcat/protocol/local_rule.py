"""The client's side of a method: what a client minimizes, and how its steps differ from plain SGD."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from torch.nn import functional

from fedcat.models.layout import BoundNet, Tensors
from fedcat.protocol.hop import Hop

if TYPE_CHECKING:
    from fedcat.protocol.task import Task


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs, labels and, if the batch is padded, a mask of the real samples."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of one value per sample, over the real samples only."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum()


@dataclass(frozen=True, eq=False)
class LossInputs:
    """What a loss may use besides the net and the batch.

    Attributes
    ----------
    start : Tensor
        The parameters that the client started from, [P]; ``net.at(start)`` is the net with them.
    sent, memory : mapping of str to Tensor
        See `Hop`.
    drawn : mapping of str to Tensor
        This step's part of what `LocalRule.draw` returned.
    """

    start: Tensor
    sent: Tensors
    memory: Tensors
    drawn: Tensors


@dataclass(frozen=True, eq=False)
class LocalRule:
    """Plain SGD on the cross entropy; a method overrides what it does differently.

    A rule is a frozen dataclass: equal rules of several runs compare equal and run as one. What changes from round to
    round travels in `sent`. `loss`, `draw` and `report` see one client. The other hooks are row algebra over several
    clients at once: `p`, `g`, `start` and `end` are [R, P], parameters only; `steps`, `lr` and `momentum` are columns
    [R, 1]; every tensor of `sent` and `memory` has a leading dimension R. They return new tensors and modify none in
    place.
    """

    def draw(self, rng: np.random.Generator, task: Task, hop: Hop, steps: int) -> dict[str, Tensor]:
        """Return the random numbers that `loss` needs: tensors with a leading dimension `steps`."""
        return {}

    def loss(self, net: BoundNet, batch: Batch, inputs: LossInputs) -> Tensor:
        """Return the loss of one batch on one client. It runs under `torch.vmap`: no branches on values."""
        return batch.mean(functional.cross_entropy(net.logits(batch.x), batch.y, reduction="none"))

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

    def loss_key(self) -> Hashable:
        """Return a key that tells losses apart: hops with the same key can share a launch."""
        return self if self.own_loss else "cross entropy"
