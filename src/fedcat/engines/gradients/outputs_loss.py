"""Losses that see a net only through its outputs on the batch and through its last layer.

Autograd differentiates such a loss with respect to the outputs, [R, B, classes], and the last layer's parameters; the
kernels do the rest. Any loss of the logits is one, and so is FedGen's: its generated features pass through the last
layer alone.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.func import vmap

from fedcat.data.pool import Pool
from fedcat.engines.gradients.base import Inputs
from fedcat.models.layout import BoundNet, Layout, Tensors
from fedcat.models.losses import LossFunction
from fedcat.protocol.local_rule import Batch, LocalRule, LossInputs, unchanged

HEAD = "head."
"""How the names of the last layer's parameters begin."""


class SeesMore(Exception):
    """The loss uses the net or the inputs in other ways; the message says which."""


class OutputsLoss:
    """A loss as a function of the net's outputs and its last layer.

    Parameters
    ----------
    layout, pool, rule, loss
        See `Gradients`.
    """

    def __init__(self, layout: Layout, pool: Pool, rule: LocalRule, loss: LossFunction) -> None:
        self.layout, self.pool, self.rule, self.loss = layout, pool, rule, loss
        self.head = [slot for slot in layout.parameters if slot.name.startswith(HEAD)]

    def of(
        self, outputs: Tensor, p: Tensor, index: Tensor, inputs: Inputs
    ) -> tuple[Tensor, Tensor, list[tuple[slice, Tensor]]]:
        """Return the losses [R], the gradient of the outputs, and those of the last layer's parameters by place."""
        mask = (index >= 0).to(outputs.dtype)
        y = self.pool.targets(index.clamp(min=0), self.layout.dtype)
        outputs = outputs.detach().requires_grad_()
        views = {slot.name: p[:, slot.start : slot.stop].view(len(p), *slot.shape) for slot in self.head}
        head = {name: view.detach().requires_grad_() for name, view in views.items()}
        with torch.enable_grad(), unchanged(self.rule, "loss", *inputs.values()):
            losses = vmap(self._loss)(outputs, head, y, mask, inputs)
        first, *rest = torch.autograd.grad(losses.sum(), [outputs, *head.values()], allow_unused=True)
        if first is None:
            raise SeesMore("it does not use the net's outputs")
        places = [slice(slot.start, slot.stop) for slot in self.head]
        return losses.detach(), first, [(at, g.flatten(1)) for at, g in zip(places, rest, strict=True) if g is not None]

    def _loss(self, outputs: Tensor, head: Tensors, y: Tensor, mask: Tensor, inputs: Inputs) -> Tensor:
        x = _Unseen()
        batch: Any = Batch(x, y, mask, self.loss)  # type: ignore[arg-type]
        net: Any = _SeenNet(self.layout.bind(head, {}), x, outputs)
        return self.rule.loss(net, batch, LossInputs(**inputs))


class _Unseen:
    """Stands for a batch's inputs, which such a loss hands to the net and does not look at."""

    def __getattr__(self, name: str) -> NoReturn:
        raise SeesMore("it uses the batch's inputs")

    def __getitem__(self, index: object) -> NoReturn:
        raise SeesMore("it uses the batch's inputs")

    def __len__(self) -> NoReturn:
        raise SeesMore("it uses the batch's inputs")


class _SeenNet:
    """Stands for the net: it knows its outputs on the batch and has its last layer, but no buffers."""

    buffers: ClassVar[Tensors] = {}

    def __init__(self, net: BoundNet, x: _Unseen, outputs: Tensor) -> None:
        self._net, self._x, self._outputs = net, x, outputs

    def logits(self, x: object) -> Tensor:
        if x is not self._x:
            raise SeesMore("it uses the net's outputs on other inputs")
        return self._outputs

    def head(self, z: Tensor) -> Tensor:
        return self._net.head(z)

    def __getattr__(self, name: str) -> NoReturn:
        raise SeesMore(f"it uses the net's {name}")
