"""FedGen's generator: a net that makes features for given labels, its losses and its optimizer.

The generator is a row, like every model here, and several runs train theirs at once, so that everything works on rows
with leading dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

EPSILON = 1e-5
"""What batch normalization adds to a variance."""
KEEP = 0.9
"""The share of a running statistic that is kept when a batch comes in."""


@dataclass(frozen=True)
class Generator:
    """[noise ; one-hot label] -> Linear(hidden) -> BatchNorm -> ReLU -> Linear(latent), on rows.

    A row is ``[parameters | running mean | running variance]``. Rows may have leading dimensions; the inputs
    [..., B, noise + classes] then have the same.
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
        """Return a row as PyTorch initializes such a net, drawn from its current random state, in float32."""
        first, last = nn.Linear(self.noise + self.classes, self.hidden), nn.Linear(self.hidden, self.latent)
        ones, zeros = torch.ones(self.hidden), torch.zeros(self.hidden)
        parts = (first.weight, first.bias, ones, zeros, last.weight, last.bias, zeros, ones)
        return torch.cat([part.detach().reshape(-1) for part in parts])

    def inputs(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return the generator's inputs for noise [..., B, noise] and labels [..., B]."""
        one_hot = labels[..., None] == torch.arange(self.classes, device=labels.device)
        return torch.cat([noise, one_hot.to(noise.dtype)], -1)

    def generate(self, rows: Tensor, inputs: Tensor) -> Tensor:
        """Return features [..., B, latent], normalized by the running statistics."""
        p = self._views(rows)
        mean, variance = torch.split(rows[..., self.parameters :], self.hidden, -1)
        return self._after(p, self._before(p, inputs), mean, variance)

    def generate_in_training(self, parameters: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return features normalized by the batch, and the batch's mean and unbiased variance, [..., 2 * hidden]."""
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


def teacher_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return sum_k mean(weights_k * CE_k), [S]: how far the clients' heads are from the labels of generated features.

    Parameters
    ----------
    logits : Tensor
        What the clients' heads make of the features, [S, K, B, classes].
    labels : Tensor
        The labels that the features were generated for, [S, B].
    weights : Tensor
        The weight of each client for each sample, [S, K, B].
    """
    wanted = labels[:, None, :, None].expand(*logits.shape[:-1], 1)
    losses = -functional.log_softmax(logits, -1).gather(-1, wanted).squeeze(-1)
    return (weights * losses).mean(-1).sum(-1)


def diversity_loss(features: Tensor, distances: Tensor) -> Tensor:
    """Return exp(-mean(distances * |f_i - f_j|)), [S], which is small if different noise gives different features.

    Parameters
    ----------
    features : Tensor
        Generated features, [S, B, latent]; |f_i - f_j| is the mean absolute difference of two of them.
    distances : Tensor
        How far apart the samples' noise was, see `noise_distances`, [S, B, B].
    """
    apart = torch.cdist(features, features, p=1.0) / features.shape[-1]
    return torch.exp(-(distances * apart).mean((-2, -1)))


def noise_distances(noise: Tensor) -> Tensor:
    """Return the mean squared difference of all pairs of a batch's noise, [..., B, B] of [..., B, noise]."""
    return torch.cdist(noise, noise).square() / noise.shape[-1]


BETAS = (0.9, 0.999)
"""How fast Adam's running means of gradients and of their squares forget."""


def adam_step(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: Tensor, decay: float, corrections: Sequence[Tensor]
) -> None:
    """Take a step of Adam with weight decay in the gradient: change the rows `p` [S, P] and its two running means.

    `lr` and the two bias corrections, see `adam_corrections`, are columns [S, 1].
    """
    (b, c), (first, second) = BETAS, corrections
    g = g.add(p, alpha=decay)
    torch.add(m * b, g * (1 - b), out=m)
    torch.add(v * c, g.square() * (1 - c), out=v)
    torch.sub(p, lr / first * m / (v.sqrt() / second.sqrt() + 1e-8), out=p)


def adam_corrections(taken: Sequence[int], steps: int, like: Tensor) -> list[Tensor]:
    """Return 1 - beta^t, by which Adam divides, for both betas and each row's next `steps` steps, [S, steps, 1]."""
    return [
        like.new_tensor([[[1 - beta ** (count + step + 1)] for step in range(steps)] for count in taken])
        for beta in BETAS
    ]
