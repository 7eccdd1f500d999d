"""Training of FedGen's generators on the server, those of several runs at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedcat.core.precision import precision_context
from fedcat.core.rng import Purpose, random_stream
from fedcat.methods.base import ServerWork
from fedcat.methods.fedgen.generator import KEEP, Generator, RowAdam, diversity_loss, noise_distances, teacher_loss
from fedcat.models.layout import Layout, Tensors

TRIED = (2, 3, 7, 33)
"""Numbers of generators that are tried: some exceed a vector register, since kernels treat remainders differently."""


@dataclass(frozen=True)
class TrainingOptions:
    """How a generator is trained.

    Attributes
    ----------
    batch, steps : int
        Generated samples per batch, and batches per round.
    weight_decay : float
        Of Adam.
    teacher, diversity : float
        The weights of the teacher loss and of the diversity loss.
    """

    batch: int
    steps: int
    weight_decay: float
    teacher: float
    diversity: float


class GeneratorState:
    """A generator's row and the state of its Adam.

    Parameters
    ----------
    generator : Generator
        What the row means.
    row : Tensor
        The initial row.
    """

    def __init__(self, generator: Generator, row: Tensor) -> None:
        self.generator, self.row = generator, row
        self.m = self.v = row.new_zeros(generator.parameters)
        self.steps = 0

    def state(self) -> dict[str, Any]:
        """Return the rows and the number of steps taken."""
        return {"row": self.row, "m": self.m, "v": self.v, "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.row, self.m, self.v, self.steps = (state[name] for name in ("row", "m", "v", "steps"))


@dataclass(frozen=True, eq=False)
class GeneratorTraining(ServerWork):
    """One round's training of a generator against the heads of the models that the clients sent back.

    Attributes
    ----------
    target : GeneratorState
        What is trained.
    options : TrainingOptions
        How.
    lr : float
        The learning rate.
    layout : Layout
        The clients' net.
    rows : Tensor
        The clients' models, [K, D].
    shares : Tensor
        Each client's share of each label among them, [K, classes].
    seed, round : int
        Where the training's random numbers come from.
    exact : bool
        Whether no bit may depend on how many generators are trained at once.
    """

    target: GeneratorState
    options: TrainingOptions
    lr: float
    layout: Layout
    rows: Tensor
    shares: Tensor
    seed: int
    round: int
    exact: bool

    def key(self) -> Hashable:
        """Return what trainings that can run at once have in common."""
        alone = id(self) if self.exact and not _any_number(self) else None
        return id(self.layout), self.target.generator, self.options, len(self.rows), self.exact, alone

    def run(self, works: Sequence[GeneratorTraining]) -> None:
        """Train all generators at once; a single one is doubled if that gives it the bits that it has in company."""
        single = self.exact and len(works) == 1 and _any_number(self)
        for work, trained in zip(works, _train([*works, *works] if single else works), strict=False):
            work.target.restore(trained.state())

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return the labels [steps, B] and the noise [steps, B, noise]; labels that no client holds are not drawn."""
        rng = random_stream(self.seed, Purpose.SERVER, self.round)
        held = np.flatnonzero(self.shares.sum(0).cpu().numpy() > 0)
        size = (self.options.steps, self.options.batch)
        labels = torch.from_numpy(rng.choice(held, size=size))
        noise = torch.from_numpy(rng.random((*size, self.target.generator.noise), dtype=np.float32))
        return labels.to(self.rows.device), noise.to(self.rows)


def _train(works: Sequence[GeneratorTraining]) -> list[GeneratorState]:
    """Return the generators after training; all works have the same key."""
    generator, options, layout = works[0].target.generator, works[0].options, works[0].layout
    targets = [work.target for work in works]
    rows, m, v = (torch.stack([getattr(target, name) for target in targets]) for name in ("row", "m", "v"))
    p, running = rows[:, : generator.parameters], rows[:, generator.parameters :]
    lr = rows.new_tensor([[work.lr] for work in works])
    adam = RowAdam(m, v, [target.steps for target in targets], lr, options.weight_decay)
    shares = torch.stack([work.shares for work in works])
    heads = _Heads(layout, [work.rows for work in works])
    labels, noise = (torch.stack(part) for part in zip(*(work.draw() for work in works), strict=True))
    layout.net.eval()
    with precision_context():
        inputs, distances = generator.inputs(noise, labels), noise_distances(noise)
        places = labels[:, :, None].expand(-1, -1, shares.shape[1], -1)
        weights = shares[:, None].expand(-1, options.steps, -1, -1).gather(-1, places)
        terms = rows.new_tensor([[options.teacher], [options.diversity]])
        for step in range(options.steps):
            leaf = p.detach().requires_grad_()
            features, statistics = generator.generate_in_training(leaf, inputs[:, step])
            teacher = teacher_loss(heads(features), labels[:, step], weights[:, step])
            diversity = diversity_loss(features, distances[:, step])
            (gradient,) = torch.autograd.grad((terms * torch.stack([teacher, diversity])).sum(), leaf)
            p = adam.step(p, gradient)
            running = KEEP * running + (1 - KEEP) * statistics
    trained = []
    for i, target in enumerate(targets):
        after = GeneratorState(generator, torch.cat([p[i], running[i]]))
        after.m, after.v, after.steps = adam.m[i].clone(), adam.v[i].clone(), target.steps + options.steps
        trained.append(after)
    return trained


class _Heads:
    """The last layers of the clients' models, [K, D] for each run, stacked.

    If the head is a plain linear layer, only its weights are stacked, and it is one matrix product.
    """

    def __init__(self, layout: Layout, rows: Sequence[Tensor]) -> None:
        self.layout, self.lead, size = layout, (len(rows), len(rows[0])), layout.parameter_size
        self.linear = None
        views = [layout.parameter_views(some[:, :size]) for some in rows]
        if type(layout.net.head) is nn.Linear and {"head.weight", "head.bias"} <= views[0].keys():
            weight, bias = (torch.stack([view[f"head.{name}"] for view in views]) for name in ("weight", "bias"))
            self.linear = weight.flatten(1, 2).mT, bias.unsqueeze(2)
            return
        flat = torch.cat(list(rows))
        self.parameters, self.buffers = layout.parameter_views(flat[:, :size]), layout.buffer_views(flat[:, size:])

    def __call__(self, features: Tensor) -> Tensor:
        """Return the logits [S, K, B, classes] of features [S, B, latent]."""
        if self.linear is not None:
            weight, bias = self.linear
            flat = torch.bmm(features, weight).reshape(*features.shape[:2], *bias.shape[1::2])
            return flat.transpose(1, 2) + bias
        each = features[:, None].expand(*self.lead, *features.shape[1:]).flatten(0, 1)
        logits: Tensor = vmap(self._head)(self.parameters, self.buffers, each)
        return logits.reshape(*self.lead, *logits.shape[1:])

    def _head(self, parameters: Tensors, buffers: Tensors, features: Tensor) -> Tensor:
        return self.layout.bind(parameters, buffers).head(features)


_found: WeakKeyDictionary[Layout, dict[Hashable, bool]] = WeakKeyDictionary()


def _any_number(work: GeneratorTraining) -> bool:
    """Tell whether a generator trains to the same bits beside any number of others, if there is at least one.

    On a CPU this is tried with the training itself; on a GPU it does not hold.
    """
    if work.rows.device.type != "cpu":
        return False
    key = (work.target.generator, work.options, len(work.rows), work.rows.dtype, torch.get_num_threads())
    known = _found.setdefault(work.layout, {})
    if key not in known:
        short = replace(work, options=replace(work.options, steps=min(2, work.options.steps)))
        many = [replace(short, seed=seed) for seed in range(max(TRIED))]
        all_at_once = _train(many)
        known[key] = all(
            torch.equal(a.row, b.row)
            for count in TRIED[:-1]
            for a, b in zip(_train(many[:count]), all_at_once, strict=False)
        )
    return known[key]
