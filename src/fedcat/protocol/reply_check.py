"""The reply check: every reply passes it before a method sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedcat.models.layout import Layout, Tensors
from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.reply import LARGEST, Reply

NOT_FINITE = f"numbers that are not finite, or above {LARGEST:g}"
"""Why a reply is refused if training has diverged."""

Uploads = Callable[[Hop], Tensors | None]
"""Returns what a hop's reply must upload, as tensors of the right shapes and types; None if that is not known."""


class ReplyCheck:
    """Matches replies to hops and refuses those whose content is not sound.

    Parameters
    ----------
    layout : Layout
        What a row means.
    bound : float, optional
        The largest norm of a client's update of the parameters that is accepted.
    """

    def __init__(self, layout: Layout, bound: float | None = None) -> None:
        self.layout, self.bound = layout, bound
        self._waiting: dict[HopId, tuple[Hop, Tensors | None]] = {}

    def expect(self, hops: Sequence[Hop], uploads: Uploads) -> None:
        """Register hops that were sent out; only these are accepted, each once."""
        self._waiting.update({hop.id: (hop, uploads(hop)) for hop in hops})

    def hop(self, name: HopId) -> Hop | None:
        """Return the hop of this name if its reply is awaited."""
        return self._waiting[name][0] if name in self._waiting else None

    @property
    def waiting(self) -> bool:
        """Whether a reply is awaited."""
        return bool(self._waiting)

    def forget(self) -> None:
        """Forget the hops that were sent out: after a restore they are planned again."""
        self._waiting.clear()

    def admit(self, replies: Sequence[Reply]) -> list[tuple[Hop, Reply]]:
        """Return the replies that end a hop, each with its hop; unsound ones are refused.

        A reply to a hop that was never sent, or that has already ended, ends nothing and is dropped.
        """
        known: list[tuple[Hop, Reply]] = []
        for reply in replies:
            if reply.hop in self._waiting:
                hop, uploads = self._waiting.pop(reply.hop)
                known.append((hop, self._checked(reply, uploads)))
        bad = self._bad_numbers(known)
        return [(hop, reply.refused(bad[hop.id]) if hop.id in bad else reply) for hop, reply in known]

    def _checked(self, reply: Reply, uploads: Tensors | None) -> Reply:
        if not reply.arrived:
            return reply.emptied()
        end, size, dtype = reply.end, self.layout.size, self.layout.dtype
        if end is None:
            return reply.refused("no row came back")
        if end.shape != (size,):
            return reply.refused(f"row of shape {tuple(end.shape)}, expected ({size},)")
        if end.dtype != dtype:
            return reply.refused(f"row of {end.dtype}, expected {dtype}")
        if reply.samples < 1 or reply.steps < 1:
            return reply.refused(f"{reply.samples} samples and {reply.steps} steps, expected at least one of each")
        wrong = "" if uploads is None else _wrong_uploads(reply.uploads, uploads)
        return reply.refused(wrong) if wrong else reply

    def _bad_numbers(self, known: list[tuple[Hop, Reply]]) -> dict[HopId, str]:
        """Return why replies are refused for their numbers, by hop id."""
        checked = [(hop, reply) for hop, reply in known if reply.end is not None]
        finite = _finite([reply for _, reply in checked])
        bad = {hop.id: NOT_FINITE for (hop, _), sound in zip(checked, finite, strict=True) if not sound}
        if self.bound is not None and checked:
            norms = torch.linalg.vector_norm(updates(checked, self.layout), dim=1).tolist()
            for (hop, _), norm in zip(checked, norms, strict=True):
                if norm > self.bound and hop.id not in bad:
                    bad[hop.id] = f"an update of norm {norm:.3g}, above the bound {self.bound:g}"
        return bad


def updates(arrived: Sequence[tuple[Hop, Reply]], layout: Layout) -> Tensor:
    """Return what clients have changed in the parameters, [R, P]; running statistics are no part of it."""
    size = layout.parameter_size
    return torch.stack([reply.end[:size] - hop.start[:size] for hop, reply in arrived if reply.end is not None])


def _wrong_uploads(found: Tensors, expected: Tensors) -> str:
    """Return what is wrong with uploads, or an empty text."""
    if found.keys() != expected.keys():
        names = [", ".join(sorted(names)) or "nothing" for names in (found, expected)]
        return f"uploads of {names[0]}, expected {names[1]}"
    for name, right in expected.items():
        upload = found[name]
        if (upload.shape, upload.dtype) != (right.shape, right.dtype):
            got, wanted = (f"{t.dtype} of shape {tuple(t.shape)}" for t in (upload, right))
            return f"upload {name!r} is {got}, expected {wanted}"
    return ""


def _finite(replies: Sequence[Reply]) -> list[bool]:
    """Return which replies hold only sound numbers; those that their engine has not looked at are read together."""
    found = [reply.finite for reply in replies]
    left = [place for place, known in enumerate(found) if known is None]
    if left:
        tensors = [(place, t) for place in left for t in _tensors(replies[place])]
        sound = torch.stack([_sound(t).to(tensors[0][1].device) for _, t in tensors]).tolist()  # one transfer
        for place in left:
            found[place] = all(ok for (owner, _), ok in zip(tensors, sound, strict=True) if owner == place)
    return [bool(known) for known in found]


def _sound(tensor: Tensor) -> Tensor:
    return (tensor.abs() <= LARGEST).all()


def _tensors(reply: Reply) -> list[Tensor]:
    end = [] if reply.end is None else [reply.end]
    return [*end, *reply.uploads.values(), *reply.memory.values()]
