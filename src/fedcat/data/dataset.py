"""Datasets: training and test samples that are not yet divided over clients, and their registry."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.core.errors import SettingError
from fedcat.core.options import arguments, check_options, options, plain_values
from fedcat.core.registry import Registry, accepts_call, label_of
from fedcat.data.federation import Federation
from fedcat.data.partitions import Ints, Partition
from fedcat.data.partitions import partition as draw_partition
from fedcat.data.pool import Normalize, Pool
from fedcat.data.split import check_labels, encode_owners, hold_out

NATURAL = "natural"


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Training and test samples that are not yet divided over clients.

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
    owner : numpy.ndarray, optional
        The owner of each training sample, from 0: the clients of the partition ``natural``.
    owner_names : sequence of str
        What the owners are called; empty where they have no names.
    class_names : sequence of str
        What the classes are called; empty where they have no names.
    """

    name: str
    train: Pool
    test: Pool
    classes: int
    defaults: Mapping[str, object] = field(default_factory=dict)
    owner: Ints | None = None
    owner_names: Sequence[str] = ()
    class_names: Sequence[str] = ()

    def __str__(self) -> str:
        samples = f"{len(self.train):,} training and {len(self.test):,} test samples of shape {self.train.shape}"
        owners = "" if self.owner is None else f", {int(self.owner.max()) + 1:,} owners"
        return f"{self.name}: {samples}, {self.classes} classes{owners}"

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
        """Divide the training samples over clients.

        Parameters
        ----------
        clients : int, optional
            The number of clients; may be omitted for the partition ``natural``, where it is the number of owners.
        partition : str or callable, optional
            How; by default ``natural`` if the samples have owners, else ``dirichlet``.
        seed, min_samples, tries, **options
            See `fedcat.partition`.
        """
        how = partition or (NATURAL if self.owner is not None else "dirichlet")
        if how == NATURAL and self.owner is not None:
            return self._natural(clients, min_samples)
        if clients is None:
            raise SettingError(f"clients must be given for the partition {how!r}")
        labels: Ints = self.train.y.cpu().numpy()
        owner = draw_partition(how, labels, clients, seed, min_samples=min_samples, tries=tries, **options)
        return Federation(self.train, self.test, owner, self.classes, clients, self.name, class_names=self.class_names)

    def _natural(self, clients: int | None, min_samples: int) -> Federation:
        assert self.owner is not None
        owners = int(self.owner.max()) + 1
        if clients not in (None, owners):
            raise SettingError(
                f"clients must be {owners}, the owners of the samples of {self.name!r} (partition 'natural'), "
                f"got {clients}: leave it out, or choose the owners by the dataset's own options"
            )
        made = Federation(
            self.train,
            self.test,
            self.owner,
            self.classes,
            owners,
            self.name,
            client_names=self.owner_names,
            class_names=self.class_names,
        )
        if made.sizes.min() < min_samples:
            raise SettingError(
                f"min_samples must be at most {made.sizes.min()}, the samples of the smallest owner of {self.name!r}, "
                f"got {min_samples}"
            )
        return made

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
    ) -> Dataset:
        """Make a dataset of a user's arrays.

        Parameters
        ----------
        x, y : array_like
            Inputs [samples, ...] and class numbers [samples].
        test : pair of array_like, optional
            Test inputs and labels. Without it `test_fraction` of the samples is set apart at random by `seed`; of
            each owner's samples where they have owners, who keep at least one to train on.
        owner : array_like, optional
            Whose each sample of `x` is, as numbers or texts. Owners become the clients, unless another partition is
            asked for.
        test_fraction : float
            The share that becomes the test set where `test` is not given.
        seed : int
            What that split is drawn by.
        classes : int, optional
            The number of classes; by default one more than the largest label, which then must begin at 0 and be of
            the training samples.
        normalise : Normalise, optional
            How stored numbers become inputs, see `Pool`.
        name : str
            What the dataset is called.
        defaults : mapping, optional
            Settings that suit it, such as ``{"net": ..., "clients": 20}``.
        class_names : sequence of str, optional
            What the classes are called.
        """
        train = Pool(x, y, normalize)
        owners, owner_names = (None, ()) if owner is None else encode_owners(owner, len(train))
        held = None if test is None else Pool(*test, normalize)
        if classes is None:
            check_labels(train, held, len(class_names))
            classes = max(int(train.y.max()) + 1, len(class_names))
        if held is None:
            train, held, kept = hold_out(train, owners, test_fraction, seed)
            owners = owners if owners is None else owners[kept]
        own: dict[str, object] = {}
        if owners is not None:
            sizes = np.bincount(owners)
            own = {"partition": NATURAL, "clients": len(sizes), "min_samples": int(sizes.min())}
        return cls(name, train, held, classes, {**own, **(defaults or {})}, owners, owner_names, tuple(class_names))

    @classmethod
    def from_torch(cls, train: Any, test: Any = None, *, owner: object = None, **given: Any) -> Dataset:
        """Make a dataset of a ``torch.utils.data.Dataset``; see `fedcat.data.user.from_torch`."""
        from fedcat.data.user import from_torch

        return from_torch(train, test, owner=owner, **given)

    @classmethod
    def from_folder(cls, path: Any, **given: Any) -> Dataset:
        """Make a dataset of a folder of class-named folders of images; see `fedcat.data.user.from_folder`."""
        from fedcat.data.user import from_folder

        return from_folder(path, **given)


Factory = Callable[..., "Dataset | Federation"]
"""Makes a dataset. Its parameters with a default are the dataset's options; one called ``data_dir`` is given the
folder that the user named, one called ``seed`` the seed of the partition."""

DATASETS: Registry[Factory] = Registry("dataset")
RESERVED = ("data_dir", "seed")
"""Parameters of a dataset's function that are settings, not options."""


def dataset_options(factory: Factory) -> dict[str, Any]:
    """Return a dataset's own options and their defaults."""
    return {name: value for name, value in options(factory).items() if name not in RESERVED}


def dataset_arguments(
    factory: Factory, name: str, *, data_dir: str, seed: int, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments with which `factory` makes the dataset that the settings describe."""
    for taken in RESERVED:
        if taken in given:
            raise SettingError(f"{taken} is a setting of its own, not an option of dataset {name!r}")
    ready = arguments(factory, check_options("dataset", name, factory, given))
    known = options(factory)
    here = {"seed": seed, **({"data_dir": data_dir} if data_dir else {})}
    return {**ready, **{key: value for key, value in here.items() if key in known}}


def make_dataset(factory: Factory, name: str, ready: Mapping[str, Any]) -> Dataset | Federation:
    """Make a dataset; what is none is refused."""
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
        raise SettingError(f"dataset {name!r} must give a Dataset or a Federation, got {type(found).__name__}")
    return found


def load_dataset(
    name: str | Factory, *, data_dir: str | Path = "", seed: int = 0, **given: Any
) -> Dataset | Federation:
    """Load a dataset by its name.

    Parameters
    ----------
    name : str or callable
        One of `DATASETS`, ``module:function``, or a function.
    data_dir : path
        Where to look for its files before all other places.
    seed : int
        What its own draws are made by, such as FEMNIST's choice of writers.
    **given
        Its options.
    """
    factory = DATASETS.get(name) if isinstance(name, str) else name
    label = name if isinstance(name, str) else label_of(name)
    ready = dataset_arguments(factory, label, data_dir=str(data_dir), seed=seed, given=plain_values(given))
    return make_dataset(factory, label, ready)
