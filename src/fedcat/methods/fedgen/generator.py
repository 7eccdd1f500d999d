"""A generator of a net's features for given labels: a model that is a row, trained for several simulations at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-5
"""What batch normalisation adds to a variance."""
KEEP = 0.9
"""The share of a running statistic that stays when a batch comes in."""


@dataclass(frozen=True)
class GeneratorForm:
    """[noise ; one-hot label] -> Linear(hidden) -> BatchNorm -> ReLU -> Linear(latent), on rows.

    A row is ``[parameters | running mean | running variance]``. Rows may have leading dimensions, the same that the
    inputs [..., B, noise + classes] have.
    """

    noise: int
    classes: int
    hidden: int
    latent: int

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "first": (self.hidden, self.noise + self.classes),
            "first_bias": (self.hidden,),
            "scale": (self.hidden,),
            "shift": (self.hidden,),
            "last": (self.latent, self.hidden),
            "last_bias": (self.latent,),
        }

    @cached_property
    def parameters(self) -> int:
        """How many parameters a row holds."""
        return sum(prod(shape) for shape in self._shapes.values())

    @property
    def size(self) -> int:
        """The length of a row."""
        return self.parameters + 2 * self.hidden

    def initial(self) -> Tensor:
        """Return a row as PyTorch initialises such a net, by its generator as it is, in float32."""
        first, last = nn.Linear(self.noise + self.classes, self.hidden), nn.Linear(self.hidden, self.latent)
        ones, zeros = torch.ones(self.hidden), torch.zeros(self.hidden)
        parts = (first.weight, first.bias, ones, zeros, last.weight, last.bias, zeros, ones)
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def inputs(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return what the generator takes for noise [..., B, noise] and labels [..., B]."""
        one_hot = torch.eye(self.classes, dtype=noise.dtype, device=noise.device)[labels]
        return torch.cat([noise, one_hot], -1)

    def evaluated(self, rows: Tensor, inputs: Tensor) -> Tensor:
        """Return features [..., B, latent], normalised by the running statistics."""
        p = self._views(rows)
        mean, variance = torch.split(rows[..., self.parameters :], self.hidden, -1)
        return self._after(p, self._before(p, inputs), mean, variance)

    def trained(self, parameters: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features normalised by the batch, and the batch's mean and unbiased variance, [..., 2 * hidden]."""
        p = self._views(parameters)
        h = self._before(p, inputs)
        variance, mean = torch.var_mean(h, -2, correction=0)
        count = h.shape[-2]
        statistics = torch.cat([mean, variance * (count / (count - 1))], -1)
        return self._after(p, h, mean, variance), statistics.detach()

    def _before(self, p: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return inputs @ p["first"].mT + p["first_bias"].unsqueeze(-2)

    def _after(self, p: dict[str, Tensor], h: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = p["scale"] * torch.rsqrt(variance + EPSILON)
        shift = p["shift"] - mean * scale
        active = torch.relu(h * scale.unsqueeze(-2) + shift.unsqueeze(-2))
        return active @ p["last"].mT + p["last_bias"].unsqueeze(-2)

    def _views(self, rows: Tensor) -> dict[str, Tensor]:
        views, begin = {}, 0
        for name, shape in self._shapes.items():
            stop = begin + prod(shape)
            views[name] = rows[..., begin:stop].reshape(*rows.shape[:-1], *shape)
            begin = stop
        return views


def generator_loss(features: Tensor, logits: Tensor, labels: Tensor, weights: Tensor, far_noise: Tensor) -> Tensor:
    """Return the two terms of the loss of each simulation's generator, [2, S].

    The first is the devices' cross entropy on what it made, sum_k mean(weights_k * CE_k); the second the likeness
    exp(-mean(far_noise * far)) of what it makes of different noise, far being the mean absolute difference of two
    samples' features.

    Parameters
    ----------
    features : Tensor
        What the generators made, [S, B, latent].
    logits : Tensor
        What the devices' last layers take it for, [S, K, B, classes].
    labels : Tensor
        What it was to be, [S, B].
    weights : Tensor
        How much each device counts in each sample, [S, K, B].
    far_noise : Tensor
        How far apart the samples' noise was, see `noise_distances`, [S, B, B].
    """
    wanted = labels[:, None, :, None].expand(*logits.shape[:-1], 1)
    losses = -functional.log_softmax(logits, -1).gather(-1, wanted).squeeze(-1)
    far = torch.cdist(features, features, p=1.0) / features.shape[-1]
    return torch.stack([(weights * losses).mean(-1).sum(-1), torch.exp(-(far_noise * far).mean((-2, -1)))])


def noise_distances(noise: Tensor) -> Tensor:
    """Return the mean squared difference of all pairs of a batch's noise, [..., B, B] of [..., B, noise]."""
    return torch.cdist(noise, noise).square() / noise.shape[-1]


class RowAdam:
    """Adam with weight decay in the gradient, on rows [S, P], each with its own step size and its own age.

    Parameters
    ----------
    m, v : Tensor
        The running means of gradients and of their squares, [S, P].
    ages : sequence of int
        How many steps each row has taken.
    lr : Tensor
        Step sizes, [S, 1].
    decay : float
        The weight decay.
    """

    BETAS = (0.9, 0.999)

    def __init__(self, m: Tensor, v: Tensor, ages: Sequence[int], lr: Tensor, decay: float) -> None:
        self.m, self.v, self.ages, self.lr, self.decay = m, v, list(ages), lr, decay

    def step(self, p: Tensor, g: Tensor) -> Tensor:
        """Return the parameters after a step along the gradients `g`."""
        b, c = self.BETAS
        g = g.add(p, alpha=self.decay)
        self.ages = [age + 1 for age in self.ages]
        self.m = self.m * b + g * (1 - b)
        self.v = self.v * c + g.square() * (1 - c)
        first, second = (p.new_tensor([[1 - beta**age] for age in self.ages]) for beta in (b, c))
        return p - self.lr / first * self.m / (self.v.sqrt() / second.sqrt() + 1e-8)
