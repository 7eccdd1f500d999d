"""Client selection: the contract, and selection by a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry, accepts_call
from fedcat.core.rng import Purpose, random_stream

Ints = NDArray[np.int64]


class Selector(Protocol):
    """Selects the clients of each round, one for each slot. Rounds are asked for in order, each once."""

    def select(self, round: int) -> Ints:
        """Return the clients of `round`, in slot order."""
        ...

    def exclude(self, clients: Collection[int]) -> None:
        """Select these clients no more, from the next grouping or round on; all that are excluded are named."""
        ...

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue from here."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""
        ...


SelectFunction = Callable[[int, np.random.Generator, Ints, int], "Sequence[int] | Ints"]
"""(round, rng, samples of every client, K) -> K client numbers."""

SELECTORS: Registry[SelectFunction] = Registry("selector")


@SELECTORS.register("uniform", "uniformly at random without replacement")
def uniform(round: int, rng: np.random.Generator, samples: Ints, k: int) -> Ints:
    """Choose k clients uniformly without replacement."""
    return rng.choice(len(samples), size=k, replace=False)


@SELECTORS.register("by-samples", "without replacement, with probability proportional to a client's samples")
def by_samples(round: int, rng: np.random.Generator, samples: Ints, k: int) -> Ints:
    """Choose k clients without replacement, weighted by their number of samples."""
    return rng.choice(len(samples), size=k, replace=False, p=samples / samples.sum())


@SELECTORS.register("multinomial", "with replacement, weighted by samples; for methods that weight all clients equally")
def multinomial(round: int, rng: np.random.Generator, samples: Ints, k: int) -> Ints:
    """Choose k clients independently, weighted by their number of samples."""
    return rng.choice(len(samples), size=k, p=samples / samples.sum())


class FunctionSelector:
    """A selector made of a function without state.

    Parameters
    ----------
    function : callable
        (round, rng, samples, k) -> k client numbers.
    seed : int
        The run's seed; each round has its own random stream.
    samples : numpy.ndarray
        How many samples each client holds.
    k : int
        Clients per round.
    """

    def __init__(self, function: SelectFunction, seed: int, samples: Ints, k: int) -> None:
        self.function, self.seed, self.samples, self.k = function, seed, samples, k
        self._left: Ints | None = None  # who may be selected; None for all

    def select(self, round: int) -> Ints:
        """Return the clients of `round`; the function sees only those that are not excluded."""
        rng = random_stream(self.seed, Purpose.SELECT, round)
        if self._left is None:
            return np.asarray(self.function(round, rng, self.samples, self.k))
        chosen = np.asarray(self.function(round, rng, self.samples[self._left], self.k))
        return self._left[check_selection(chosen, len(self._left), self.k)]

    def exclude(self, clients: Collection[int]) -> None:
        """Leave clients out of what the function sees."""
        self._left = np.setdiff1d(np.arange(len(self.samples)), list(clients)) if clients else None

    def state(self) -> dict[str, Any]:
        """Return nothing: every round is drawn from its own stream."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Do nothing."""


def check_selection(chosen: Sequence[int] | Ints, clients: int, k: int) -> list[int]:
    """Return a selector's choice as a list, or raise an error that says what is wrong with it."""
    array = np.asarray(chosen)
    if array.shape != (k,) or array.dtype.kind not in "iu":
        raise SettingError(f"selector must return {k} clients, got an array of {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= clients:
        raise SettingError(f"selector must return clients in 0 .. {clients - 1}, got {array.min()} .. {array.max()}")
    found: list[int] = array.tolist()
    return found


def make_selector(part: Any, seed: int, samples: Ints, k: int) -> Selector:
    """Make a selector of a function, or of a class that is called with (seed, samples, k)."""
    if not callable(part):
        raise SettingError(f"selector must be a function or a class, got {part!r}")
    if not isinstance(part, type):
        if not accepts_call(part, 0, np.random.default_rng(0), samples, k):
            raise SettingError("selector must be a function of (round, rng, samples, k), got other parameters")
        return FunctionSelector(part, seed, samples, k)
    made: Selector = part(seed, samples, k)
    return made
