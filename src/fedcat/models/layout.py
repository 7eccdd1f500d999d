"""The layout of a model as a row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from fedcat.core.errors import SettingError

Tensors = Mapping[str, Tensor]
T = TypeVar("T")
_ids = count()


@dataclass(frozen=True)
class Slot:
    """One named tensor of a model and its position in the row."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Layout:
    """Maps a row to a net's named tensors, as views, and back.

    A row is ``[parameters | float buffers]``. Integer buffers, frozen parameters (``requires_grad=False``) and buffers
    that are not part of the net's state stay outside the row and are never averaged.

    Parameters
    ----------
    net : torch.nn.Module
        The net, on the device and in the floating-point type that the rows will have. It is kept, and
        switched between training and evaluation mode.

    Attributes
    ----------
    id : int
        Tells layouts apart. They are numbered as they are made: a process that makes the same ones numbers them alike.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net, self.id = net, next(_ids)
        self._once: dict[Hashable, Any] = {}
        self.whole = _Whole(net)
        trained = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
        if not trained:
            raise SettingError("net has no parameter that requires a gradient: there is nothing to train")
        odd = [n for n, p in trained if not p.is_floating_point()]
        if odd:
            raise SettingError(f"net parameter {odd[0]!r} is not real floating point: a row holds real values only")
        state = set(net.state_dict())
        buffers = [(n, b) for n, b in net.named_buffers() if b.is_floating_point() and n in state]
        self.parameters = _slots(trained, 0)
        self.parameter_size = self.parameters[-1].stop
        self.buffers = _slots(buffers, self.parameter_size)
        self.size = self.buffers[-1].stop if self.buffers else self.parameter_size
        self.dtype = trained[0][1].dtype
        self.device = trained[0][1].device
        counting = [n for n, m in net.named_modules() if isinstance(m, _BatchNorm) and _counts(m)]
        if counting:
            raise SettingError(
                f"net layer {counting[0]!r} averages over all batches so far (momentum=None), but its batch counter is "
                "not in the row: set its momentum, for example to 0.1"
            )
        self.integers = {n: b.clone() for n, b in net.named_buffers() if not b.is_floating_point()}
        self.kept = {n: t for n, t in self.outside(net).items() if n in state}
        """The tensors outside the row that are part of the net's state."""

    def once(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return what `find` returned when it was first called for this net and `key`."""
        if key not in self._once:
            self._once[key] = find()
        found: T = self._once[key]
        return found

    def outside(self, net: nn.Module) -> dict[str, Tensor]:
        """Return the tensors of `net`, a net of this layout, that are not in the row."""
        held = {slot.name for slot in (*self.parameters, *self.buffers)}
        return {n: t for n, t in (*net.named_parameters(), *net.named_buffers()) if n not in held}

    def pack(self, net: nn.Module) -> Tensor:
        """Return the parameters and float buffers of `net`, a net of this layout, as a row."""
        named: dict[str, Tensor] = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        parts = [named[s.name].detach().reshape(-1) for s in (*self.parameters, *self.buffers)]
        return torch.cat([p.to(self.device, self.dtype) for p in parts])

    def unpack(self, row: Tensor) -> dict[str, Tensor]:
        """Return named views of a row [D], or of the rows [..., D] of a matrix."""
        return _views(row, (*self.parameters, *self.buffers), 0)

    def parameter_views(self, parameters: Tensor) -> dict[str, Tensor]:
        """Return named views of the parameter part of rows, [..., parameter_size]."""
        return _views(parameters, self.parameters, 0)

    def buffer_views(self, buffers: Tensor) -> dict[str, Tensor]:
        """Return named views of the buffer part of rows, [..., size - parameter_size]."""
        return _views(buffers, self.buffers, self.parameter_size)

    def write(self, row: Tensor, net: nn.Module) -> None:
        """Copy a row into the parameters and float buffers of `net`, a net of this layout."""
        named: dict[str, Tensor] = {**dict(net.named_parameters()), **dict(net.named_buffers())}
        with torch.no_grad():
            for name, value in self.unpack(row).items():
                named[name].copy_(value)

    def bind(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> BoundNet:
        """Return the net bound to the given tensors."""
        return BoundNet(self, parameters, buffers)


class BoundNet:
    """A net bound to one row's tensors, which it does not modify."""

    def __init__(self, layout: Layout, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        self._layout = layout
        self._buffers = list(buffers)
        fresh = {n: b.clone(memory_format=torch.contiguous_format) for n, b in buffers.items()}
        fresh.update({n: b.clone() for n, b in layout.integers.items()})
        self._tensors = {f"net.{n}": t for n, t in {**parameters, **fresh}.items()}

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The float buffers after the calls so far."""
        return {n: self._tensors[f"net.{n}"] for n in self._buffers}

    def at(self, parameters: Tensor) -> BoundNet:
        """Return the same net bound to other parameters [P], with its current buffers."""
        return BoundNet(self._layout, self._layout.parameter_views(parameters), self.buffers)

    def logits(self, x: Tensor) -> Tensor:
        """Return the net's output."""
        return self._call("", x)

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the net's last layer; the net must have parts ``features`` and ``head``."""
        return self._part("features", x)

    def head(self, z: Tensor) -> Tensor:
        """Return the last layer's output for the features `z`."""
        return self._part("head", z)

    def _part(self, name: str, value: Tensor) -> Tensor:
        net = self._layout.net
        if not callable(getattr(net, name, None)):
            raise SettingError(
                f"net {type(net).__name__} has no part {name!r}: a method that splits the net needs its forward pass "
                "to be self.head(self.features(x))"
            )
        return self._call(name, value)

    def _call(self, name: str, value: Tensor) -> Tensor:
        out: Tensor = functional_call(self._layout.whole, self._tensors, (name, value))
        return out


class _Whole(nn.Module):
    """Runs a net or one of its parts; tensors that parts share are bound in all of them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, name: str, value: Tensor) -> Tensor:
        out: Tensor = getattr(self.net, name)(value) if name else self.net(value)
        return out


def _counts(layer: _BatchNorm) -> bool:
    return layer.track_running_stats and layer.momentum is None


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
