"""Who owns which sample: each partition gives one device number a sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedcat.core.errors import SettingError
from fedcat.core.registry import Registry
from fedcat.core.rng import Purpose, chance

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Draw:
    """What a partition may look at.

    Attributes
    ----------
    labels : numpy.ndarray
        The class of every training sample.
    devices : int
        The number of devices.
    rng : numpy.random.Generator
        Where its chance comes from.
    alpha : float
        Concentration of the Dirichlet partitions; the smaller, the more skewed.
    shards : int
        Shards a device gets in the partition ``shards``.
    """

    labels: Ints
    devices: int
    rng: np.random.Generator
    alpha: float
    shards: int


Partition = Callable[[Draw], "Ints | None"]
"""Gives every sample's device, or None where this draw came to nothing and another is wanted."""

PARTITIONS: Registry[Partition] = Registry("partition")


def partition(
    name: str,
    labels: Ints,
    devices: int,
    seed: int,
    *,
    alpha: float = 0.5,
    shards: int = 2,
    min_samples: int = 1,
    tries: int = 1000,
) -> Ints:
    """Draw a partition in which every device holds at least `min_samples` samples.

    Parameters
    ----------
    name : str
        One of `PARTITIONS`.
    labels : numpy.ndarray
        The class of every training sample.
    devices : int
        The number of devices.
    seed : int
        Every try has a generator of its own under this seed.
    alpha, shards : float, int
        See `Draw`.
    min_samples : int
        The fewest samples that a device may hold.
    tries : int
        How often to draw before giving up.

    Returns
    -------
    numpy.ndarray
        The device of every sample.
    """
    draw = PARTITIONS.get(name)
    if devices > len(labels):
        raise SettingError(f"devices must be at most the {len(labels)} training samples, got {devices}")
    if min_samples * devices > len(labels):
        raise SettingError(
            f"min_samples must be at most {len(labels) // devices} for {len(labels)} training samples on "
            f"{devices} devices, got {min_samples}"
        )
    most = 0
    for attempt in range(tries):
        rng = chance(seed, Purpose.PARTITION, round=attempt)
        owner = draw(Draw(labels, devices, rng, alpha, shards))
        if owner is not None:
            least = int(np.bincount(owner, minlength=devices).min())
            if least >= min_samples:
                return owner
            most = max(most, least)
    raise SettingError(
        f"partition {name!r} with alpha {alpha:g} gave no draw of at least min_samples = {min_samples} for each of "
        f"{devices} devices in {tries} tries (the best had {most}): use fewer devices, a larger alpha or a smaller "
        "min_samples"
    )


@PARTITIONS.register("iid", "every device a random share of equal size")
def iid(draw: Draw) -> Ints:
    """Deal the samples out at random in near equal shares."""
    owner = np.empty(len(draw.labels), dtype=np.int64)
    owner[draw.rng.permutation(len(owner))] = np.arange(len(owner)) % draw.devices
    return owner


@PARTITIONS.register("dirichlet", "per class shares from Dir(alpha); a device with its average share gets no more")
def dirichlet(draw: Draw) -> Ints | None:
    """Split each class by Dir(alpha) over the devices that do not yet hold samples/devices."""
    return _dirichlet(draw, cap=len(draw.labels) / draw.devices)


@PARTITIONS.register("dirichlet-uncapped", "per class shares from Dir(alpha), sizes as they fall")
def dirichlet_uncapped(draw: Draw) -> Ints | None:
    """Split each class by Dir(alpha) over all devices."""
    return _dirichlet(draw, cap=np.inf)


def _dirichlet(draw: Draw, cap: float) -> Ints | None:
    owner = np.empty(len(draw.labels), dtype=np.int64)
    sizes = np.zeros(draw.devices, dtype=np.int64)
    for label in np.unique(draw.labels):
        members = draw.rng.permutation(np.flatnonzero(draw.labels == label))
        shares = draw.rng.dirichlet(np.full(draw.devices, draw.alpha)) * (sizes < cap)
        total = shares.sum()
        if not total > 0:
            return None
        cuts = (np.cumsum(shares / total)[:-1] * len(members)).astype(np.int64)
        counts = np.diff(cuts, prepend=0, append=len(members))
        owner[members] = np.repeat(np.arange(draw.devices), counts)
        sizes += counts
    return owner


@PARTITIONS.register("dirichlet-hsu", "equal sizes, each device's classes from Dir(alpha * prior) (Hsu et al. 2019)")
def dirichlet_hsu(draw: Draw) -> Ints:
    """Give each device a class mix of its own from Dir(alpha * prior) and draw its samples by that.

    A class that has run out is left out of the mixes of the devices that follow.
    """
    classes = int(draw.labels.max()) + 1
    left = np.bincount(draw.labels, minlength=classes)
    prior = left / left.sum()
    present = prior > 0
    queue = [draw.rng.permutation(np.flatnonzero(draw.labels == c)) for c in range(classes)]
    owner = np.empty(len(draw.labels), dtype=np.int64)
    base, extra = divmod(len(draw.labels), draw.devices)
    for device in range(draw.devices):
        mix = np.zeros(classes)
        mix[present] = draw.rng.dirichlet(draw.alpha * prior[present])
        wanted = base + (device < extra)
        while wanted:
            open_mix = np.where(left > 0, mix, 0.0)
            if not open_mix.sum() > 0:
                open_mix = left.astype(np.float64)
            taken = np.minimum(draw.rng.multinomial(wanted, open_mix / open_mix.sum()), left)
            for c in np.flatnonzero(taken):
                owner[queue[c][left[c] - taken[c] : left[c]]] = device
            left = left - taken
            wanted -= int(taken.sum())
    return owner


@PARTITIONS.register("shards", "samples sorted by class and cut; every device gets a few pieces (McMahan et al. 2017)")
def shards(draw: Draw) -> Ints:
    """Sort by class, cut into shards * devices pieces, deal them out at random."""
    pieces = draw.shards * draw.devices
    if pieces > len(draw.labels):
        raise SettingError(
            f"shards must be at most {len(draw.labels) // draw.devices} for {len(draw.labels)} training samples on "
            f"{draw.devices} devices, got {draw.shards}"
        )
    shuffled = draw.rng.permutation(len(draw.labels))
    order = shuffled[np.argsort(draw.labels[shuffled], kind="stable")]
    owner_of_piece = draw.rng.permutation(np.repeat(np.arange(draw.devices), draw.shards))
    piece = np.arange(len(order)) * pieces // len(order)
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = owner_of_piece[piece]
    return owner


@PARTITIONS.register("natural", "every sample stays with its owner; for data that has owners, such as femnist")
def natural(draw: Draw) -> Ints:
    """Refuse: data that has owners is divided without a draw, by `Dataset.divide`."""
    raise SettingError("partition 'natural' needs data whose samples have owners: this dataset has none")
