"""A model is a row: what lies where in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedcat.errors import SettingError


@dataclass(frozen=True)
class Slot:
    """One named tensor of a model and its place in the row."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout:
    """Turns a row of numbers into a net's named tensors, as views, and back.

    A row is ``[parameters | float buffers]``. Beside it, and never averaged, stay the integer buffers, frozen
    parameters (``requires_grad=False``) and buffers that are not part of the net's state.

    Parameters
    ----------
    net : torch.nn.Module
        The net, on the device and in the floating type that the rows will have. The layout keeps it and
        switches it between training and evaluation.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        trained = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        if not trained:
            raise SettingError("net has no parameter that requires a gradient: there is nothing to train")
        odd = [n for n, p in trained if not p.is_floating_point()]
        if odd:
            raise SettingError(f"net parameter {odd[0]!r} is not real floating point: a row holds real numbers only")
        state = set(net.state_dict())
        buffers = [(n, b) for n, b in net.named_buffers() if b.is_floating_point() and n in state]
        self.parameters = _slots(trained, 0)
        self.parameter_size = self.parameters[-1].stop
        self.buffers = _slots(buffers, self.parameter_size)
        self.size = self.buffers[-1].stop if self.buffers else self.parameter_size
        self.dtype = trained[0][1].dtype
        self.device = trained[0][1].device
        self.integers = {n: b.clone() for n, b in net.named_buffers() if not b.is_floating_point()}

    def pack(self, net: nn.Module) -> Tensor:
        """Return the row that holds the weights of `net`, a net of this layout."""
        named: dict[str, Tensor] = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        parts = [named[s.name].detach().reshape(-1) for s in (*self.parameters, *self.buffers)]
        return torch.cat([p.to(self.device, self.dtype) for p in parts])

    def unpack(self, row: Tensor) -> dict[str, Tensor]:
        """Return named views of a row [D], or of the rows [..., D] of a matrix."""
        return _views(row, (*self.parameters, *self.buffers), 0)

    def parameter_views(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return named views of the first part of rows, [..., parameter_size]."""
        return _views(parameters, self.parameters, 0)

    def buffer_views(self, buffers: Tensor) -> dict[str, Tensor]:
        """Return named views of the second part of rows, [..., size - parameter_size]."""
        return _views(buffers, self.buffers, self.parameter_size)

    def write(self, row: Tensor, net: nn.Module) -> None:
        """Copy a row's weights into `net`, a net of this layout."""
        named: dict[str, Tensor] = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        with torch.no_grad():
            for name, value in self.unpack(row).items():
                named[name].copy_(value)

    def bind(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Bound:
        """Return the net on the given tensors."""
        return Bound(self, parameters, buffers)


class Bound:
    """A net on one row's tensors.

    `buffers` holds the float buffers as the calls so far have left them; the tensors that were passed in are
    not touched.
    """

    def __init__(self, layout: Layout, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._net = layout.net
        self.buffers = {n: b.clone(memory_format=torch.contiguous_format) for n, b in buffers.items()}
        integers = {n: b.clone() for n, b in layout.integers.items()}
        self._tensors: dict[str, Tensor] = {**parameters, **self.buffers, **integers}

    def logits(self, x: Tensor) -> Tensor:
        """Return the net's output."""
        out: Tensor = functional_call(self._net, self._tensors, (x,))
        return out

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the net's last layer; the net must have parts ``features`` and ``head``."""
        return self._part("features", x)

    def head(self, z: Tensor) -> Tensor:
        """Return the last layer's output for the features `z`."""
        return self._part("head", z)

    def _part(self, name: str, value: Tensor) -> Tensor:
        part = getattr(self._net, name, None)
        if not isinstance(part, nn.Module):
            raise SettingError(
                f"net {type(self._net).__name__} has no submodule {name!r}: a method that splits the net wants "
                "its forward pass written as self.head(self.features(x))"
            )
        inside = {n[len(name) + 1 :]: t for n, t in self._tensors.items() if n.startswith(name + ".")}
        out: Tensor = functional_call(part, inside, (value,))
        return out


def _slots(named: Sequence[tuple[str, Tensor]], start: int) -> tuple[Slot, ...]:
    slots = []
    for name, tensor in named:
        stop = start + tensor.numel()
        slots.append(Slot(name, tuple(tensor.shape), start, stop))
        start = stop
    return tuple(slots)


def _views(rows: Tensor, slots: tuple[Slot, ...], base: int) -> dict[str, Tensor]:
    lead = rows.shape[:-1]
    views = {}
    for slot in slots:
        flat = rows[..., slot.start - base : slot.stop - base]
        views[slot.name] = flat.view(*lead, *slot.shape) if prod(slot.shape) else flat.reshape(*lead, *slot.shape)
    return views
