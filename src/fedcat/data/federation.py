"""A federation: the devices, what each of them holds, and the test data that none of them sees."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedcat.core.errors import SettingError
from fedcat.data.pool import Pool

Ints = NDArray[np.int64]


class Federation:
    """Training samples divided over devices, and a test set that is no device's.

    Parameters
    ----------
    train : Pool
        The training samples of all devices.
    test : Pool
        The test samples. They are never trained on.
    owner : array_like of int
        The device that holds each training sample, from 0.
    classes : int, optional
        The number of classes; by default one more than the largest label.
    devices : int, optional
        The number of devices; by default one more than the largest owner.
    name : str
        What the data is called in reports.
    device_names, class_names : sequence of str
        What the devices and the classes are called; empty where they have no names.
    """

    def __init__(
        self,
        train: Pool,
        test: Pool,
        owner: object,
        classes: int | None = None,
        devices: int | None = None,
        name: str = "custom",
        *,
        device_names: Sequence[str] = (),
        class_names: Sequence[str] = (),
    ) -> None:
        owners = np.asarray(owner)
        if owners.shape != (len(train),) or owners.dtype.kind not in "iu":
            raise SettingError(
                f"owner must hold one device number for each of the {len(train)} training samples, "
                f"got shape {owners.shape} of {owners.dtype}"
            )
        if train.shape != test.shape:
            raise SettingError(f"test inputs must have shape {train.shape} as in training, got {test.shape}")
        if train.kind != test.kind:
            raise SettingError(f"test inputs must be {train.kind} as in training, got {test.kind}")
        self.train, self.test, self.name = train, test, name
        most = max(int(train.y.max()), int(test.y.max())) + 1
        self.classes = most if classes is None else classes
        if self.classes < most:
            raise SettingError(f"classes must be at least {most} for these labels, got {self.classes}")
        self.devices = int(owners.max()) + 1 if devices is None else devices
        if owners.min() < 0 or owners.max() >= self.devices:
            raise SettingError(f"owner must lie in 0 .. {self.devices - 1}, got {owners.min()} .. {owners.max()}")
        self.sizes: Ints = np.bincount(owners, minlength=self.devices)
        if self.sizes.min() == 0:
            empty = int(np.argmin(self.sizes))
            raise SettingError(f"owner gives device {empty} no training sample: every device must hold one")
        self.device_names, self.class_names = tuple(device_names), tuple(class_names)
        for kind, names, count in (
            ("device_names", self.device_names, self.devices),
            ("class_names", self.class_names, self.classes),
        ):
            if names and len(names) != count:
                raise SettingError(f"{kind} must hold {count} names, got {len(names)}")
        self._order: Ints = np.argsort(owners, kind="stable")
        self._starts: Ints = np.concatenate([[0], np.cumsum(self.sizes)])

    @cached_property
    def largest(self) -> int:
        """The samples of the device that has most."""
        return int(self.sizes.max())

    def indices(self, device: int) -> Ints:
        """Return the positions in `train` of the samples that `device` holds."""
        return self._order[self._starts[device] : self._starts[device + 1]]

    @cached_property
    def class_counts(self) -> Ints:
        """How many samples of each class each device holds, [devices, classes]."""
        owner = np.repeat(np.arange(self.devices), self.sizes)
        cell = owner * self.classes + self.train.y.cpu().numpy()[self._order]
        return np.bincount(cell, minlength=self.devices * self.classes).reshape(self.devices, self.classes)

    @cached_property
    def hash(self) -> str:
        """A SHA-256 over the data and over who holds which of it."""
        digest = hashlib.sha256()
        digest.update(self.train.digest.encode())
        digest.update(self.test.digest.encode())
        digest.update(self._order.astype("<i8").tobytes())
        digest.update(self._starts.astype("<i8").tobytes())
        return digest.hexdigest()

    def __str__(self) -> str:
        samples = f"{len(self.train):,} training and {len(self.test):,} test samples"
        return f"{self.name}: {self.devices:,} devices, {samples}, {self.classes} classes"

    def __repr__(self) -> str:
        return f"<Federation {self}>"
