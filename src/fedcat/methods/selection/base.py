"""Who trains next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry, takes
from fedcat.core.rng import Purpose, chance

Ints = NDArray[np.int64]


class Selector(Protocol):
    """Names the devices of each round, one for each slot. Rounds are asked for in their order, each once."""

    def select(self, round: int) -> Ints:
        """Return the devices of `round`, in slot order."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what a restored selector needs."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        ...


SelectFunction = Callable[[int, np.random.Generator, Ints, int], "Sequence[int] | Ints"]
"""A user's own selection: (round, rng, samples of every device, how many to choose) -> device numbers."""

SELECTORS: Registry[SelectFunction] = Registry("selector")


@SELECTORS.register("uniform", "uniformly at random without replacement")
def uniform(round: int, rng: np.random.Generator, samples: Ints, k: int) -> Ints:
    """Choose k devices uniformly without replacement."""
    return rng.choice(len(samples), size=k, replace=False)


@SELECTORS.register("by-samples", "without replacement, with chances proportional to the samples a device holds")
def by_samples(round: int, rng: np.random.Generator, samples: Ints, k: int) -> Ints:
    """Choose k devices without replacement, by their number of samples."""
    return rng.choice(len(samples), size=k, replace=False, p=samples / samples.sum())


@SELECTORS.register(
    "multinomial", "with replacement, by the samples a device holds; for averages in which all count alike"
)
def multinomial(round: int, rng: np.random.Generator, samples: Ints, k: int) -> Ints:
    """Choose k devices independently, by their number of samples."""
    return rng.choice(len(samples), size=k, p=samples / samples.sum())


class FunctionSelector:
    """A selector made of a function that needs no memory.

    Parameters
    ----------
    function : callable
        (round, rng, samples, k) -> k device numbers.
    seed : int
        The simulation's seed; each round has a generator of its own.
    samples : numpy.ndarray
        How many samples each device holds.
    k : int
        How many devices a round takes.
    """

    def __init__(self, function: SelectFunction, seed: int, samples: Ints, k: int) -> None:
        self.function, self.seed, self.samples, self.k = function, seed, samples, k

    def select(self, round: int) -> Ints:
        """Return the devices of `round`."""
        rng = chance(self.seed, Purpose.SELECT, round)
        return np.asarray(self.function(round, rng, self.samples, self.k))

    def state(self) -> dict[str, Any]:
        """Return nothing: every round is drawn afresh."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing."""


class CountTable:
    """How often each device was chosen in each position of a cycle: the paper's M, N x K, kept sparse.

    A column holds only the devices that were chosen in it, so that a table of 1,000,000 devices and 1,000 positions
    takes 12 bytes an entry that is not zero.
    """

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self._columns: dict[int, tuple[Ints, NDArray[np.int32]]] = {}

    def column(self, position: int) -> tuple[Ints, NDArray[np.int32]]:
        """Return the devices with a count in this column, ascending, and their counts."""
        return self._columns.get(position, (np.empty(0, np.int64), np.empty(0, np.int32)))

    def bump(self, position: int, chosen: Ints) -> None:
        """Add one for every device of `chosen`."""
        ids, counts = self.column(position)
        merged, place = np.unique(np.concatenate([ids, chosen]), return_inverse=True)
        ones = np.ones(len(chosen), np.int32)
        total = np.bincount(place, weights=np.concatenate([counts, ones]), minlength=len(merged))
        self._columns[position] = (merged, total.astype(np.int32))

    def dense(self, positions: int) -> Ints:
        """Return the first `positions` columns as a matrix [devices, positions]."""
        table = np.zeros((self.devices, positions), np.int64)
        for position in range(positions):
            ids, counts = self.column(position)
            table[ids, position] = counts
        return table

    def nbytes(self) -> int:
        """Return the memory that the entries take."""
        return sum(ids.nbytes + counts.nbytes for ids, counts in self._columns.values())

    def state(self) -> dict[str, Any]:
        """Return the columns."""
        return {str(p): {"devices": i.copy(), "counts": c.copy()} for p, (i, c) in self._columns.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._columns = {
            int(p): (np.asarray(c["devices"], np.int64), np.asarray(c["counts"], np.int32)) for p, c in state.items()
        }


class GroupedSelector:
    """Grouping- and count-based selection: FedCat's Algorithm 3.

    The devices are divided at random into K groups of near equal size, anew every `period` rounds. In each round
    every group gives one device: with probability `epsilon` one of the largest weight (ties at random), else one
    drawn by its weight 1 / sqrt(M + 1), M being how often it was chosen at this position of the cycle.

    Parameters
    ----------
    seed : int
        The simulation's seed.
    devices : int
        The number of devices, N.
    k : int
        The number of groups, K.
    epsilon : float
        The probability of taking a device of the largest weight.
    period : int
        Rounds between two groupings.
    """

    def __init__(self, seed: int, devices: int, k: int, epsilon: float = 0.5, period: int | None = None) -> None:
        self.seed, self.devices, self.k = seed, devices, k
        self.epsilon = epsilon
        self.period = k if period is None else period
        self.table = CountTable(devices)
        sizes = np.full(k, devices // k) + (np.arange(k) < devices % k)
        self._stops: Ints = np.cumsum(sizes)
        self._starts: Ints = self._stops - sizes
        self._grouped = -1
        self._order: Ints = np.empty(0, np.int64)
        self._place: Ints = np.empty(0, np.int64)

    def groups(self, round: int) -> list[Ints]:
        """Return the devices of each group in `round`."""
        self._regroup(round)
        return np.split(self._order, self._starts[1:])

    def select(self, round: int) -> Ints:
        """Return one device of each group, in the groups' order."""
        self._regroup(round)
        position = round % self.k
        ids, counts = self.table.column(position)
        weight = np.ones(self.devices)
        weight[self._place[ids]] = 1.0 / np.sqrt(counts + 1.0)
        rng = chance(self.seed, Purpose.SELECT, round)
        greedy = rng.random(self.k) < self.epsilon
        pick = rng.random(self.k)
        if greedy.any():
            largest = np.maximum.reduceat(weight, self._starts)
            floor = np.repeat(np.where(greedy, largest, 0.0), self._stops - self._starts)
            weight[weight < floor] = 0.0
        chosen = self._order[self._draw(weight, pick)]
        self.table.bump(position, chosen)
        return chosen

    def _draw(self, weight: NDArray[np.float64], pick: NDArray[np.float64]) -> Ints:
        """Return one place a group, drawn by weight: where the running sum passes `pick` of the group's sum."""
        running = np.cumsum(weight)
        top = running[self._stops - 1]
        bottom = np.concatenate([[0.0], top[:-1]])
        target = np.minimum(bottom + pick * (top - bottom), np.nextafter(top, 0.0))
        places: Ints = np.searchsorted(running, target, side="right")
        return places

    def _regroup(self, round: int) -> None:
        grouping = round // self.period
        if grouping != self._grouped:
            rng = chance(self.seed, Purpose.GROUP, grouping * self.period)
            self._order = rng.permutation(self.devices)
            self._place = np.empty_like(self._order)
            self._place[self._order] = np.arange(self.devices)
            self._grouped = grouping

    def state(self) -> dict[str, Any]:
        """Return the counts; the groups are drawn again from their address."""
        return {"table": self.table.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.table.restore(state["table"])


def checked(chosen: Sequence[int] | Ints, devices: int, k: int) -> Ints:
    """Return a selector's choice as an array, or say what is wrong with it."""
    array = np.asarray(chosen)
    if array.shape != (k,) or array.dtype.kind not in "iu":
        raise SettingError(f"selector must name {k} devices, got an array of {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= devices:
        raise SettingError(
            f"selector must name devices in 0 .. {devices - 1}, got {int(array.min())} .. {int(array.max())}"
        )
    return array.astype(np.int64)


def from_part(part: Any, seed: int, samples: Ints, k: int) -> Selector:
    """Make a selector of a user's part: a function, or a class called with (seed, samples, k)."""
    if not callable(part):
        raise SettingError(f"selector must be a function or a class, got {part!r}")
    if not isinstance(part, type):
        if not takes(part, 0, np.random.default_rng(0), samples, k):
            raise SettingError("selector must be a function of (round, rng, samples, k), got other arguments")
        return FunctionSelector(part, seed, samples, k)
    made: Selector = part(seed, samples, k)
    return made
