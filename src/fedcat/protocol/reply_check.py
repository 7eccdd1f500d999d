"""The reply check: every reply passes it before a method sees it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.reply import Reply

NOT_FINITE = "numbers that are not finite"
"""Why a reply is refused if training has diverged."""


class ReplyCheck:
    """Matches replies to hops and refuses those whose content is not sound.

    Parameters
    ----------
    size : int
        The length of a row.
    dtype : torch.dtype
        The type of a row.
    bound : float, optional
        The largest norm of a client's update that is accepted.
    """

    def __init__(self, size: int, dtype: torch.dtype, bound: float | None = None) -> None:
        self.size, self.dtype, self.bound = size, dtype, bound
        self._waiting: dict[HopId, Hop] = {}

    def expect(self, hops: Sequence[Hop]) -> None:
        """Register hops that were sent out; only these are accepted, each once."""
        self._waiting.update({hop.id: hop for hop in hops})

    def forget(self) -> None:
        """Forget the hops that were sent out: after a restore they are planned again."""
        self._waiting.clear()

    def admit(self, replies: Sequence[Reply]) -> list[tuple[Hop, Reply]]:
        """Return the replies that end a hop, each with its hop; unsound ones are refused.

        A reply to a hop that was never sent, or that has already ended, ends nothing and is dropped.
        """
        known: list[tuple[Hop, Reply]] = []
        for reply in replies:
            hop = self._waiting.pop(reply.hop, None)
            if hop is not None:
                known.append((hop, self._checked(reply)))
        bad = self._bad_numbers(known)
        return [(hop, reply.refused(bad[hop.id]) if hop.id in bad else reply) for hop, reply in known]

    def _checked(self, reply: Reply) -> Reply:
        if not reply.arrived:
            return reply.emptied()
        end = reply.end
        if end is None:
            return reply.refused("no row came back")
        if end.shape != (self.size,):
            return reply.refused(f"row of shape {tuple(end.shape)}, expected ({self.size},)")
        if end.dtype != self.dtype:
            return reply.refused(f"row of {end.dtype}, expected {self.dtype}")
        if reply.samples < 1 or reply.steps < 1:
            return reply.refused(f"{reply.samples} samples and {reply.steps} steps, expected at least one of each")
        return reply

    def _bad_numbers(self, known: list[tuple[Hop, Reply]]) -> dict[HopId, str]:
        """Return why replies are refused for their numbers, by hop id."""
        checked = [(hop, reply) for hop, reply in known if reply.end is not None]
        finite = _finite([reply for _, reply in checked])
        bad = {hop.id: NOT_FINITE for (hop, _), sound in zip(checked, finite, strict=True) if not sound}
        if self.bound is not None and checked:
            moved = torch.stack([reply.end - hop.start for hop, reply in checked if reply.end is not None])
            norms = torch.linalg.vector_norm(moved, dim=1).tolist()
            for (hop, _), norm in zip(checked, norms, strict=True):
                if norm > self.bound and hop.id not in bad:
                    bad[hop.id] = f"an update of norm {norm:.3g}, above the bound {self.bound:g}"
        return bad


def _finite(replies: Sequence[Reply]) -> list[bool]:
    """Return which replies hold only finite numbers; those that their engine has not looked at are read together."""
    found = [reply.finite for reply in replies]
    left = [place for place, known in enumerate(found) if known is None]
    if left:
        tensors = [(place, t) for place in left for t in _tensors(replies[place])]
        sound = torch.stack(
            [torch.isfinite(t).all().to(tensors[0][1].device) for _, t in tensors]
        ).tolist()  # one transfer
        for place in left:
            found[place] = all(ok for (owner, _), ok in zip(tensors, sound, strict=True) if owner == place)
    return [bool(known) for known in found]


def _tensors(reply: Reply) -> list[Tensor]:
    end = [] if reply.end is None else [reply.end]
    return [*end, *reply.uploads.values(), *reply.memory.values()]
