"""The memory of captured steps: it keeps its address from launch to launch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class StepBuffers:
    """What captured steps read and write: the rows, their progress and their batches.

    Attributes
    ----------
    p, v, g : Tensor
        Parameters, momentum and gradients, [R, P].
    buffers : Tensor
        The nets' float buffers, [R, D - P].
    lr, lr_decay, momentum, decay, clip : Tensor
        Settings of each row, [R, 1].
    index : Tensor
        Positions in the pool, [R, S, B], padded with -1.
    count : Tensor
        Number of steps of each row, [R].
    order : Tensor
        The rows by decreasing number of steps, [R].
    step : Tensor
        Number of steps taken so far, [1].
    lr_decays : bool
        Whether learning rates change from step to step.
    """

    p: Tensor
    v: Tensor
    g: Tensor
    buffers: Tensor
    lr: Tensor
    lr_decay: Tensor
    momentum: Tensor
    decay: Tensor
    clip: Tensor
    index: Tensor
    count: Tensor
    order: Tensor
    step: Tensor
    lr_decays: bool = False

    @classmethod
    def make(
        cls, rows: int, size: int, buffers: int, steps: int, batch: int, like: Tensor, lr_decays: bool = False
    ) -> StepBuffers:
        """Allocate `rows` rows of `size` parameters that take up to `steps` steps with up to `batch` samples."""
        line = -(-size // 32) * 32
        p, v, g = (like.new_zeros(rows, line)[:, :size] for _ in range(3))
        lr, lr_decay, momentum, decay, clip = (like.new_zeros(rows, 1) for _ in range(5))
        return cls(
            *(p, v, g, like.new_zeros(rows, buffers), lr, lr_decay, momentum, decay, clip),
            torch.full((rows, steps, batch), -1, dtype=torch.int32, device=like.device),
            torch.zeros(rows, dtype=torch.int32, device=like.device),
            torch.arange(rows, dtype=torch.int32, device=like.device),
            torch.zeros(1, dtype=torch.int32, device=like.device),
            lr_decays,
        )

    def rate(self, ahead: int) -> Tensor:
        """Return the learning rates of the step that is `ahead` steps after the counter, [R, 1]."""
        return self.lr / (1 + self.lr_decay * (self.step + ahead)) if self.lr_decays else self.lr

    def active(self, ahead: int) -> Tensor:
        """Return which rows take the step that is `ahead` steps after the counter, [R, 1]."""
        return (self.count > self.step + ahead)[:, None]

    def now(self, ahead: int) -> Tensor:
        """Return the number of the step that is `ahead` steps after the counter, [1]; at most the last one."""
        return (self.step.long() + ahead).clamp(max=self.index.shape[1] - 1)

    def which(self, ahead: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first `width` rows in `order`, where their step is in [R * S], and which of them take it."""
        rows = self.order[:width].long()
        return rows, rows * self.index.shape[1] + self.now(ahead), self.active(ahead)[rows]
