"""FedCat (Hu et al. 2022): copies of the model walk through chains of clients before they are averaged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.options import check_bounds
from fedcat.core.rng import Purpose, random_stream
from fedcat.methods.average import weighted_mean
from fedcat.methods.base import Context, Method
from fedcat.methods.selection import Selector, check_selection
from fedcat.methods.selection.grouped import GroupedSelector
from fedcat.protocol.hop import Hop
from fedcat.protocol.reply import Reply, Status


class FedCat(Method):
    """Device concatenation with grouping- and count-based selection (Algorithms 1 to 3).

    Each round K clients are selected. Copy i of the model goes to selected client (round + i) mod K, trains there and
    moves on. After K rounds, a cycle, the copies are averaged, weighted by the samples they have seen. A copy starts
    its next hop as soon as its own last one is back; only the end of a cycle waits for all copies.

    If a hop fails, its copy stays as it was and moves on; with `retry`, it first tries other clients of the same group.
    Clients that are banned are left out from the next grouping on.

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
    retry : int
        How many other clients of the group a copy tries in the same round if a hop fails. They are counted as selected.
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
        retry: int = 0,
    ) -> None:
        super().__init__(context)
        k = context.per_round
        check_bounds("epsilon", epsilon, at_least=0, at_most=1)
        check_bounds("retry", retry, at_least=0)
        period = round(lambda_ * k) if np.isfinite(lambda_) else 0
        if period < 1 or abs(period - lambda_ * k) > 1e-9 * k:
            raise SettingError(
                f"lambda must be > 0 and make lambda * K = {lambda_:g} * {k} a whole number of rounds, got {lambda_:g}"
            )
        self.length = k if concatenation else 1
        self.selector = self._selector(grouping, epsilon, period)
        self.row = context.start
        self.retry = retry
        self._excluded: list[int] = []
        self._refused: list[int] = []
        self._chosen: dict[int, list[int]] = {}
        self._spare: dict[int, list[list[int]]] = {}
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
        self._attempts = [0] * k
        self.outstanding.clear()
        self._passed: dict[int, dict[int, tuple[Tensor, int]]] = {}

    @property
    def round(self) -> int:  # type: ignore[override]
        """Rounds that are complete for every copy."""
        return min(self._next)

    def plan(self, until: int) -> list[Hop]:
        """Return the next hop of every copy that is not on its way."""
        stop = min(until, self._open())
        away = self.outstanding.copies()
        ready = [copy for copy in range(len(self.copies)) if copy not in away and self._next[copy] < stop]
        return self.outstanding.start(self._hop(copy, self._next[copy]) for copy in ready)

    def _open(self) -> int:
        """Return the round before which hops may start now: the end of the cycle."""
        return self.first + self.length

    def _hop(self, copy: int, round: int) -> Hop:
        """Return a copy's hop in a round (Algorithm 2): it goes to selected client (offset + copy) mod K."""
        slot, attempt = self._slot(copy, round), self._attempts[copy]
        clients = self._clients(round)
        return Hop(
            round=round,
            client=self._spare[round][slot][attempt - 1] if attempt else clients[slot],
            start=self.copies[copy],
            epochs=self.context.epochs,
            lr=self.context.lr(round),
            copy=copy,
            attempt=attempt,
            stage=attempt,
            visit=0 if attempt else clients[:slot].count(clients[slot]),
        )

    def _slot(self, copy: int, round: int) -> int:
        return (round - self.first + copy) % self.context.per_round

    def _clients(self, round: int) -> list[int]:
        """Return the clients of a round; the selector is asked for the rounds in order, each once."""
        while round not in self._chosen:
            after = max(self._chosen, default=self.first - 1) + 1
            chosen = self.selector.select(after)
            self._chosen[after] = check_selection(chosen, self.context.clients, self.context.per_round)
            if self.retry:
                self._spare[after] = self._substitutes(after)
        return self._chosen[round]

    def _substitutes(self, round: int) -> list[list[int]]:
        """Return for each slot the clients to try if a hop fails: others of its group, each in one slot only."""
        chosen, k = self._chosen[round], self.context.per_round
        order = random_stream(self.context.seed, Purpose.RETRY, round).permutation(self.context.clients).tolist()
        taken = {*chosen, *self._excluded}
        free = [client for client in order if client not in taken]
        if not isinstance(self.selector, GroupedSelector):
            return [free[slot::k][: self.retry] for slot in range(k)]
        groups = [set(self.selector.group_of(round, client).tolist()) for client in chosen]
        return [[client for client in free if client in group][: self.retry] for group in groups]

    def _tries_again(self, copy: int) -> bool:
        """Send a copy whose hop has failed to the next substitute; return whether there is one."""
        round, attempt = self._next[copy], self._attempts[copy]
        spare = self._spare[round][self._slot(copy, round)] if self.retry else []
        if attempt >= len(spare):
            return False
        self._attempts[copy] = attempt + 1
        if isinstance(self.selector, GroupedSelector):
            self.selector.table.increment(round % self.context.per_round, np.array([spare[attempt]]))
        return True

    def _exclude(self, clients: Collection[int]) -> None:
        self._excluded = list(clients)
        if self.bans.after is not None:
            self.selector.exclude(self._excluded)

    def absorb(self, replies: Sequence[Reply]) -> None:
        """Move copies on; average them when the last one has ended the cycle."""
        before = self.round
        for reply in replies:
            hop = self.outstanding.end(reply)
            copy = hop.copy
            if reply.status is Status.REFUSED:
                self._refused.append(hop.client)
            if reply.end is not None:
                self._move(hop, reply.end.clone(), reply)
            elif self._tries_again(copy):
                continue
            self._next[copy] += 1
            self._attempts[copy] = 0
            if self.average is not None:
                self._passed.setdefault(self._next[copy], {})[copy] = (self.copies[copy], self.seen[copy])
        if self.round > before:
            self._complete(self.round)

    def _move(self, hop: Hop, end: Tensor, reply: Reply) -> None:
        """Put a copy where its hop has ended."""
        self.copies[hop.copy] = end
        self.seen[hop.copy] += reply.samples

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
        self._end_cycle()

    def _end_cycle(self) -> None:
        """Leave out clients that are banned by now, and start the next cycle."""
        first = self.round
        self._chosen = {r: clients for r, clients in self._chosen.items() if r >= first}
        self._spare = {r: clients for r, clients in self._spare.items() if r >= first}
        self.bans.count(self._refused)
        self._refused = []
        self._exclude(self.bans.banned)
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

    def rewind(self, state: dict[str, Any]) -> None:
        """Take the global model back to an earlier state; the copies begin again from it, and the rounds go on."""
        self.row = state["row"]
        self.copies, self.seen = [self.row] * len(self.copies), [0] * len(self.seen)
        self.restore_parts(state)
        self._refused = []
        self._exclude(self.bans.banned)  # those of a model that had not collapsed

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
            "spare": {str(r): [list(slot) for slot in slots] for r, slots in self._spare.items()},
            "attempts": list(self._attempts),
            "refused": sorted(self._refused),
            "excluded": list(self._excluded),
            "selector": self.selector.state(),
            **self.parts_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.row = state["row"]
        self._begin(state["first"])
        self.copies = [copy.clone() for copy in state["copies"]]
        self.seen, self._next = list(state["seen"]), list(state["next"])
        self._passed = {
            int(r): {int(c): (row, seen) for c, (row, seen) in copies.items()} for r, copies in state["passed"].items()
        }
        self._chosen = {int(r): list(clients) for r, clients in state["chosen"].items()}
        self._spare = {int(r): [list(slot) for slot in slots] for r, slots in state["spare"].items()}
        self._attempts = list(state["attempts"])
        self._refused = list(state["refused"])
        self.selector.restore(state["selector"])
        self._exclude(state["excluded"])
        self.restore_parts(state)
