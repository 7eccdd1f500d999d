"""The protocol of gradients: whatever computes the losses and gradients of a stack of rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedcat.data.augment import Augment
from fedcat.data.pool import Pool
from fedcat.engines.step_buffers import StepBuffers
from fedcat.models.layout import Layout
from fedcat.models.losses import LossFunction, cross_entropy
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import taken

PLAIN = LocalRule()

Inputs = dict[str, Any]
"""What a rule's own loss gets besides the net and the batch, by the names of `LossInputs`, stacked."""


def no_inputs(rows: Tensor) -> Inputs:
    """Return the inputs of losses that need none."""
    return {"start": rows.new_empty(len(rows), 0), "sent": {}, "memory": {}, "local": {}, "drawn": {}}


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a stack: its rows, and a batch for each.

    Attributes
    ----------
    p : Tensor
        Parameters, [R, P].
    buffers : Tensor
        The nets' float buffers, [R, D - P].
    index : Tensor
        Positions of the samples in the pool, [R, B]; -1 where a batch is padded.
    padded : bool
        Whether any batch may be padded.
    inputs : mapping
        What the rule's own loss gets, see `Inputs`.
    augment, numbers : Augment, Tensor
        Random changes of the samples, and the random numbers for them, [R, B, numbers]; None if there are none.
    """

    p: Tensor
    buffers: Tensor
    index: Tensor
    padded: bool = True
    inputs: Inputs = field(default_factory=dict)
    augment: Augment | None = None
    numbers: Tensor | None = None

    def samples(self, pool: Pool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of the batches, [R, B, ...]; padded places hold any sample."""
        index = self.index.clamp(min=0)
        x, y = pool.inputs(index, dtype), pool.targets(index, dtype)
        return x if self.augment is None or self.numbers is None else self.augment(x, self.numbers), y

    def mask(self) -> Tensor | None:
        """Return 1.0 where there is a sample and 0.0 where a batch is padded, [R, B]; None if none is."""
        return (self.index >= 0).to(self.p.dtype) if self.padded else None


Found = tuple[Tensor, Tensor, Tensor]
"""Losses [R], gradients [R, P] and the new buffers [R, D - P]."""


class Gradients(ABC):
    """Computes the losses and gradients of rows, each on its own batch.

    Parameters
    ----------
    layout : Layout
        The net.
    pool : Pool
        The samples.
    precision : str
        ``fp32``, ``tf32`` or ``bf16``.
    rule, loss : LocalRule, callable
        The rule, whose loss is computed, and the loss that the user chose.

    Attributes
    ----------
    name : str
        What a run's summary calls it.
    independent : bool
        Whether a row's bits never depend on the other rows.
    """

    name: str
    independent: bool = False

    def __init__(
        self,
        layout: Layout,
        pool: Pool,
        precision: str = "fp32",
        rule: LocalRule = PLAIN,
        loss: LossFunction = cross_entropy,
    ) -> None:
        self.layout, self.pool, self.precision, self.rule, self.loss = layout, pool, precision, rule, loss

    @abstractmethod
    def of(self, step: Step) -> Found:
        """Return losses, gradients and new buffers."""

    def on(self, buffers: StepBuffers, inputs: Inputs, augment: Augment, numbers: Tensor | None = None) -> InPlace:
        """Return the same computation on fixed memory, so that it can be captured.

        `inputs` and `numbers` are those of all rows and all steps, [R, S, ...] where they differ from step to step.
        """
        return Gathered(self, buffers, inputs, augment, numbers)


class InPlace(ABC):
    """Gradients on the fixed memory of captured steps.

    Attributes
    ----------
    losses : Tensor
        Sums of the steps' losses, [R, parts]; set them to zero before the first step.
    """

    losses: Tensor

    def __init__(self, buffers: StepBuffers) -> None:
        self.buffers = buffers

    @abstractmethod
    def gradients(self, ahead: int, width: int) -> None:
        """Write the gradients of the step `ahead` steps after the counter, for the first `width` rows in `order`."""

    def descend(self, ahead: int, width: int) -> None:
        """Take the step of SGD."""
        at, active = self.buffers, self.buffers.active(ahead)
        at.v.copy_(torch.where(active, at.v * at.momentum + (at.g + at.decay * at.p), at.v))
        at.p.sub_(torch.where(active, at.rate(ahead) * at.v, 0.0))


class Gathered(InPlace):
    """Any gradients on fixed memory: gathers the rows that still train, and scatters what was computed."""

    def __init__(
        self, gradients: Gradients, buffers: StepBuffers, inputs: Inputs, augment: Augment, numbers: Tensor | None
    ) -> None:
        super().__init__(buffers)
        self.source, self.inputs, self.augment, self.numbers = gradients, inputs, augment, numbers
        self.losses = buffers.p.new_zeros(len(buffers.p), 1)

    def gradients(self, ahead: int, width: int) -> None:
        """Gather, compute, scatter."""
        at = self.buffers
        which, place, active = at.which(ahead, width)
        index = torch.where(active, at.index.flatten(0, 1)[place].long(), 0)  # rows that are done train on anything
        numbers = None if self.numbers is None else self.numbers.flatten(0, 1)[place]
        inputs = at_rows(self.inputs, which, place)
        step = Step(at.p[which], at.buffers[which], index, True, inputs, self.augment, numbers)
        losses, g, buffers = self.source.of(step)
        at.g[which] = g.to(at.g.dtype)
        self.losses[which] += torch.where(active, losses[:, None].to(self.losses.dtype), 0.0)
        if buffers.shape[1]:
            at.buffers[which] = torch.where(active, buffers, at.buffers[which])


def at_rows(inputs: Inputs, which: Tensor, place: Tensor) -> Inputs:
    """Return a loss's inputs for some rows at their current steps."""
    return {
        "start": inputs["start"][which],
        **{name: taken(inputs[name], which) for name in ("sent", "memory", "local")},
        "drawn": {n: t.flatten(0, 1)[place] for n, t in inputs["drawn"].items()},
    }
