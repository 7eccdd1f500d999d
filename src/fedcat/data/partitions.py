"""Partitions: which client holds which training sample.

A partition is a function of the labels, the number of clients and a random generator that returns the client of every
sample. Its keyword parameters with a default are its options; those of the registered partitions are also settings and
command-line flags (``alpha``, ``shards``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from fedcat.core.errors import SettingError
from fedcat.core.options import Bounds, Option, arguments, check_options, options
from fedcat.core.registry import Registry, accepts_call, label_of
from fedcat.core.rng import Purpose, random_stream

Ints = NDArray[np.int64]

Partition = Callable[..., "Ints | None"]
"""(labels, clients, rng, **options) -> the client of every sample, or None if this draw failed."""

PARTITIONS: Registry[Partition] = Registry("partition")

BY_CLASS = ("dirichlet", "dirichlet-uncapped", "dirichlet-hsu", "shards")
"""The partitions that divide by class."""

Alpha = Annotated[
    float, Option("concentration of the Dirichlet partitions: the smaller, the more skewed", Bounds(above=0))
]


def partition(
    how: str | Partition,
    labels: Ints,
    clients: int,
    seed: int,
    *,
    min_samples: int = 1,
    tries: int = 1000,
    **given: Any,
) -> Ints:
    """Draw a partition in which every client holds at least `min_samples` samples.

    Parameters
    ----------
    how : str or callable
        One of `PARTITIONS`, ``module:function``, or a function of (labels, clients, rng).
    labels : numpy.ndarray
        The class of every training sample, or its target if the targets are values.
    clients : int
        The number of clients.
    seed : int
        The seed; every try has its own random stream.
    min_samples : int
        The minimum number of samples per client.
    tries : int
        The number of draws before giving up.
    **given
        Options of the partition, such as ``alpha``.

    Returns
    -------
    numpy.ndarray
        The client of every sample.
    """
    name = how if isinstance(how, str) else label_of(how)
    draw = PARTITIONS.get(how) if isinstance(how, str) else how
    if not callable(draw) or not accepts_call(draw, labels, clients, np.random.default_rng(0)):
        raise SettingError(f"partition {name!r} must be a function of (labels, clients, rng, options with defaults)")
    ready = arguments(draw, check_options("partition", name, draw, given, prefix=""))
    if how in BY_CLASS and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
        raise SettingError(
            f"partition {name!r} divides by class, but the targets of this data are values: choose iid, natural for "
            "data with owners, or a function of your own"
        )
    if clients > len(labels):
        raise SettingError(f"clients must be at most the {len(labels)} training samples, got {clients}")
    if min_samples * clients > len(labels):
        raise SettingError(
            f"min_samples must be at most {len(labels) // clients} for {len(labels)} training samples on "
            f"{clients} clients, got {min_samples}: lower it, or set clients to {len(labels) // min_samples} or fewer"
        )
    best = 0
    for attempt in range(tries):
        owner = draw(labels, clients, random_stream(seed, Purpose.PARTITION, round=attempt), **ready)
        if owner is not None:
            owner = _checked(name, owner, len(labels), clients)
            least = int(np.bincount(owner, minlength=clients).min())
            if least >= min_samples:
                return owner
            best = max(best, least)
    chosen = ", ".join(f"{option} {value}" for option, value in {**options(draw), **given}.items())
    advice = ["fewer clients", *(["a larger alpha"] if "alpha" in options(draw) else [])]
    advice += ["a smaller min_samples"] if min_samples > 1 else []
    raise SettingError(
        f"partition {name!r}{f' with {chosen}' if chosen else ''} found no draw with at least min_samples = "
        f"{min_samples} for each of {clients} clients in {tries} tries with seed {seed} (the best had {best}): "
        f"use {' or '.join(advice)}"
    )


def _checked(name: str, owner: object, samples: int, clients: int) -> Ints:
    """Return a partition's result as an array; raise a `SettingError` if it is invalid."""
    array = np.asarray(owner)
    if array.shape != (samples,) or array.dtype.kind not in "iu":
        raise SettingError(
            f"partition {name!r} must return one client index for each of the {samples} samples, "
            f"got shape {array.shape} of {array.dtype}"
        )
    if array.min() < 0 or array.max() >= clients:
        raise SettingError(
            f"partition {name!r} must return clients in 0 .. {clients - 1}, got {array.min()} .. {array.max()}"
        )
    return array.astype(np.int64)


@PARTITIONS.register("iid", "every client gets a random share of equal size")
def iid(labels: Ints, clients: int, rng: np.random.Generator) -> Ints:
    """Assign the samples to clients at random, in nearly equal shares."""
    owner = np.empty(len(labels), dtype=np.int64)
    owner[rng.permutation(len(owner))] = np.arange(len(owner)) % clients
    return owner


@PARTITIONS.register("dirichlet", "each class split by Dir(alpha); a client that holds its average share gets no more")
def dirichlet(labels: Ints, clients: int, rng: np.random.Generator, *, alpha: Alpha = 0.5) -> Ints | None:
    """Split each class by Dir(alpha) over the clients that hold fewer than samples / clients so far."""
    return _dirichlet(labels, clients, rng, alpha, cap=len(labels) / clients)


@PARTITIONS.register("dirichlet-uncapped", "each class split by Dir(alpha) over all clients")
def dirichlet_uncapped(labels: Ints, clients: int, rng: np.random.Generator, *, alpha: Alpha = 0.5) -> Ints | None:
    """Split each class by Dir(alpha) over all clients."""
    return _dirichlet(labels, clients, rng, alpha, cap=np.inf)


def _dirichlet(labels: Ints, clients: int, rng: np.random.Generator, alpha: float, cap: float) -> Ints | None:
    owner = np.empty(len(labels), dtype=np.int64)
    sizes = np.zeros(clients, dtype=np.int64)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        shares = rng.dirichlet(np.full(clients, alpha)) * (sizes < cap)
        total = shares.sum()
        if not total > 0:
            return None
        cuts = (np.cumsum(shares / total)[:-1] * len(members)).astype(np.int64)
        counts = np.diff(cuts, prepend=0, append=len(members))
        owner[members] = np.repeat(np.arange(clients), counts)
        sizes += counts
    return owner


@PARTITIONS.register("dirichlet-hsu", "equal sizes, each client's classes from Dir(alpha * prior) (Hsu et al. 2019)")
def dirichlet_hsu(labels: Ints, clients: int, rng: np.random.Generator, *, alpha: Alpha = 0.5) -> Ints:
    """Draw a class mix from Dir(alpha * prior) for each client, then its samples from that mix.

    A class that has run out is left out of the mixes of later clients.
    """
    classes = int(labels.max()) + 1
    left = np.bincount(labels, minlength=classes)
    prior = left / left.sum()
    present = prior > 0
    queue = [rng.permutation(np.flatnonzero(labels == c)) for c in range(classes)]
    owner = np.empty(len(labels), dtype=np.int64)
    base, extra = divmod(len(labels), clients)
    for client in range(clients):
        mix = np.zeros(classes)
        mix[present] = rng.dirichlet(alpha * prior[present])
        wanted = base + (client < extra)
        while wanted:
            open_mix = np.where(left > 0, mix, 0.0)
            if not open_mix.sum() > 0:
                open_mix = left.astype(np.float64)
            taken = np.minimum(rng.multinomial(wanted, open_mix / open_mix.sum()), left)
            for c in np.flatnonzero(taken):
                owner[queue[c][left[c] - taken[c] : left[c]]] = client
            left = left - taken
            wanted -= int(taken.sum())
    return owner


@PARTITIONS.register("shards", "samples sorted by class and cut; every client gets a few shards (McMahan et al. 2017)")
def shards(
    labels: Ints,
    clients: int,
    rng: np.random.Generator,
    *,
    shards: Annotated[int, Option("shards per client in the partition `shards`", Bounds(at_least=1))] = 2,
) -> Ints:
    """Sort by class, cut into shards * clients pieces of equal size, and assign them at random."""
    pieces = shards * clients
    if pieces > len(labels):
        raise SettingError(
            f"shards must be at most {len(labels) // clients} for {len(labels)} training samples on "
            f"{clients} clients, got {shards}"
        )
    shuffled = rng.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owner_of_piece = rng.permutation(np.repeat(np.arange(clients), shards))
    piece = np.arange(len(order)) * pieces // len(order)
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = owner_of_piece[piece]
    return owner


@PARTITIONS.register("natural", "every sample stays with its owner; for data with owners, such as femnist")
def natural(labels: Ints, clients: int, rng: np.random.Generator) -> Ints:
    """Raise a `SettingError`: `Dataset.divide` handles data with owners itself."""
    raise SettingError("partition 'natural' needs samples with owners: this dataset has none")
