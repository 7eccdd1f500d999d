"""Datasets by name, and a user's own arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import numpy as np

from fedcat.chance import Purpose, chance
from fedcat.errors import SettingError
from fedcat.federation.federation import Federation
from fedcat.federation.partition import Ints, partition
from fedcat.federation.pool import Normalise, Pool
from fedcat.registry import Registry


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test samples that are not yet divided over devices.

    Attributes
    ----------
    name : str
        What it is called.
    train, test : Pool
        The samples.
    classes : int
        The number of classes.
    defaults : mapping
        Settings that suit this dataset better than the general ones, among them its net.
    """

    name: str
    train: Pool
    test: Pool
    classes: int
    defaults: Mapping[str, object] = field(default_factory=dict)

    def divide(
        self,
        devices: int,
        partition: str = "dirichlet",
        *,
        seed: int = 0,
        alpha: float = 0.5,
        shards: int = 2,
        min_samples: int = 1,
        tries: int = 1000,
    ) -> Federation:
        """Divide the training samples over devices; the parameters are those of `partition`."""
        labels: Ints = self.train.y.cpu().numpy()
        owner = _partition(
            partition,
            labels,
            devices,
            seed,
            alpha=alpha,
            shards=shards,
            min_samples=min_samples,
            tries=tries,
        )
        return Federation(self.train, self.test, owner, self.classes, devices, self.name)

    @classmethod
    def from_arrays(
        cls,
        x: object,
        y: object,
        test: tuple[object, object] | None = None,
        *,
        test_fraction: float = 0.2,
        seed: int = 0,
        classes: int | None = None,
        normalise: Normalise | None = None,
        name: str = "custom",
        defaults: Mapping[str, object] | None = None,
    ) -> Dataset:
        """Make a dataset of a user's arrays.

        Parameters
        ----------
        x, y : array_like
            Inputs [samples, ...] and class numbers [samples].
        test : pair of array_like, optional
            Test inputs and labels. Without it `test_fraction` of the samples is set apart at random by `seed`.
        test_fraction : float
            The share that becomes the test set where `test` is not given.
        seed : int
            What that split is drawn by.
        classes : int, optional
            The number of classes; by default one more than the largest label.
        normalise : Normalise, optional
            How stored numbers become inputs, see `Pool`.
        name : str
            What the dataset is called.
        defaults : mapping, optional
            Settings that suit it, such as ``{"net": ..., "devices": 20}``.
        """
        train = Pool(x, y, normalise)
        if test is None:
            if not 0 < test_fraction < 1:
                raise SettingError(f"test_fraction must lie between 0 and 1, got {test_fraction:g}")
            order = chance(seed, Purpose.SPLIT).permutation(len(train))
            cut = math.ceil(test_fraction * len(train) - 1e-9)
            if not 0 < cut < len(train):
                raise SettingError(f"test_fraction {test_fraction:g} of {len(train)} samples leaves a part empty")
            held = Pool(train.x[order[:cut]], train.y[order[:cut]], normalise)
            train = Pool(train.x[order[cut:]], train.y[order[cut:]], normalise)
        else:
            held = Pool(*test, normalise)
        most = int(max(train.y.max(), held.y.max())) + 1
        return cls(name, train, held, most if classes is None else classes, defaults or {})


_partition = partition

DATASETS: Registry[Callable[[], Dataset]] = Registry("dataset")


@DATASETS.register(
    "digits",
    "1,797 handwritten digits of 8 x 8 pixels (UCI), in the package: 1,437 to train, 360 to test; "
    "by default 50 devices, min_samples 1, batch_size 10, lr 0.05, 100 rounds",
)
@cache
def digits() -> Dataset:
    """Load the digits that are part of the package."""
    with resources.files("fedcat.federation").joinpath("digits.npz").open("rb") as file:
        stored = np.load(file, allow_pickle=False)
        images, labels = stored["images"], stored["labels"]
    return Dataset.from_arrays(
        images[:, None],
        labels,
        normalise=Normalise(scale=16.0, mean=(0.3053,), std=(0.3761,)),
        name="digits",
        defaults={
            "net": "digits-cnn",
            "devices": 50,
            "min_samples": 1,
            "batch_size": 10,
            "lr": 0.05,
            "rounds": 100,
        },
    )
