"""The device side of a method: what a device minimises, and how that differs from plain SGD."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedcat.data.federation import Federation
from fedcat.data.pool import Pool
from fedcat.models.layout import Bound, Layout
from fedcat.protocol.hop import Hop, Tensors


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs, labels and, where the batch is padded, which of them are real."""

    x: Tensor
    y: Tensor
    mask: Tensor | None = None

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean of one value a sample, over the real samples only."""
        if self.mask is None:
            return values.mean()
        return (values * self.mask).sum() / self.mask.sum()


@dataclass(frozen=True, eq=False)
class Beside:
    """What a loss may look at beside the net and the batch.

    Attributes
    ----------
    start : Tensor
        The parameters that the device started from, [P]; ``net.at(start)`` is the net on them.
    sent, memory : mapping of str to Tensor
        See `Hop`.
    drawn : mapping of str to Tensor
        This step's part of what `LocalRule.draw` gave.
    """

    start: Tensor
    sent: Tensors
    memory: Tensors
    drawn: Tensors


@dataclass(frozen=True, eq=False)
class LocalRule:
    """Plain SGD on the cross entropy; a method overrides what it does otherwise.

    A rule is a frozen dataclass, so that equal rules of several simulations are known to be equal and run as one; what
    changes from round to round travels in `sent`. `loss`, `draw` and `report` see
    one device. The other hooks are row algebra over several devices at once: `p`, `g`, `start` and `end` are [R, P],
    parameters only, `steps`, `lr` and `momentum` are columns [R, 1], and every tensor of `sent` and `memory` has a
    leading dimension R. They return new tensors and change none in place.
    """

    def draw(self, rng: np.random.Generator, task: Task, hop: Hop, steps: int) -> dict[str, Tensor]:
        """Return the randomness that `loss` needs: tensors with a leading dimension `steps`."""
        return {}

    def loss(self, net: Bound, batch: Batch, beside: Beside) -> Tensor:
        """Return the loss of one batch on one device. It runs under `torch.vmap`: no branches on values."""
        return batch.mean(functional.cross_entropy(net.logits(batch.x), batch.y, reduction="none"))

    def gradient(self, g: Tensor, p: Tensor, start: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the gradient that the optimiser gets, before clipping, weight decay and momentum."""
        return g

    def after(self, p: Tensor, lr: Tensor, sent: Tensors, memory: Tensors) -> Tensor:
        """Return the parameters after the optimiser's step."""
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
        """Return what the devices upload beside their rows, and what they keep, after the last step."""
        return {}, {}

    def report(self, task: Task, hop: Hop) -> dict[str, Tensor]:
        """Return what a device uploads about its own data, such as its label counts."""
        return {}

    @property
    def own_loss(self) -> bool:
        """Whether the rule has a loss of its own."""
        return type(self).loss is not LocalRule.loss

    def loss_key(self) -> Hashable:
        """Return what tells losses apart: hops of the same key can share a launch."""
        return self if self.own_loss else "cross entropy"


@dataclass(frozen=True, eq=False)
class Task:
    """The device side of one simulation: what an engine needs to train a hop.

    Attributes
    ----------
    seed : int
        The simulation's seed.
    layout : Layout
        The net.
    federation : Federation
        Who holds which samples.
    pool : Pool
        The training samples, on the engine's device.
    rule : LocalRule
        The method's device side.
    batch_size : int
        Samples in a batch; the last one of an epoch may be shorter.
    momentum, weight_decay : float
        Of the device's SGD, which starts afresh at each hop.
    clip : float, optional
        The largest norm of a gradient.
    join_lone : bool
        Whether a last batch of a single sample joins the one before, for nets that cannot train on one.
    """

    seed: int
    layout: Layout
    federation: Federation
    pool: Pool
    rule: LocalRule
    batch_size: int
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    join_lone: bool = False

    def samples(self, device: int) -> int:
        """Return how many samples `device` holds."""
        return int(self.federation.sizes[device])

    @property
    def padding(self) -> int:
        """The length to which batches are filled up where it must not depend on what else is trained: two or more."""
        return max(2, min(self.batch_size + self.join_lone, int(self.federation.sizes.max())))


def stack(mappings: Sequence[Tensors]) -> dict[str, Tensor]:
    """Stack equally named tensors of several hops; one that all hops share is expanded, not copied."""
    stacked = {}
    if any(mapping.keys() != mappings[0].keys() for mapping in mappings):
        raise ValueError(f"hops of one rule must bring the same tensors, got {[sorted(m) for m in mappings]}")
    for name, first in mappings[0].items():
        parts = [m[name] for m in mappings]
        shared = all(part is first for part in parts)
        stacked[name] = first.expand(len(parts), *first.shape) if shared else torch.stack(parts)
    return stacked
