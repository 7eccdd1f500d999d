"""FedCat-Plus: FedCat whose copies stay apart, whose steps are led, and whose model is an average over rounds."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedcat.core.options import check_bounds
from fedcat.methods.average import RunningAverage
from fedcat.methods.base import Context
from fedcat.methods.fedcat import FedCat
from fedcat.methods.lead import Lead, LedRule
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply


class FedCatPlus(FedCat):
    """FedCat with three parts of its own. Without them, at spread = lead = smoothing = 0, it is FedCat bit for bit.

    Each round K clients are selected by groups and counts, and every copy trains on one of them, as in FedCat. Then:

    1. **Stay apart.** The copies are never made equal. Their deviations from their mean are scaled by one factor, so
       that their distance from it is `spread` times the mean's norm. It grows from 0 in the first ten cycles: at first
       the copies are nearly one model, as in FedAvg.
    2. **Lead.** In the next round, a local step is a share `lead` of the mean step of this round's hops and 1 - lead of
       the client's own. The share grows with the rounds r, as r / (r + 10).
    3. **Smooth.** The global model is an average of the copies' mean over rounds. Nobody trains it.

    Traffic is 1.5 times FedAvg's: the step that leads travels down with the copies.

    Parameters
    ----------
    context : Context
        See there.
    spread : float
        How far from their mean the copies stay, relative to its norm; 0: they are averaged after each cycle of K
        rounds instead, as in FedCat.
    lead : float
        The largest share of the mean step in a local step; 0: clients take their own steps.
    smoothing : float
        The decay of the average over rounds that is the global model; 0: it is the last mean of the copies.
    grouping, epsilon, lambda_, retry
        See `FedCat`.

    Attributes
    ----------
    parting : int
        Cycles over which the distance grows to `spread`.
    growth : float
        The largest factor by which the distance grows in a round.
    warm_up : int
        Rounds after which the lead is a half, or its limit, and until which a round's share in the average is more than
        a half.
    """

    parting: ClassVar[int] = 10
    growth: ClassVar[float] = 1.05
    warm_up: ClassVar[int] = 10

    def __init__(
        self,
        context: Context,
        *,
        spread: float = 0.1,
        lead: float = 0.9,
        smoothing: float = 0.95,
        grouping: bool = True,
        epsilon: float = 0.5,
        lambda_: float = 1.0,
        retry: int = 0,
    ) -> None:
        super().__init__(context, grouping=grouping, epsilon=epsilon, lambda_=lambda_, retry=retry)
        check_bounds("spread", spread, at_least=0)
        check_bounds("lead", lead, at_least=0, below=1)
        check_bounds("smoothing", smoothing, at_least=0, below=1)
        self.spread, self.share = spread, lead
        self.length = 1 if spread else self.length
        self.smooth = RunningAverage(smoothing, self.warm_up) if smoothing else None
        self.lead = Lead(context)
        if lead:
            self.rule = LedRule()
        self._steps: dict[int, tuple[Tensor, int]] = {}  # of this round's copies, with their samples

    def _open(self) -> int:
        """Return the round before which hops may start now: the next one, if a part needs all replies of this one."""
        return self.round + 1 if self.share or self.smooth else super()._open()

    def _slot(self, copy: int, round: int) -> int:
        return (round + copy) % self.context.per_round

    def _hop(self, copy: int, round: int) -> Hop:
        """Let the last mean step lead."""
        hop = super()._hop(copy, round)
        return self.lead.send(hop, min(self.share, round / (round + self.warm_up))) if self.share else hop

    def _move(self, hop: Hop, end: Tensor, reply: Reply) -> None:
        """Put a copy where its hop has ended, and note its mean local step."""
        super()._move(hop, end, reply)
        self._steps[hop.copy] = (self.lead.step_of(hop, end, reply.steps), reply.samples)

    def _complete(self, round: int) -> None:
        """End a round: the mean step will lead, the copies stay apart, the global model follows their mean."""
        arrived = [self._steps[copy] for copy in sorted(self._steps)]
        self._steps = {}
        if arrived and self.share:
            steps, samples = zip(*arrived, strict=True)
            self.lead.follow(steps, samples, self.aggregate, self.context.lr(round - 1))
        super()._complete(round)
        if arrived and self.smooth is not None:
            self.smooth.add(self._mean(self.copies, self.seen))

    def _aggregate(self) -> None:
        """Average the copies; they go on from where they are, but at the wanted distance from their mean."""
        if not self.spread:
            super()._aggregate()
            return
        copies = torch.stack(self.copies)
        if any(self.seen):
            mean = self.aggregate(copies, [1] * len(copies), self.row)
            self.row = self.step(self.row, mean)
            wanted = self.spread * min(1.0, self.round / (self.parting * len(copies)))
            copies = self.row + self._scaled(copies - mean, wanted)
        self._end_cycle()
        self.copies = list(copies)

    def _scaled(self, deviations: Tensor, wanted: float) -> Tensor:
        """Return deviations [K, D] of the wanted size, relative to the global row; buffers are as they were."""
        size = self.context.layout.parameter_size
        length = torch.linalg.vector_norm(deviations[:, :size]) / math.sqrt(len(deviations))
        tiny = torch.finfo(length.dtype).tiny
        factor = (wanted * torch.linalg.vector_norm(self.row[:size]) / length.clamp(min=tiny)).clamp(max=self.growth)
        return torch.cat([factor * deviations[:, :size], deviations[:, size:]], 1)

    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return the average over rounds as the global model; if wanted, the mean of the copies, and the copies."""
        rows = super().models(*wanted)
        if self.smooth is not None and self.smooth.row is not None:
            rows["global"] = self.smooth.row
        return rows

    def advice(self, rounds: int, interval: int) -> list[str]:
        """Warn as FedCat does, unless the global model changes after every round."""
        return [] if self.smooth is not None else super().advice(rounds, interval)

    def rewind(self, state: dict[str, Any]) -> None:
        """Take the model and the step that leads back to an earlier state; the copies begin again from there."""
        super().rewind(state)
        self._restore_own({**state, "steps": {}})

    def state(self) -> dict[str, Any]:
        """Return also the step that leads, those of this round, and the average."""
        return {
            **super().state(),
            "lead": self.lead.state(),
            "steps": {str(copy): list(step) for copy, step in self._steps.items()},
            "smooth": None if self.smooth is None else self.smooth.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().restore(state)
        self._restore_own(state)

    def _restore_own(self, state: dict[str, Any]) -> None:
        self.lead.restore(state["lead"])
        self._steps = {int(copy): (step, samples) for copy, (step, samples) in state["steps"].items()}
        if self.smooth is not None:
            self.smooth.restore(state["smooth"])
