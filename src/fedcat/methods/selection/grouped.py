"""FedCat's Algorithm 3, DevSelect: grouping- and count-based selection."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcat.core.rng import Purpose, random_stream
from fedcat.methods.selection.base import Ints


class CountTable:
    """How often each client was selected at each position of a cycle: the paper's M, N x K, stored sparsely.

    A column holds only the clients that were selected in it. A table of 1,000,000 clients and 1,000 positions takes
    12 bytes per nonzero entry.
    """

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self._columns: dict[int, tuple[Ints, NDArray[np.int32]]] = {}

    def column(self, position: int) -> tuple[Ints, NDArray[np.int32]]:
        """Return the clients with a count in this column, ascending, and their counts."""
        return self._columns.get(position, (np.empty(0, np.int64), np.empty(0, np.int32)))

    def increment(self, position: int, chosen: Ints) -> None:
        """Add one for every client of `chosen`."""
        ids, counts = self.column(position)
        merged, place = np.unique(np.concatenate([ids, chosen]), return_inverse=True)
        ones = np.ones(len(chosen), np.int32)
        total = np.bincount(place, weights=np.concatenate([counts, ones]), minlength=len(merged))
        self._columns[position] = (merged, total.astype(np.int32))

    def dense(self, positions: int) -> Ints:
        """Return the first `positions` columns as a matrix [clients, positions]."""
        table = np.zeros((self.clients, positions), np.int64)
        for position in range(positions):
            ids, counts = self.column(position)
            table[ids, position] = counts
        return table

    def nbytes(self) -> int:
        """Return the memory that the entries take."""
        return sum(ids.nbytes + counts.nbytes for ids, counts in self._columns.values())

    def state(self) -> dict[str, Any]:
        """Return the columns."""
        return {str(p): {"clients": i.copy(), "counts": c.copy()} for p, (i, c) in self._columns.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self._columns = {
            int(p): (np.asarray(c["clients"], np.int64), np.asarray(c["counts"], np.int32)) for p, c in state.items()
        }


class GroupedSelector:
    """Selects one client from each of K groups, preferring those that were selected least.

    The clients are divided at random into K groups of nearly equal size, anew every `period` rounds. In each round
    every group contributes one client: with probability `epsilon` one of the largest weight (ties broken at random),
    else one drawn in proportion to its weight 1 / sqrt(M + 1), where M counts how often the client was selected at
    this position of the cycle.

    Parameters
    ----------
    seed : int
        The run's seed.
    clients : int
        The number of clients, N.
    k : int
        The number of groups, K.
    epsilon : float
        The probability of taking a client of the largest weight.
    period : int
        Rounds between two groupings; by default K.
    """

    def __init__(self, seed: int, clients: int, k: int, epsilon: float = 0.5, period: int | None = None) -> None:
        self.seed, self.clients, self.k = seed, clients, k
        self.epsilon = epsilon
        self.period = k if period is None else period
        self.table = CountTable(clients)
        self._excluded: list[int] = []  # from the next grouping on
        self._left_out: list[int] = []  # of this grouping
        self._grouping = -1
        self._order: Ints = np.empty(0, np.int64)
        self._place: Ints = np.empty(0, np.int64)
        self._starts, self._stops = self._borders(clients)

    def group_of(self, round: int, client: int) -> Ints:
        """Return the clients of a client's group in `round`."""
        self._regroup(round)
        place = self._place[client]
        group = int(np.searchsorted(self._stops, place, side="right"))
        return self._order[self._starts[group] : self._stops[group]]

    def groups(self, round: int) -> list[Ints]:
        """Return the clients of each group in `round`."""
        self._regroup(round)
        return np.split(self._order, self._starts[1:])

    def select(self, round: int) -> Ints:
        """Return one client of each group, in the order of the groups."""
        self._regroup(round)
        position = round % self.k
        ids, counts = self.table.column(position)
        places = self._place[ids]
        weight = np.ones(len(self._order))
        weight[places[places >= 0]] = 1.0 / np.sqrt(counts[places >= 0] + 1.0)
        rng = random_stream(self.seed, Purpose.SELECT, round)
        greedy = rng.random(self.k) < self.epsilon
        pick = rng.random(self.k)
        if greedy.any():
            largest = np.maximum.reduceat(weight, self._starts)
            floor = np.repeat(np.where(greedy, largest, 0.0), self._stops - self._starts)
            weight[weight < floor] = 0.0
        chosen = self._order[self._draw(weight, pick)]
        self.table.increment(position, chosen)
        return chosen

    def _draw(self, weight: NDArray[np.float64], pick: NDArray[np.float64]) -> Ints:
        """Return one place per group, drawn by weight: where the running sum passes `pick` of the group's sum."""
        running = np.cumsum(weight)
        top = running[self._stops - 1]
        bottom = np.concatenate([[0.0], top[:-1]])
        target = np.minimum(bottom + pick * (top - bottom), np.nextafter(top, 0.0))
        places: Ints = np.searchsorted(running, target, side="right")
        return places

    def _regroup(self, round: int) -> None:
        grouping = round // self.period
        if grouping != self._grouping:
            self._group(grouping, self._excluded)

    def _group(self, grouping: int, left_out: list[int]) -> None:
        """Divide the clients that are not left out into K groups of nearly equal size."""
        self._grouping, self._left_out = grouping, left_out
        left = np.delete(np.arange(self.clients), left_out)
        rng = random_stream(self.seed, Purpose.GROUP, grouping * self.period)
        self._order = left[rng.permutation(len(left))]
        self._place = np.full(self.clients, -1)
        self._place[self._order] = np.arange(len(left))
        self._starts, self._stops = self._borders(len(left))

    def _borders(self, clients: int) -> tuple[Ints, Ints]:
        """Return where each of K groups of nearly equal size begins and ends."""
        sizes = np.full(self.k, clients // self.k) + (np.arange(self.k) < clients % self.k)
        stops: Ints = np.cumsum(sizes)
        return stops - sizes, stops

    def exclude(self, clients: Collection[int]) -> None:
        """Leave clients out of the groups from the next grouping on."""
        self._excluded = sorted(clients)

    def state(self) -> dict[str, Any]:
        """Return the counts and who is left out of this grouping; the groups are drawn again from their stream."""
        return {"table": self.table.state(), "grouping": self._grouping, "left_out": list(self._left_out)}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        self.table.restore(state["table"])
        if state["grouping"] >= 0:
            self._group(state["grouping"], list(state["left_out"]))
