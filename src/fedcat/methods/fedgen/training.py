"""Trains generators on the server, those of several simulations at once."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap

from fedcat.core.precision import arithmetic
from fedcat.core.rng import Purpose, chance
from fedcat.methods.base import ServerWork
from fedcat.methods.fedgen.generator import KEEP, GeneratorForm, RowAdam, generator_loss, noise_distances
from fedcat.models.layout import Layout
from fedcat.protocol.hop import Tensors

TRIED = (2, 3, 7, 33)
"""Widths that are tried: wider than a vector register, since kernels treat what is left over in another way."""


@dataclass(frozen=True)
class Training:
    """How a generator is trained.

    Attributes
    ----------
    batch, steps : int
        Generated samples in a batch, and batches in a lesson.
    weight_decay : float
        Of Adam.
    teacher, diversity : float
        The weights of the two terms of `generator_loss`.
    """

    batch: int
    steps: int
    weight_decay: float
    teacher: float
    diversity: float


class Pupil:
    """A generator's row, and its Adam's.

    Parameters
    ----------
    form : GeneratorForm
        What the row means.
    row : Tensor
        The row to begin with.
    """

    def __init__(self, form: GeneratorForm, row: Tensor) -> None:
        self.form, self.row = form, row
        self.m = self.v = row.new_zeros(form.parameters)
        self.steps = 0

    def state(self) -> dict[str, Any]:
        """Return the rows and how many steps were taken."""
        return {"row": self.row, "m": self.m, "v": self.v, "steps": self.steps}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.row, self.m, self.v, self.steps = (state[name] for name in ("row", "m", "v", "steps"))


@dataclass(frozen=True, eq=False)
class Lesson(ServerWork):
    """What a generator is to learn from the last layers of the models that a round's devices sent back.

    Attributes
    ----------
    pupil : Pupil
        Who learns.
    how : Training
        How.
    lr : float
        The step size.
    layout : Layout
        The devices' net.
    rows : Tensor
        The devices' models, [K, D].
    shares : Tensor
        Each device's share of each label among them, [K, classes].
    seed, round : int
        The address of the lesson's chance.
    exact : bool
        Whether no bit may depend on how many generators learn at once.
    """

    pupil: Pupil
    how: Training
    lr: float
    layout: Layout
    rows: Tensor
    shares: Tensor
    seed: int
    round: int
    exact: bool

    def key(self) -> Hashable:
        """Return what lessons share that can be given as one."""
        alone = id(self) if self.exact and not _width_is_free(self) else None
        return id(self.layout), self.pupil.form, self.how, len(self.rows), self.exact, alone

    def run(self, works: Sequence[Lesson]) -> None:
        """Give all lessons at once; a lone one is doubled where that keeps its bits those that it has in company."""
        lone = self.exact and len(works) == 1 and _width_is_free(self)
        for lesson, taught in zip(works, _teach([*works, *works] if lone else works), strict=False):
            lesson.pupil.restore(taught.state())

    def drawn(self) -> tuple[Tensor, Tensor]:
        """Return the labels [steps, B] and the noise [steps, B, noise]; labels that no device holds are not drawn."""
        rng = chance(self.seed, Purpose.SERVER, self.round)
        held = np.flatnonzero(self.shares.sum(0).cpu().numpy() > 0)
        size = (self.how.steps, self.how.batch)
        labels = torch.from_numpy(rng.choice(held, size=size))
        noise = torch.from_numpy(rng.random((*size, self.pupil.form.noise), dtype=np.float32))
        return labels.to(self.rows.device), noise.to(self.rows)


def _teach(lessons: Sequence[Lesson]) -> list[Pupil]:
    """Return the pupils as they are after their lessons, which have one key."""
    form, how, layout = lessons[0].pupil.form, lessons[0].how, lessons[0].layout
    pupils = [lesson.pupil for lesson in lessons]
    rows, m, v = (torch.stack([getattr(pupil, name) for pupil in pupils]) for name in ("row", "m", "v"))
    p, running = rows[:, : form.parameters], rows[:, form.parameters :]
    lr = rows.new_tensor([[lesson.lr] for lesson in lessons])
    adam = RowAdam(m, v, [pupil.steps for pupil in pupils], lr, how.weight_decay)
    shares = torch.stack([lesson.shares for lesson in lessons])
    heads = _Heads(layout, [lesson.rows for lesson in lessons])
    labels, noise = (torch.stack(part) for part in zip(*(lesson.drawn() for lesson in lessons), strict=True))
    layout.net.eval()
    with arithmetic():
        inputs, far = form.inputs(noise, labels), noise_distances(noise)
        places = labels[:, :, None].expand(-1, -1, shares.shape[1], -1)
        weights = shares[:, None].expand(-1, how.steps, -1, -1).gather(-1, places)
        terms = rows.new_tensor([[how.teacher], [how.diversity]])
        for step in range(how.steps):
            leaf = p.detach().requires_grad_()
            features, statistics = form.trained(leaf, inputs[:, step])
            losses = generator_loss(features, heads(features), labels[:, step], weights[:, step], far[:, step])
            (slope,) = torch.autograd.grad((terms * losses).sum(), leaf)
            p = adam.step(p, slope)
            running = KEEP * running + (1 - KEEP) * statistics
    taught = []
    for i, pupil in enumerate(pupils):
        after = Pupil(form, torch.cat([p[i], running[i]]))
        after.m, after.v, after.steps = adam.m[i].clone(), adam.v[i].clone(), pupil.steps + how.steps
        taught.append(after)
    return taught


class _Heads:
    """The last layers of the devices' models, [K, D] for each simulation, stacked.

    Of a plain linear layer only its weights are stacked, and it is one product of matrices.
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


_free: WeakKeyDictionary[Layout, dict[Hashable, bool]] = WeakKeyDictionary()


def _width_is_free(lesson: Lesson) -> bool:
    """Tell whether a generator learns the same bits beside any number of others, two at least.

    On a CPU that is tried on the lesson itself; on a GPU it is not to be had.
    """
    if lesson.rows.device.type != "cpu":
        return False
    key = (lesson.pupil.form, lesson.how, len(lesson.rows), lesson.rows.dtype, torch.get_num_threads())
    known = _free.setdefault(lesson.layout, {})
    if key not in known:
        short = replace(lesson, how=replace(lesson.how, steps=min(2, lesson.how.steps)))
        many = [replace(short, seed=seed) for seed in range(max(TRIED))]
        whole = _teach(many)
        known[key] = all(
            torch.equal(a.row, b.row) for width in TRIED[:-1] for a, b in zip(_teach(many[:width]), whole, strict=False)
        )
    return known[key]
