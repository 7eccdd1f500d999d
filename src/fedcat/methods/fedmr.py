"""FedMR (Hu et al. 2024): the copies of the model exchange their layers at random after every round."""

from __future__ import annotations

import torch
from torch import Tensor

from fedcat.core.options import check_bounds
from fedcat.core.rng import Purpose, random_stream
from fedcat.methods.base import Context
from fedcat.methods.copies import CopiesMethod


class FedMR(CopiesMethod):
    """Copies of the model that are recombined layer by layer: every layer is dealt out anew among the copies.

    Parameters
    ----------
    context : Context
        See there.
    first_stage : int
        The number of first rounds, after each of which all copies are set to their mean: FedAvg with equal weights.
    """

    def __init__(self, context: Context, *, first_stage: int = 0) -> None:
        super().__init__(context)
        check_bounds("first_stage", first_stage, at_least=0)
        self.first_stage = first_stage
        slots = (*context.layout.parameters, *context.layout.buffers)
        names, sizes = [slot.name.rpartition(".")[0] for slot in slots], [slot.stop - slot.start for slot in slots]
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        layer = torch.tensor([numbers[name] for name in names]).repeat_interleave(torch.tensor(sizes))
        self.layers, self._layer = len(numbers), layer.to(context.start.device)

    def exchange(self, copies: Tensor, mean: Tensor) -> Tensor:
        """Deal out every layer, its weights together with its buffers."""
        k = len(copies)
        if self.round < self.first_stage:
            return mean.repeat(k, 1)
        rng = random_stream(self.context.seed, Purpose.SERVER, self.round)
        dealt = torch.tensor([rng.permutation(k).tolist() for _ in range(self.layers)])  # [layers, K]
        return copies.gather(0, dealt.to(copies.device, non_blocking=True).T[:, self._layer])
