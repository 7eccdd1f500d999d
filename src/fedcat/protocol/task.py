"""A task: all that an engine needs to know to train the hops of one run."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.data.augment import Augment
from fedcat.data.federation import Federation
from fedcat.data.pool import Pool
from fedcat.models.layout import Layout, Tensors
from fedcat.models.losses import LossFunction, cross_entropy
from fedcat.protocol.local_optimizer import LocalOptimizer, Sgd
from fedcat.protocol.local_rule import LocalRule

RowIndex = Tensor | NDArray[np.int64] | slice
"""Which rows of stacked tensors."""


@dataclass(frozen=True, eq=False)
class Task:
    """The client side of one run: what an engine needs to train a hop.

    Attributes
    ----------
    seed : int
        The run's seed.
    layout : Layout
        The net.
    federation : Federation
        Who holds which samples.
    pool : Pool
        The training samples, on the engine's device.
    rule : LocalRule
        The method's client side.
    batch_size : int
        Samples per batch; the last batch of an epoch may be shorter.
    momentum, weight_decay : float
        Of the local optimizer, which starts afresh at each hop.
    clip : float, optional
        The largest norm of a gradient.
    lr_decay : float
        Decay of the learning rate per local step: a hop's step s uses ``hop.lr / (1 + lr_decay * t)``, where
        t = round * steps + s if the hop takes so many steps.
    replacement : bool
        Whether batches are drawn independently, with replacement, instead of every sample once per epoch.
    join_lone : bool
        Whether a last batch of a single sample joins the one before it, for nets that cannot train on one sample.
    run : str
        The name of the run. It is unique among the runs that share an engine, and the same in another process.
    loss : callable
        The loss that the user chose, a function of outputs and targets per sample.
    optimizer : LocalOptimizer
        How a client steps.
    augment : Augment
        Random changes of training inputs.
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
    lr_decay: float = 0.0
    replacement: bool = False
    join_lone: bool = False
    run: str = ""
    loss: LossFunction = cross_entropy
    optimizer: LocalOptimizer = Sgd()
    augment: Augment = Augment()

    @property
    def loss_key(self) -> Hashable:
        """A key that tells losses apart: hops with the same key can share a launch."""
        return self.rule if self.rule.own_loss else None, self.loss

    @property
    def plain_loss(self) -> bool:
        """Whether the loss is the cross entropy and nothing else, which some kernels are made for."""
        return not self.rule.own_loss and self.loss is cross_entropy

    def samples(self, client: int) -> int:
        """Return how many samples `client` holds."""
        return int(self.federation.sizes[client])

    @cached_property
    def padding(self) -> int:
        """The length, two or more, to which batches are padded if it must not depend on what else is trained."""
        return max(2, min(self.batch_size + self.join_lone, int(self.federation.sizes.max())))


def shared(stacked: Tensor) -> bool:
    """Return whether all rows of a stacked tensor share memory."""
    return stacked.stride(0) == 0 and len(stacked) > 1


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


def taken(stacked: Tensors, rows: RowIndex) -> dict[str, Tensor]:
    """Return some rows of each stacked tensor."""
    return {name: take(tensor, rows) for name, tensor in stacked.items()}


def take(stacked: Tensor, rows: RowIndex) -> Tensor:
    """Return some rows of a stacked tensor; one that all rows share stays shared."""
    if isinstance(rows, slice):
        return stacked[rows]
    return stacked[:1].expand(len(rows), *stacked.shape[1:]) if shared(stacked) else stacked[torch.as_tensor(rows)]
