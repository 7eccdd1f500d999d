"""FedCat-Plus: FedCat whose copies stay apart, whose steps are led, and whose model is an average over rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from fedcat.core.options import Bounds, Option, check_bounds
from fedcat.methods.average import RunningAverage
from fedcat.methods.base import Context
from fedcat.methods.fedcat import FedCat
from fedcat.methods.label_counts import LabelCounts, LabelReport
from fedcat.methods.lead import Lead, LedRule
from fedcat.models.layout import Tensors
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply

UNKNOWN = 0.75
"""The skew of the labels that is assumed where no counts are known."""


@dataclass(frozen=True)
class PlusRule(LedRule, LabelReport):
    """Led steps; a client reports its label counts once."""


class FedCatPlus(FedCat):
    """FedCat with three parts of its own. Without them, at spread = lead = smoothing = 0, it is FedCat bit for bit.

    Each round K clients are selected by groups and counts, and every copy trains on one of them, as in FedCat. Then:

    1. **Stay apart.** The copies are never made equal. Their deviations from their mean are scaled by one factor, so
       that their distance from it is spread * v^2 times the mean's norm, where v is how far the mean has come from the
       initial model, relative to its norm: at first the copies are nearly one model, as in FedAvg.
    2. **Lead.** In the next round, a local step is a share a of the mean step of this round's hops, plus 1 - a of the
       client's own step at a learning rate that is larger by a * gain * (1 - v), so mostly at first. The share grows
       with the rounds r, as r / (r + 10), up to `lead`, or to 1 - skew / (0.8 K) where few clients with skewed labels
       make the mean step noisy. In what leads a copy, its own last step has a share of own * (1 - skew)^3, the mean
       step the rest.
    3. **Smooth.** The global model is an average of the copies' mean over rounds. Nobody trains it.

    Traffic is 1.5 times FedAvg's: the step that leads travels down with the copies.

    Parameters
    ----------
    context : Context
        See there.
    spread : float
        How far from their mean the copies stay in the end, relative to its norm; 0: they are averaged after each cycle
        of K rounds instead, as in FedCat.
    lead : float
        The largest share of the mean step in a local step; 0: clients take their own steps.
    own : float
        The share of a copy's own last step in what leads it, if labels are not skewed; 0: the mean step alone.
    gain : float
        How much larger a client's own learning rate is where the mean step has the whole share and v is 0.
    smoothing : float
        The memory of the average over rounds that is the global model, see `RunningAverage`; 0: it is the last mean of
        the copies.
    skew : float, optional
        The mean total variation distance between a client's class shares and those of all data. By default it is
        computed from the label counts that each client reports once; 0.75 until some are known, or if the targets are
        no classes.
    grouping, epsilon, lambda_, retry
        See `FedCat`.

    Attributes
    ----------
    growth : float
        The largest factor by which the distance grows in a round.
    warm_up : int
        Rounds after which the share of the lead is a half, or its limit.
    way : float
        The v above: how far the mean of the copies is from the initial model, relative to its norm.
    """

    growth: ClassVar[float] = 1.05
    warm_up: ClassVar[int] = 10

    def __init__(
        self,
        context: Context,
        *,
        spread: float = 0.15,
        lead: float = 0.95,
        own: float = 1.0,
        gain: float = 1.0,
        smoothing: float = 4.0,
        skew: Annotated[float | None, Option(bounds=Bounds(at_least=0, at_most=1))] = None,
        grouping: bool = True,
        epsilon: float = 0.5,
        lambda_: float = 1.0,
        retry: int = 0,
    ) -> None:
        super().__init__(context, grouping=grouping, epsilon=epsilon, lambda_=lambda_, retry=retry)
        check_bounds("spread", spread, at_least=0)
        check_bounds("lead", lead, at_least=0, below=1)
        check_bounds("own", own, at_least=0, at_most=1)
        check_bounds("gain", gain, at_least=0)
        check_bounds("smoothing", smoothing, at_least=0, at_most=20)
        self.spread, self.limit, self.own, self.gain = spread, lead, own, gain
        self.length = 1 if spread else self.length
        self.way = 0.0
        self.smooth = RunningAverage(smoothing) if smoothing else None
        self.lead = Lead(context, context.per_round if lead and own else 0)
        self.skew = UNKNOWN if skew is None else skew
        check_bounds("skew", self.skew, at_least=0, at_most=1)
        self.labels = LabelCounts(context) if lead and skew is None and context.classes else None
        if lead:
            self.rule = LedRule() if self.labels is None else PlusRule()
        self._steps: dict[int, tuple[Tensor, int]] = {}  # of this round's copies, with their samples
        self._uploads: dict[int, Tensors] = {}  # of this round's clients

    def _open(self) -> int:
        """Return the round before which hops may start now: the next one, if a part needs all replies of this one."""
        return self.round + 1 if self.limit or self.smooth else super()._open()

    def _slot(self, copy: int, round: int) -> int:
        return (round + copy) % self.context.per_round

    def _hop(self, copy: int, round: int) -> Hop:
        """Let the last mean step lead."""
        hop = super()._hop(copy, round)
        if not self.limit:
            return hop
        if self.labels is not None:
            hop = replace(hop, memory=self.labels.memory(hop.client))
        share = self._share(round)
        longer = self.gain * share * max(0.0, 1 - self.way)
        return self.lead.send(hop, share, (1 - share) * (1 + longer))

    def _share(self, round: int) -> float:
        """Return the share of the lead in a round."""
        noisy = self.skew / (0.8 * self.context.per_round)
        return max(0.0, min(self.limit, 1 - noisy, round / (round + self.warm_up)))

    def uploads(self, hop: Hop) -> Tensors | None:
        """Return label counts, which a client reports once."""
        return super().uploads(hop) if self.labels is None else self.labels.uploads(hop.client)

    def _move(self, hop: Hop, end: Tensor, reply: Reply) -> None:
        """Put a copy where its hop has ended, and note its mean local step."""
        super()._move(hop, end, reply)
        if reply.uploads:
            self._uploads[hop.client] = reply.uploads
        self._steps[hop.copy] = (self.lead.step_of(hop, end, reply.steps), reply.samples)

    def _complete(self, round: int) -> None:
        """End a round: the mean step will lead, the copies stay apart, the global model follows their mean."""
        arrived, self._steps = dict(sorted(self._steps.items())), {}
        self._take_labels()
        if arrived and self.limit:
            steps, samples = zip(*arrived.values(), strict=True)
            lr, share = self.context.lr(round - 1), self.own * (1 - self.skew) ** 3
            self.lead.follow(steps, samples, self.aggregate, lr, list(arrived), share)
        super()._complete(round)
        if arrived and self.smooth is not None:
            self.smooth.add(self._mean(self.copies, self.seen))

    def _take_labels(self) -> None:
        """Take the label counts of a round; what is known changes between rounds only."""
        uploads, self._uploads = self._uploads, {}
        if self.labels is None or not uploads:
            return
        for client, sent in uploads.items():
            self.labels.add(client, sent)
        known = self.labels.skew()
        self.skew = self.skew if known is None else known

    def _aggregate(self) -> None:
        """Average the copies; they go on from where they are, but at the wanted distance from their mean."""
        if not self.spread:
            super()._aggregate()
            self._measure()
            return
        copies = torch.stack(self.copies)
        if any(self.seen):
            mean = self.aggregate(copies, [1] * len(copies), self.row)
            self.row = self.step(self.row, mean)
            self._measure()
            copies = self.row + self._scaled(copies - mean)
        self._end_cycle()
        self.copies = list(copies)

    def _scaled(self, deviations: Tensor) -> Tensor:
        """Return deviations [K, D] of the wanted size; buffers are as they were."""
        size, norm = self.context.layout.parameter_size, torch.linalg.vector_norm
        length = norm(deviations[:, :size]) / math.sqrt(len(deviations))
        wanted = self.spread * self.way * norm((self.row - self.context.start)[:size])
        factor = (wanted / length.clamp(min=torch.finfo(length.dtype).tiny)).clamp(max=self.growth)
        return torch.cat([factor * deviations[:, :size], deviations[:, size:]], 1)

    def _measure(self) -> None:
        """Measure how far the mean has come."""
        size, norm = self.context.layout.parameter_size, torch.linalg.vector_norm
        moved, length = norm((self.row - self.context.start)[:size]), norm(self.row[:size])
        self.way = (moved / length.clamp(min=torch.finfo(length.dtype).tiny)).item()

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
        self._restore_learned(state)
        self._steps, self._uploads = {}, {}

    def state(self) -> dict[str, Any]:
        """Return also the step that leads, those of this round, and the average."""
        return {
            **super().state(),
            "lead": self.lead.state(),
            "skew": self.skew,
            "labels": None if self.labels is None else self.labels.state(),
            "steps": {str(copy): list(step) for copy, step in self._steps.items()},
            "uploads": {str(client): dict(sent) for client, sent in self._uploads.items()},
            "smooth": None if self.smooth is None else self.smooth.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        super().restore(state)
        self._restore_learned(state)
        self._steps = {int(copy): (step, samples) for copy, (step, samples) in state["steps"].items()}
        self._uploads = {int(client): dict(sent) for client, sent in state["uploads"].items()}
        self.skew = state["skew"]
        if self.labels is not None:
            self.labels.restore(state["labels"])

    def _restore_learned(self, state: dict[str, Any]) -> None:
        self._measure()
        self.lead.restore(state["lead"])
        if self.smooth is not None:
            self.smooth.restore(state["smooth"])
