"""A federation: the clients, the training data of each, and test data that no client holds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from functools import cached_property
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.rng import Purpose, random_stream
from fedcat.data.pool import Pool

Ints = NDArray[np.int64]


def number_of_classes(classes: int | None, *pools: Pool) -> int:
    """Return the number of classes of some pools, 0 if their targets are values; `classes` is what the user said."""
    if not all(pool.has_labels for pool in pools):
        if classes:
            raise SettingError(
                f"classes must be left out if the targets are values, got {classes}: labels are integers"
            )
        return 0
    most = max(int(pool.y.max()) for pool in pools) + 1
    if classes is not None and classes < most:
        raise SettingError(f"classes must be at least {most} for these labels, got {classes}")
    return most if classes is None else classes


def target_kind(pool: Pool) -> str:
    """Return what the targets of a pool are, in words."""
    if pool.has_labels:
        return "class labels"
    return f"values of shape {tuple(pool.y.shape[1:])}" if pool.y.dim() > 1 else "one value per sample"


def _checked_owners(owner: object, samples: int, clients: int) -> Ints:
    """Return the clients of test samples, -1 for nobody."""
    found = np.asarray(owner)
    if found.shape != (samples,) or found.dtype.kind not in "iu":
        raise SettingError(
            f"test_owner must hold one client index for each of the {samples} test samples, "
            f"got shape {found.shape} of {found.dtype}"
        )
    if found.min() < -1 or found.max() >= clients:
        raise SettingError(f"test_owner must be in -1 .. {clients - 1}, got {found.min()} .. {found.max()}")
    return found.astype(np.int64)


class EvaluationSet:
    """Samples to evaluate on.

    Parameters
    ----------
    pool : Pool
        Where the samples are.
    index : numpy.ndarray, optional
        Their positions in the pool; by default all.
    owner : numpy.ndarray, optional
        The client that holds each of them, -1 for nobody.
    """

    def __init__(self, pool: Pool, index: Ints | None = None, owner: Ints | None = None) -> None:
        self.pool, self.owner = pool, owner
        self.index = torch.from_numpy(np.arange(len(pool)) if index is None else index).to(pool.x.device)
        self._moved: dict[torch.device, EvaluationSet] = {}

    def __len__(self) -> int:
        return len(self.index)

    def to(self, device: torch.device) -> EvaluationSet:
        """Return this set on `device`; always the same object, so that runs share it."""
        if self.pool.x.device == device:
            return self
        if device not in self._moved:
            self._moved[device] = EvaluationSet(self.pool.to(device), self.index.cpu().numpy(), self.owner)
        return self._moved[device]

    def targets(self, dtype: torch.dtype) -> Tensor:
        """Return the targets of the samples; floating-point values as `dtype`."""
        return self.pool.targets(self.index, dtype)


class Federation:
    """Training samples divided among clients, and a test set that no client holds.

    Parameters
    ----------
    train : Pool
        The training samples of all clients.
    test : Pool
        The test samples, never trained on.
    owner : array_like of int
        The client that holds each training sample, counted from 0.
    classes : int, optional
        The number of classes; by default one more than the largest label, and 0 if the targets are values.
    clients : int, optional
        The number of clients; by default one more than the largest owner.
    name : str
        The name used in reports.
    client_names, class_names : sequence of str
        Names of the clients and of the classes; empty if they have none.
    test_owner : array_like of int, optional
        The client that each test sample is from, -1 for nobody; clients are then also evaluated on their own.

    Attributes
    ----------
    test_set : EvaluationSet
        The test samples.
    client_test, validation : EvaluationSet or None
        The clients' own test samples, and their own samples for choosing models and numbers, if there are any.
    """

    def __init__(
        self,
        train: Pool,
        test: Pool,
        owner: object,
        classes: int | None = None,
        clients: int | None = None,
        name: str = "custom",
        *,
        client_names: Sequence[str] = (),
        class_names: Sequence[str] = (),
        test_owner: object = None,
    ) -> None:
        owners = np.asarray(owner)
        if owners.shape != (len(train),) or owners.dtype.kind not in "iu":
            raise SettingError(
                f"owner must hold one client index for each of the {len(train)} training samples, "
                f"got shape {owners.shape} of {owners.dtype}"
            )
        if train.shape != test.shape:
            raise SettingError(f"test inputs must have shape {train.shape}, as in training, got {test.shape}")
        if train.kind != test.kind:
            raise SettingError(f"test inputs must be {train.kind}, as in training, got {test.kind}")
        if (train.has_labels, train.y.shape[1:]) != (test.has_labels, test.y.shape[1:]):
            raise SettingError(f"test targets must be {target_kind(train)}, as in training, got {target_kind(test)}")
        self.train, self.test, self.name = train, test, name
        self.classes = number_of_classes(classes, train, test)
        self.clients = int(owners.max()) + 1 if clients is None else clients
        if owners.min() < 0 or owners.max() >= self.clients:
            raise SettingError(f"owner must be in 0 .. {self.clients - 1}, got {owners.min()} .. {owners.max()}")
        self.sizes: Ints = np.bincount(owners, minlength=self.clients)
        if self.sizes.min() == 0:
            empty = int(np.argmin(self.sizes))
            raise SettingError(f"owner gives client {empty} no training sample: every client must hold at least one")
        self.client_names, self.class_names = tuple(client_names), tuple(class_names)
        for kind, names, count in (
            ("client_names", self.client_names, self.clients),
            ("class_names", self.class_names, self.classes),
        ):
            if names and len(names) != count:
                raise SettingError(f"{kind} must hold {count} names, got {len(names)}")
        theirs = None if test_owner is None else _checked_owners(test_owner, len(test), self.clients)
        self.test_set = EvaluationSet(test, owner=theirs)
        self.client_test = self.test_set if theirs is not None and (theirs >= 0).any() else None
        self.validation: EvaluationSet | None = None
        self._order: Ints = np.argsort(owners, kind="stable")
        self._starts: Ints = np.concatenate([[0], np.cumsum(self.sizes)])

    @property
    def outputs(self) -> int:
        """How many outputs a net has: one per class, or one per value of a target."""
        return self.classes or prod(self.train.y.shape[1:])

    @property
    def train_set(self) -> EvaluationSet:
        """The training samples with the clients that hold them."""
        return EvaluationSet(self.train, self._order, np.repeat(np.arange(self.clients), self.sizes))

    @cached_property
    def largest(self) -> int:
        """The number of samples of the largest client."""
        return int(self.sizes.max())

    def hold_out(self, client_test: float = 0.0, validation: float = 0.0, seed: int = 0) -> Federation:
        """Return a federation that keeps a part of every client's samples out of training.

        Parameters
        ----------
        client_test : float
            The fraction of each client's samples that becomes its own test set, `client_test`.
        validation : float
            The fraction of each client's other samples that becomes its validation set, `validation`.
        seed : int
            The seed of the draw.

        Each client keeps at least one sample for training, and gives at least one to each set as long as it can.
        """
        made = copy(self)
        for cached in ("largest", "class_counts", "hash"):
            made.__dict__.pop(cached, None)
        fractions = {n: part for n, part in (("client_test", client_test), ("validation", validation)) if part}
        parts: dict[str, list[Ints]] = {name: [] for name in (*fractions, "train")}
        for client in range(self.clients):
            rest = self.indices(client)
            rest = rest[random_stream(seed, Purpose.HOLD_OUT, client=client).permutation(len(rest))]
            for place, (name, fraction) in enumerate(fractions.items()):
                room = max(len(rest) - len(fractions) + place, min(1, len(rest) - 1))  # one for each part that follows
                count = min(max(1, round(fraction * len(rest))), room)
                parts[name].append(np.sort(rest[:count]))
                rest = rest[count:]
            parts["train"].append(np.sort(rest))
        for name, fraction in fractions.items():
            owner = np.repeat(np.arange(self.clients), [len(part) for part in parts[name]])
            if not len(owner):
                raise SettingError(f"{name} {fraction:g} holds out nothing: no client has a sample to spare")
            setattr(made, name, EvaluationSet(self.train, np.concatenate(parts[name]), owner))
        made.sizes = np.array([len(part) for part in parts["train"]])
        made._order = np.concatenate(parts["train"])
        made._starts = np.concatenate([[0], np.cumsum(made.sizes)])
        return made

    def indices(self, client: int) -> Ints:
        """Return the positions in `train` of the samples that `client` holds."""
        return self._order[self._starts[client] : self._starts[client + 1]]

    @cached_property
    def class_counts(self) -> Ints:
        """The number of samples per client and class, [clients, classes]."""
        if not self.classes:
            raise SettingError(f"class_counts needs class labels: the targets of {self.name!r} are values")
        owner = np.repeat(np.arange(self.clients), self.sizes)
        cell = owner * self.classes + self.train.y.cpu().numpy()[self._order]
        return np.bincount(cell, minlength=self.clients * self.classes).reshape(self.clients, self.classes)

    @cached_property
    def hash(self) -> str:
        """The SHA-256 of the data and of its partition."""
        digest = hashlib.sha256()
        digest.update(self.train.digest.encode())
        digest.update(self.test.digest.encode())
        digest.update(self._order.astype("<i8").tobytes())
        digest.update(self._starts.astype("<i8").tobytes())
        for held in (self.client_test, self.validation):
            if held is not None:
                digest.update(held.index.cpu().numpy().astype("<i8").tobytes())
                digest.update(np.asarray(held.owner).astype("<i8").tobytes())
        return digest.hexdigest()

    def __str__(self) -> str:
        samples = f"{self.sizes.sum():,} training and {len(self.test):,} test samples"
        targets = f"{self.classes} classes" if self.classes else target_kind(self.train)
        return f"{self.name}: {self.clients:,} clients, {samples}, {targets}"

    def __repr__(self) -> str:
        return f"<Federation {self}>"
