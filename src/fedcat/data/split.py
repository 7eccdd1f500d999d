"""Label checks, owners and the test split of a user's samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.core.rng import Purpose, random_stream
from fedcat.data.partitions import Ints
from fedcat.data.pool import Pool


def check_labels(train: Pool, held: Pool | None, named: int) -> None:
    """Raise a `SettingError` if labels seem to start at 1, or test labels do not occur in training."""
    least, most = int(train.y.min()), int(train.y.max())
    if least > 0 and not named and (held is None or int(held.y.min()) > 0):
        raise SettingError(f"y must hold class labels from 0, got none below {least}: count from 0, or set classes")
    if held is not None and int(held.y.max()) > max(most, named - 1):
        raise SettingError(
            f"test labels must be among the training classes 0 to {max(most, named - 1)}, got {int(held.y.max())}: "
            "set classes if this is intended"
        )


def encode_owners(owner: object, samples: int) -> tuple[Ints, Sequence[str]]:
    """Return each sample's owner as a number, and the owners' names in the order of the numbers."""
    array = owner.detach().cpu().numpy() if isinstance(owner, Tensor) else np.asarray(owner)
    if array.shape != (samples,) or array.dtype.kind not in "iuUS":
        raise SettingError(
            f"owner must hold one integer or string for each of the {samples} samples, "
            f"got shape {array.shape} of {array.dtype}"
        )
    names, owners = np.unique(array, return_inverse=True)
    return owners.astype(np.int64), tuple(str(name) for name in names)


def encode_test_owners(owner: object, samples: int, names: Sequence[str]) -> Ints:
    """Return each test sample's owner as a number among the owners of training samples, -1 for others."""
    owners, own_names = encode_owners(owner, samples)
    place = {name: number for number, name in enumerate(names)}
    return np.array([place.get(name, -1) for name in own_names], np.int64)[owners]


def hold_out(train: Pool, owners: Ints | None, fraction: float, seed: int) -> tuple[Pool, Pool, Ints, Ints]:
    """Hold out a fraction of the samples; return the rest, the held-out samples, and the positions of both."""
    if not 0 < fraction < 1:
        raise SettingError(f"test_fraction must be between 0 and 1, got {fraction:g}")
    order = random_stream(seed, Purpose.SPLIT).permutation(len(train))
    if owners is None:
        cut = math.ceil(fraction * len(train) - 1e-9)
        held, kept = order[:cut], order[cut:]
    else:
        order = order[np.argsort(owners[order], kind="stable")]
        sizes = np.bincount(owners)
        rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        quota = np.minimum(np.rint(fraction * sizes), sizes - 1)
        test = rank < np.repeat(quota, sizes)
        held, kept = order[test], order[~test]
    if not len(held) or not len(kept):
        raise SettingError(f"test_fraction {fraction:g} of {len(train)} samples leaves an empty training or test set")
    rest, apart = (Pool(train.x[part], train.y[part], train.normalize) for part in map(torch.from_numpy, (kept, held)))
    return rest, apart, kept, held
