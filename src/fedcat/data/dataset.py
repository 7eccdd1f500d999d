"""Datasets, i.e. training and test samples not yet divided among clients, and their registry."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedcat.core.errors import SettingError
from fedcat.core.options import arguments, check_options, options, plain_values
from fedcat.core.registry import Registry, accepts_call, label_of
from fedcat.data.federation import Federation, number_of_classes, target_kind
from fedcat.data.partitions import Ints, Partition
from fedcat.data.partitions import partition as draw_partition
from fedcat.data.pool import Normalize, Pool
from fedcat.data.split import check_labels, encode_owners, encode_test_owners, hold_out

NATURAL = "natural"


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Training and test samples not yet divided among clients.

    Attributes
    ----------
    name : str
        The dataset's name.
    train, test : Pool
        The samples.
    classes : int
        The number of classes, 0 if the targets are values.
    defaults : mapping
        Defaults of settings for this dataset, such as its net; they override the general defaults.
    owner : numpy.ndarray, optional
        The owner of each training sample, counted from 0. The partition ``natural`` makes the owners its clients.
    owner_names : sequence of str
        Names of the owners; empty if they have none.
    class_names : sequence of str
        Names of the classes; empty if they have none.
    test_owner : numpy.ndarray, optional
        The owner of each test sample, -1 for nobody. With the partition ``natural``, clients are then also evaluated
        on their own test samples.
    """

    name: str
    train: Pool
    test: Pool
    classes: int
    defaults: Mapping[str, object] = field(default_factory=dict)
    owner: Ints | None = None
    owner_names: Sequence[str] = ()
    class_names: Sequence[str] = ()
    test_owner: Ints | None = None

    def __str__(self) -> str:
        samples = f"{len(self.train):,} training and {len(self.test):,} test samples of shape {self.train.shape}"
        owners = "" if self.owner is None else f", {int(self.owner.max()) + 1:,} owners"
        targets = f"{self.classes} classes" if self.classes else target_kind(self.train)
        return f"{self.name}: {samples}, {targets}{owners}"

    def __repr__(self) -> str:
        return f"<Dataset {self}>"

    def divide(
        self,
        clients: int | None = None,
        partition: str | Partition | None = None,
        *,
        seed: int = 0,
        min_samples: int = 1,
        tries: int = 1000,
        **options: Any,
    ) -> Federation:
        """Divide the training samples among clients.

        Parameters
        ----------
        clients : int, optional
            The number of clients. It may be omitted for the partition ``natural``, which has one client per owner;
            owners with fewer than `min_samples` are left out.
        partition : str or callable, optional
            The partition; by default ``natural`` if the samples have owners, else ``dirichlet``.
        seed, min_samples, tries, **options
            See `fedcat.partition`.
        """
        how = partition or (NATURAL if self.owner is not None else "dirichlet")
        if how == NATURAL and self.owner is not None:
            return self._natural(clients, min_samples)
        if clients is None:
            raise SettingError(f"clients must be given for the partition {how!r}")
        owner = draw_partition(
            how, self.train.y.cpu().numpy(), clients, seed, min_samples=min_samples, tries=tries, **options
        )
        return Federation(self.train, self.test, owner, self.classes, clients, self.name, class_names=self.class_names)

    def _natural(self, clients: int | None, min_samples: int) -> Federation:
        assert self.owner is not None
        owners = self.owners_with(min_samples)
        if not len(owners):
            most = int(np.bincount(self.owner).max())
            raise SettingError(
                f"min_samples must be at most {most}, the samples of the largest owner in {self.name!r}, "
                f"got {min_samples}"
            )
        if clients not in (None, len(owners)):
            raise SettingError(
                f"clients must be {len(owners)}, the number of owners in {self.name!r} with at least {min_samples} "
                f"samples (partition 'natural'), got {clients}: omit it, or choose owners with the dataset's options"
            )
        kept = np.flatnonzero(np.isin(self.owner, owners))
        whole = len(kept) == len(self.owner)
        place = torch.from_numpy(kept)
        return Federation(
            self.train if whole else Pool(self.train.x[place], self.train.y[place], self.train.normalize),
            self.test,
            np.searchsorted(owners, self.owner[kept]),
            self.classes,
            len(owners),
            self.name,
            client_names=[self.owner_names[owner] for owner in owners] if self.owner_names else (),
            class_names=self.class_names,
            test_owner=None if self.test_owner is None else _positions(self.test_owner, owners),
        )

    def owners_with(self, samples: int) -> Ints:
        """Return the owners that hold at least so many training samples, ascending."""
        assert self.owner is not None
        return np.flatnonzero(np.bincount(self.owner) >= samples)

    @classmethod
    def from_arrays(
        cls,
        x: object,
        y: object,
        test: tuple[object, object] | None = None,
        *,
        owner: object = None,
        test_fraction: float = 0.2,
        seed: int = 0,
        classes: int | None = None,
        normalize: Normalize | None = None,
        name: str = "custom",
        defaults: Mapping[str, object] | None = None,
        class_names: Sequence[str] = (),
        test_owner: object = None,
    ) -> Dataset:
        """Build a dataset from arrays.

        Parameters
        ----------
        x, y : array_like
            Inputs [samples, ...] and targets. Integers [samples] are class labels, from 0; floating-point numbers, or
            several numbers per sample, are values, which need another loss than the cross entropy.
        test : pair of array_like, optional
            Test inputs and targets. If omitted, a random `test_fraction` of the samples is held out; with owners,
            of each owner's samples, leaving each owner at least one training sample.
        owner : array_like, optional
            The owner of each sample in `x`, an integer or a string. Owners become the clients unless another partition
            is chosen.
        test_fraction : float
            The fraction held out as the test set if `test` is omitted.
        seed : int
            The seed of that split.
        classes : int, optional
            The number of classes. By default it is one more than the largest training label; labels must then start
            at 0, and test labels must not exceed the training labels.
        normalize : Normalize, optional
            How stored values become inputs; see `Pool`.
        name : str
            The dataset's name.
        defaults : mapping, optional
            Defaults of settings, such as ``{"net": ..., "clients": 20}``.
        class_names : sequence of str, optional
            Names of the classes.
        test_owner : array_like, optional
            The owner of each sample in `test`, so that owners are also evaluated on their own test samples. It is known
            if `test` is omitted.
        """
        if test is not None and (not isinstance(test, (tuple, list)) or len(test) != 2):
            raise SettingError(f"test must be a pair (x_test, y_test), got {type(test).__name__}")
        train = Pool(x, y, normalize)
        owners, owner_names = (None, ()) if owner is None else encode_owners(owner, len(train))
        held = None if test is None else Pool(*test, normalize)
        if classes is None and train.has_labels:
            check_labels(train, held, len(class_names))
            classes = max(int(train.y.max()) + 1, len(class_names))
        classes = number_of_classes(classes, *(pool for pool in (train, held) if pool is not None))
        if test_owner is not None and (owners is None or held is None):
            raise SettingError("test_owner needs the owners of the training samples, owner, and a test set, test")
        theirs = None if test_owner is None else encode_test_owners(test_owner, len(held or ()), owner_names)
        if held is None:
            train, held, kept, apart = hold_out(train, owners, test_fraction, seed)
            owners, theirs = (None, None) if owners is None else (owners[kept], owners[apart])
        own: dict[str, object] = {} if classes else {"partition": "iid"}
        if owners is not None:
            sizes = np.bincount(owners)
            own = {"partition": NATURAL, "clients": len(sizes), "min_samples": int(sizes.min())}
        settings = {**own, **(defaults or {})}
        return cls(name, train, held, classes, settings, owners, owner_names, tuple(class_names), theirs)

    @classmethod
    def from_torch(cls, train: Any, test: Any = None, *, owner: object = None, **given: Any) -> Dataset:
        """Build a dataset from a ``torch.utils.data.Dataset``; see `fedcat.data.user.from_torch`."""
        from fedcat.data.user import from_torch

        return from_torch(train, test, owner=owner, **given)

    @classmethod
    def from_folder(cls, path: Any, **given: Any) -> Dataset:
        """Build a dataset from a directory with images by class; see `fedcat.data.user.from_folder`."""
        from fedcat.data.user import from_folder

        return from_folder(path, **given)


def _positions(owners: Ints, kept: Ints) -> Ints:
    """Return where owners stand among the ones that are kept, -1 for others."""
    place = np.searchsorted(kept, owners).clip(max=len(kept) - 1)
    return np.where(kept[place] == owners, place, -1)


Factory = Callable[..., "Dataset | Federation"]
"""Makes a dataset. Its parameters with a default are the dataset's options, except ``data_dir`` and ``seed``: they
receive the settings ``data_dir`` and the partition's seed."""

DATASETS: Registry[Factory] = Registry("dataset")
RESERVED = ("data_dir", "seed")
"""Parameters of a dataset function that are settings, not options."""


def dataset_options(factory: Factory) -> dict[str, Any]:
    """Return a dataset's options and their defaults."""
    return {name: value for name, value in options(factory).items() if name not in RESERVED}


def dataset_arguments(
    factory: Factory, name: str, *, data_dir: str, seed: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments for `factory` that the settings describe."""
    for taken in RESERVED:
        if taken in given:
            raise SettingError(f"{taken} is a setting, not an option of dataset {name!r}")
    ready = arguments(factory, check_options("dataset", name, factory, given))
    known = options(factory)
    here = {"seed": seed, **({"data_dir": data_dir} if data_dir else {})}
    return {**ready, **{key: value for key, value in here.items() if key in known}}


def make_dataset(factory: Factory, name: str, ready: Mapping[str, Any]) -> Dataset | Federation:
    """Call `factory` and return its dataset; raise a `SettingError` if it fails or returns something else."""
    if not callable(factory) or not accepts_call(factory, **ready):
        raise SettingError(f"dataset {name!r} must be a function whose arguments all have defaults")
    try:
        found = factory(**ready)
    except (SettingError, KeyboardInterrupt):
        raise
    except Exception as error:
        if (getattr(factory, "__module__", None) or "").startswith("fedcat."):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise SettingError(
            f"dataset {name!r} failed with {type(error).__name__}: {(str(error).splitlines() or [''])[0]} "
            f"({Path(last.filename).name}, line {last.lineno})"
        ) from error
    if not isinstance(found, (Dataset, Federation)):
        raise SettingError(f"dataset {name!r} must return a Dataset or a Federation, got {type(found).__name__}")
    return found


def load_dataset(
    name: str | Factory, *, data_dir: str | Path = "", seed: int = 0, **given: Any
) -> Dataset | Federation:
    """Load a dataset by name.

    Parameters
    ----------
    name : str or callable
        One of `DATASETS`, ``module:function``, or a function.
    data_dir : path
        A directory to search for its files before all others.
    seed : int
        The seed of the dataset's random choices, such as which writers FEMNIST uses.
    **given
        The dataset's options.
    """
    factory = DATASETS.get(name) if isinstance(name, str) else name
    label = name if isinstance(name, str) else label_of(name)
    ready = dataset_arguments(factory, label, data_dir=str(data_dir), seed=seed, given=plain_values(given))
    return make_dataset(factory, label, ready)
