"""FedCat (Hu et al. 2022): copies of the model walk through chains of clients before they are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.options import check_bounds
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context, Method
from fedcat.methods.selection import Selector, check_selection
from fedcat.methods.selection.grouped import GroupedSelector
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply


class FedCat(Method):
    """Device concatenation with grouping- and count-based selection (Algorithms 1 to 3).

    Each round K clients are selected. Copy i of the model goes to selected client (round + i) mod K, trains there and
    moves on. After K rounds, a cycle, the copies are averaged, weighted by the samples they have seen. A copy starts
    its next hop as soon as its own last one is back; only the end of a cycle waits for all copies.

    If a hop fails, its copy stays as it was and moves on.

    Parameters
    ----------
    context : Context
        See there.
    grouping : bool
        Select by groups and counts (Algorithm 3); otherwise K clients uniformly, as FedAvg does.
    concatenation : bool
        Let the copies walk; otherwise average after every round.
    epsilon : float
        The probability, in each group, of taking a client of the largest weight rather than drawing by weight.
    lambda_ : float
        Cycles between two groupings; lambda * K must be a whole number of rounds.
    """

    default_server_optimizer = "mean"
    extra_models = ("mean", "copies")

    def __init__(
        self,
        context: Context,
        *,
        grouping: bool = True,
        concatenation: bool = True,
        epsilon: float = 0.5,
        lambda_: float = 1.0,
    ) -> None:
        super().__init__(context)
        k = context.per_round
        check_bounds("epsilon", epsilon, at_least=0, at_most=1)
        period = round(lambda_ * k) if np.isfinite(lambda_) else 0
        if period < 1 or abs(period - lambda_ * k) > 1e-9 * k:
            raise SettingError(
                f"lambda must be > 0 and make lambda * K = {lambda_:g} * {k} a whole number of rounds, got {lambda_:g}"
            )
        self.length = k if concatenation else 1
        self.selector = self._selector(grouping, epsilon, period)
        self.row = context.start
        self._chosen: dict[int, list[int]] = {}
        self._begin(0)

    def _selector(self, grouping: bool, epsilon: float, period: int) -> Selector:
        context = self.context
        if not grouping:
            return context.selection()
        context.refuse_selector(
            "FedCat selects by groups and counts; another selection needs the option grouping=false"
            if self.length > 1
            else "FedCat without concatenation is its selection by groups and counts"
        )
        return GroupedSelector(context.seed, context.clients, context.per_round, epsilon, period)

    def _begin(self, first: int) -> None:
        """Start a cycle at round `first`: every copy is the global model and has seen nothing."""
        k = self.context.per_round
        self.first = first
        self.copies = [self.row] * k
        self.seen = [0] * k
        self._next = [first] * k
        self.outstanding.clear()
        self._passed: dict[int, dict[int, tuple[Tensor, int]]] = {}

    @property
    def round(self) -> int:  # type: ignore[override]
        """Rounds that are complete for every copy."""
        return min(self._next)

    def plan(self, until: int) -> list[Hop]:
        """Return the next hop of every copy that is not on its way."""
        stop = min(until, self.first + self.length)
        away = self.outstanding.copies()
        ready = [copy for copy in range(len(self.copies)) if copy not in away and self._next[copy] < stop]
        return self.outstanding.start(self._hop(copy, self._next[copy]) for copy in ready)

    def _hop(self, copy: int, round: int) -> Hop:
        """Return a copy's hop in a round (Algorithm 2): it goes to selected client (offset + copy) mod K."""
        slot = (round - self.first + copy) % self.context.per_round
        clients = self._clients(round)
        return Hop(
            round=round,
            client=clients[slot],
            start=self.copies[copy],
            epochs=self.context.epochs,
            lr=self.context.lr(round),
            copy=copy,
            visit=clients[:slot].count(clients[slot]),
        )

    def _clients(self, round: int) -> list[int]:
        """Return the clients of a round; the selector is asked for the rounds in order, each once."""
        while round not in self._chosen:
            after = max(self._chosen, default=self.first - 1) + 1
            chosen = self.selector.select(after)
            self._chosen[after] = check_selection(chosen, self.context.clients, self.context.per_round)
        return self._chosen[round]

    def absorb(self, replies: Sequence[Reply]) -> None:
        """Move copies on; average them when the last one has ended the cycle."""
        before = self.round
        for reply in replies:
            copy = self.outstanding.end(reply).copy
            if reply.end is not None:
                self.copies[copy] = reply.end.clone()
                self.seen[copy] += reply.samples
            self._next[copy] += 1
            if self.average is not None:
                self._passed.setdefault(self._next[copy], {})[copy] = (self.copies[copy], self.seen[copy])
        if self.round > before:
            self._complete(self.round)

    def _complete(self, round: int) -> None:
        """End a round that the last copy has passed."""
        passed = self._passed.pop(round, {})
        if round == self.first + self.length:
            self._aggregate()
        if self.average is not None:
            as_it_was = [passed[copy] for copy in range(len(passed))]
            between = round > self.first
            self.average.add(self._mean(*zip(*as_it_was, strict=True)) if between else self.row)

    def _aggregate(self) -> None:
        """End the cycle: global = sum_i d_i * copy_i / sum_j d_j, where copy i has seen d_i samples."""
        if any(self.seen):
            met = [copy for copy, seen in enumerate(self.seen) if seen]
            rows, weights = torch.stack([self.copies[copy] for copy in met]), [self.seen[copy] for copy in met]
            self.row = self.step(self.row, self.aggregate(rows, weights, self.row))
        first = self.round
        self._chosen = {r: clients for r, clients in self._chosen.items() if r >= first}
        self._begin(first)

    def _mean(self, copies: Sequence[Tensor], seen: Sequence[int]) -> Tensor:
        return weighted_mean(torch.stack(list(copies)), seen) if any(seen) else self.row

    def close(self) -> None:
        """Average a cycle that the last round left unfinished."""
        if any(self.seen):
            self._aggregate()

    def models(self, *wanted: str) -> dict[str, Tensor]:
        """Return the global row and the average; if wanted, the mean of the copies as they are, and the copies."""
        rows = {"global": self.row, **self.averaged(self.row)}
        if "mean" in wanted:
            rows["mean"] = self._mean(self.copies, self.seen)
        if "copies" in wanted:
            rows.update({f"copy {i}": copy for i, copy in enumerate(self.copies)})
        return rows

    def advice(self, rounds: int, interval: int) -> list[str]:
        """Warn of evaluations between aggregations, and of a last, partial cycle, which is averaged early."""
        k, notes = self.length, []
        if interval % k and interval < rounds:
            notes.append(
                f"FedCat aggregates every K = {k} rounds; evaluations in between see the model of the last "
                f"aggregation, before round {k} the initial one: set evaluate_every to a multiple of {k}"
            )
        if rounds % k:
            notes.append(
                f"FedCat aggregates every K = {k} rounds, and rounds = {rounds} is not a multiple of {k}: the last "
                f"cycle is averaged after {rounds % k} of its {k} rounds"
            )
        return notes

    def state(self) -> dict[str, Any]:
        """Return the rows of the cycle, where each copy is, and the selection."""
        return {
            "row": self.row,
            "copies": torch.stack(self.copies),
            "first": self.first,
            "seen": list(self.seen),
            "next": list(self._next),
            "passed": {str(r): {str(c): list(p) for c, p in copies.items()} for r, copies in self._passed.items()},
            "chosen": {str(r): list(clients) for r, clients in self._chosen.items()},
            "selector": self.selector.state(),
            **self.parts_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.row = state["row"]
        self._begin(state["first"])
        self.copies = list(state["copies"].unbind(0))
        self.seen, self._next = list(state["seen"]), list(state["next"])
        self._passed = {
            int(r): {int(c): (row, seen) for c, (row, seen) in copies.items()} for r, copies in state["passed"].items()
        }
        self._chosen = {int(r): list(clients) for r, clients in state["chosen"].items()}
        self.selector.restore(state["selector"])
        self.restore_parts(state)
