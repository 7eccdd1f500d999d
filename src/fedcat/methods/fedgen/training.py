"""Training of FedGen's generators on the server, those of several runs at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedcat.core.cuda_graph import capture
from fedcat.core.precision import precision_context
from fedcat.core.rng import Purpose, random_stream
from fedcat.methods.base import ServerWork
from fedcat.methods.fedgen.generator import (
    KEEP,
    Generator,
    adam_corrections,
    adam_step,
    diversity_loss,
    noise_distances,
    teacher_loss,
)
from fedcat.models.layout import Layout, Tensors

KEPT = 2
"""Captured trainings that are kept: runs that train in two halves have two."""
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
        alone = self if self.exact and not _any_number(self) else None
        return self.layout.id, self.target.generator, self.options, len(self.rows), self.exact, alone

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
    first, steps = works[0], range(works[0].options.steps)
    first.layout.net.eval()
    with precision_context():
        stack = _Stack(works)
        if first.rows.device.type == "cuda" and steps:
            key = (first.target.generator, first.options, len(first.rows), len(works))
            captured = first.layout.once("generators", _Captured)
            kept, graph = captured.of(key, works)
            kept.load(stack)
            for _ in steps:
                graph.replay()
            stack = kept
        else:
            for step in steps:
                stack.step(step)
    return stack.states([work.target for work in works])


class _Captured:
    """The stacks of a net's last trainings, each with its step at the counter on the device as a graph."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[_Stack, Any]] = {}

    def of(self, key: Hashable, works: Sequence[GeneratorTraining]) -> tuple[_Stack, Any]:
        """Return the stack and the graph of trainings with this key, whose memory is free to be loaded."""
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            stack = _Stack(works)
            self._kept[key] = stack, capture(lambda: stack.step(None), stack.p.device)
        return self._kept[key]


class _Stack:
    """The generators of several trainings as rows, and all that their steps need.

    Parameters
    ----------
    works : sequence of GeneratorTraining
        The trainings, with the same key.
    """

    def __init__(self, works: Sequence[GeneratorTraining]) -> None:
        first, targets = works[0], [work.target for work in works]
        self.generator, self.options = first.target.generator, first.options
        rows, self.m, self.v = (
            torch.stack([getattr(target, name) for target in targets]) for name in ("row", "m", "v")
        )
        size = self.generator.parameters
        self.p, self.running = rows[:, :size].contiguous(), rows[:, size:].contiguous()
        self.lr = rows.new_tensor([[work.lr] for work in works])
        self.heads = _Heads(first.layout, [work.rows for work in works])
        labels, noise = (torch.stack(part) for part in zip(*(work.draw() for work in works), strict=True))
        shares = torch.stack([work.shares for work in works])
        places = labels[:, :, None].expand(-1, -1, shares.shape[1], -1)
        weights = shares[:, None].expand(-1, self.options.steps, -1, -1).gather(-1, places)
        inputs, distances = self.generator.inputs(noise, labels), noise_distances(noise)
        corrections = adam_corrections([target.steps for target in targets], self.options.steps, rows)
        self.each = [inputs, labels, weights, distances, *corrections]
        self.terms = rows.new_tensor([[self.options.teacher], [self.options.diversity]])
        self.counter = torch.zeros(1, dtype=torch.int64, device=rows.device)

    def load(self, other: _Stack) -> None:
        """Copy another stack of the same key into this one's memory, and start from its first step."""
        mine, new = ([s.p, s.running, s.m, s.v, s.lr, *s.heads.tensors, *s.each] for s in (self, other))
        for here, there in zip(mine, new, strict=True):
            here.copy_(there)
        self.counter.zero_()

    def step(self, number: int | None) -> None:
        """Take a step: the one with this number, or the next by the counter on the device."""
        if number is None:
            now = [values.index_select(1, self.counter)[:, 0] for values in self.each]
        else:
            now = [values[:, number] for values in self.each]
        inputs, labels, weights, distances, *corrections = now
        with torch.enable_grad():
            leaf = self.p.detach().requires_grad_()
            features, statistics = self.generator.generate_in_training(leaf, inputs)
            teacher = teacher_loss(self.heads(features), labels, weights)
            diversity = diversity_loss(features, distances)
            (gradient,) = torch.autograd.grad((self.terms * torch.stack([teacher, diversity])).sum(), leaf)
        decay = self.options.weight_decay
        adam_step(self.p, gradient, self.m, self.v, self.lr, decay, corrections)
        torch.add(KEEP * self.running, (1 - KEEP) * statistics, out=self.running)
        self.counter.add_(1)

    def states(self, targets: Sequence[GeneratorState]) -> list[GeneratorState]:
        """Return the generators' states."""
        found = []
        for i, target in enumerate(targets):
            after = GeneratorState(self.generator, torch.cat([self.p[i], self.running[i]]))
            after.m, after.v, after.steps = self.m[i].clone(), self.v[i].clone(), target.steps + self.options.steps
            found.append(after)
        return found


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
            self.tensors = list(self.linear)
            return
        flat = torch.cat(list(rows))
        self.parameters, self.buffers = layout.parameter_views(flat[:, :size]), layout.buffer_views(flat[:, size:])
        self.tensors = [flat]

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


def _any_number(work: GeneratorTraining) -> bool:
    """Tell whether a generator trains to the same bits beside any number of others, if there is at least one.

    On a CPU this is tried with the training itself; on a GPU it does not hold.
    """
    if work.rows.device.type != "cpu":
        return False
    key = (work.target.generator, work.options, len(work.rows), work.rows.dtype, torch.get_num_threads())
    return work.layout.once(("any number of generators", *key), lambda: _tried(work))


def _tried(work: GeneratorTraining) -> bool:
    short = replace(work, options=replace(work.options, steps=min(2, work.options.steps)))
    many = [replace(short, seed=seed) for seed in range(max(TRIED))]
    whole = _train(many)
    return all(
        torch.equal(a.row, b.row) for count in TRIED[:-1] for a, b in zip(_train(many[:count]), whole, strict=False)
    )
