"""Collapse: a model that had learned something and falls back to chance, or is no longer finite."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch

from fedcat.data.federation import Federation
from fedcat.models.losses import cross_entropy
from fedcat.protocol.reply_check import NOT_FINITE
from fedcat.runs.callbacks import Callback
from fedcat.runs.history import Record
from fedcat.runs.run import Run

MOST = 3
"""How often a model is taken back in one run."""
LEARNED, CHANCE = 0.5, 1.0
"""The training loss relative to chance: below the first a model has learned; from the second on that is lost."""
ENOUGH = 5
"""Averages of the training loss of which none was below chance, after which a model has learned nothing."""
SILENT = 3
"""The least number of rounds without finite numbers that count as a collapse."""
GOOD = 1.2
"""How much larger than its smallest the training loss may be for a model to count as good."""


class CollapseWatch(Callback):
    """Notices that the global model collapses, by training loss and validation data, never by test data.

    The training loss is compared with chance: the loss of a net that knows how frequent each class is at each client
    and nothing else. For other losses than the cross entropy, chance is the loss at the beginning. The loss of a method
    that adds terms of its own, as FedGen does, is not compared with chance.

    Parameters
    ----------
    action : str
        ``warn``, ``stop`` the run, or ``restore``: the model goes back to the last good one, the rounds go on.
    interval : int
        Rounds over which the training loss is averaged, and between two good models that are kept.
    """

    def __init__(self, action: str, interval: int) -> None:
        self.action, self.interval = action, interval
        self._losses: list[list[float]] = []  # of the last rounds: the mean loss, and that of chance
        self._least = self._begin = math.inf
        self._best = 0.0
        self._restored = 0
        self._down = False
        self._good: dict[str, Any] | None = None
        self._newest: dict[str, Any] | None = None  # good if the losses that follow are
        self._since = 0  # rounds with a loss since the newest model
        self._silent = 0  # the last rounds in which at least half of the hops gave no finite numbers
        self._sound = False  # whether a round since the newest model lost no hop to such numbers
        self._comparable = True
        self._entropies: np.ndarray[Any, Any] | None = None

    def on_start(self, run: Run) -> None:
        """Compute what a net without knowledge would lose."""
        self._comparable = not run.task.rule.own_loss
        if run.federation.classes and run.task.loss is cross_entropy:
            self._entropies = entropies(run.federation)

    def on_round(self, run: Run, record: Record) -> None:
        """Look at a round."""
        losses = [(hop.loss, self._chance(hop.client)) for hop in record.hops if hop.loss is not None]
        if losses:
            self._losses.append([float(np.mean(column)) for column in zip(*losses, strict=True)])
            self._since += 1
        lost = sum(hop.why == NOT_FINITE for hop in record.hops)
        self._silent = self._silent + 1 if lost and 2 * lost >= len(record.hops) else 0
        self._sound |= not lost
        why = self._fallen(run, record)
        if not why:
            self._down &= not self._recovered()
        elif not self._down:
            self._down = True
            self._act(run, f"the model has collapsed by round {record.round}: {why}")

    def on_end(self, run: Run) -> None:
        """Say so if a model has learned nothing.

        A loss that was never below chance is not enough: where clients hold few classes, knowing how frequent they are
        is worth more than a good model whose steps are led by other clients.
        """
        poor = self._comparable and CHANCE <= self._least < math.inf and len(run.history) >= ENOUGH * self.interval
        if poor and not self._has_learned(run):
            run.late_notes.append("the model has learned nothing: its training loss was never below that of chance")

    def _has_learned(self, run: Run) -> bool:
        """Tell whether an accuracy, on test data only if it ever changed, is clearly better than a constant answer."""
        if not run.federation.classes:
            return False
        known = {record.metrics["accuracy"] for record in run.history if "accuracy" in record.metrics}
        best = max([self._best, *known] if len(known) > 1 else [self._best])
        share = _largest_share(run.federation)
        return best >= min(2 * share, (1 + share) / 2)

    def _chance(self, client: int) -> float:
        return math.inf if self._entropies is None else float(self._entropies[client])

    def _ratio(self) -> float | None:
        """Return the training loss of the last rounds relative to chance; None if there are too few."""
        self._losses = self._losses[-self.interval :]
        if len(self._losses) < self.interval:
            return None
        loss, chance = (math.fsum(column) / self.interval for column in zip(*self._losses, strict=True))
        if not self._comparable:
            return loss
        if self._entropies is None:
            self._begin = chance = self._begin if math.isfinite(self._begin) else loss
        return loss / chance if chance > 0 else None

    def _recovered(self) -> bool:
        ratio = self._ratio()
        return ratio is not None and ratio < (LEARNED if self._comparable else GOOD * self._least)

    def _fallen(self, run: Run, record: Record) -> str:
        """Return how the model has collapsed, or an empty text; keep it if it may be good.

        A round's training loss is that of the model before the round: a model is good if the losses after it are.
        """
        ratio = self._ratio()
        if ratio is not None and math.isnan(ratio):
            return "the training loss is not a number"
        if self._silent >= max(self.interval, SILENT) and self._least < math.inf:
            return f"at least half of the hops have given no finite numbers for {self._silent} rounds"
        if record.evaluated and not bool(torch.isfinite(run.method.models()["global"]).all()):
            return "it contains numbers that are not finite"
        if "accuracy" in record.validation:
            accuracy, share = record.validation["accuracy"]["weighted_mean"], _largest_share(run.federation)
            if self._best >= 2 * share and accuracy <= 1.1 * share:
                return f"validation accuracy {accuracy:.1%} after {self._best:.1%}; a constant answer gives {share:.1%}"
            self._best = max(self._best, accuracy)
        if ratio is None:
            return ""
        if self._comparable and self._least < LEARNED and ratio >= CHANCE:
            return f"the training loss is {ratio:.2f} times that of chance, after {self._least:.2f} times"
        self._least = min(self._least, ratio)
        if self.action == "restore" and record.round % self.interval == 0:
            self._keep(run, ratio)
        return ""

    def _keep(self, run: Run, ratio: float) -> None:
        """Keep the newest model as a good one if the losses that came after it are good, and then the one of now.

        If every round since then has lost hops to numbers that are not finite, one of its copies may be broken.
        """
        if self._newest is not None and self._since < self.interval:
            return
        if self._newest is not None and self._sound and ratio <= GOOD * self._least:
            self._good = self._newest
        self._newest, self._since, self._sound = run.method.state(), 0, False

    def _act(self, run: Run, why: str) -> None:
        if self.action == "stop":
            run.stop(why)
            return
        if self.action == "restore" and self._good is not None and self._restored < MOST and not run.done:
            self._restored += 1
            run.method.rewind(self._good)
            self._losses, self._newest, self._silent, self._down = [], None, 0, False
            why += "; it is taken back to the last good one"
        run.late_notes.append(why)
        warnings.warn(f"{run.name}: {why}", stacklevel=2)

    def state(self) -> dict[str, Any]:
        """Return what has been seen, and the last good model."""
        return {
            "losses": [list(pair) for pair in self._losses],
            "least": self._least,
            "begin": self._begin,
            "best": self._best,
            "restored": self._restored,
            "down": self._down,
            "good": self._good,
            "newest": self._newest,
            "since": self._since,
            "silent": self._silent,
            "sound": self._sound,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self._losses = [list(pair) for pair in state["losses"]]
        self._least, self._begin, self._best = state["least"], state["begin"], state["best"]
        self._restored, self._down = state["restored"], state["down"]
        self._good, self._newest = state["good"], state["newest"]
        self._since, self._silent = state["since"], state["silent"]
        self._sound = state.get("sound", True)  # versions before did not look


def entropies(federation: Federation) -> np.ndarray[Any, Any]:
    """Return the entropy of each client's classes: the cross entropy of a net that knows their frequencies alone."""
    counts = federation.class_counts.astype(float)
    shares = counts / counts.sum(1, keepdims=True)
    found: np.ndarray[Any, Any] = -(shares * np.log(np.where(shares > 0, shares, 1.0))).sum(1)
    return found


def _largest_share(federation: Federation) -> float:
    total = federation.class_counts.sum(0)
    return float(total.max() / total.sum())
