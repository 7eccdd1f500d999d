"""Datasets from a user's data: PyTorch datasets, directories of images, .npz files."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset

from fedcat.core.errors import DataError, SettingError
from fedcat.core.text import visible
from fedcat.data.dataset import DATASETS, Dataset
from fedcat.data.files.formats import check_unpacked, read_npz
from fedcat.data.files.locations import expand_user
from fedcat.data.pool import Normalize

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
PLAIN_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow's modes with at most 8 bits per channel; others would be clipped."""


@contextmanager
def _visible_errors() -> Iterator[None]:
    """Escape the names in errors that a terminal would act on."""
    try:
        yield
    except SettingError as error:
        raise type(error)(visible(str(error))) from error


def _with_visible_names(made: Dataset) -> Dataset:
    """Return a dataset with names that a terminal does not act on; they come from files."""
    owners, classes = (tuple(map(visible, names)) for names in (made.owner_names, made.class_names))
    return replace(made, name=visible(made.name), owner_names=owners, class_names=classes)


def from_torch(train: Any, test: Any = None, *, owner: object = None, **given: Any) -> Dataset:
    """Build a dataset from a ``torch.utils.data.Dataset``, which is read into memory once.

    Parameters
    ----------
    train : torch.utils.data.Dataset
        Items are (input, target, ...), see `Dataset.from_arrays`; inputs are tensors, arrays or PIL images of one
        shape. Random transforms are applied once, when the dataset is read.
    test : torch.utils.data.Dataset, optional
        The test set. If omitted, a fraction of `train` is held out; see `Dataset.from_arrays`.
    owner : int or array_like, optional
        The owner of each training sample: its position in an item, or one integer or string per item.
    **given
        Further parameters of `Dataset.from_arrays`.
    """
    position = owner if isinstance(owner, int) and not isinstance(owner, bool) else None
    x, y, owners = _columns("train", train, position)
    held = None if test is None else _columns("test", test, position)
    theirs = {} if held is None or position is None else {"test_owner": held[2]}
    owned = {"owner": owner if position is None else owners, **theirs, **given}
    return _with_visible_names(Dataset.from_arrays(x, y, None if held is None else held[:2], **owned))


def _columns(part: str, dataset: Any, position: int | None) -> tuple[object, object, object]:
    """Return the inputs, the labels and the owners of a PyTorch dataset."""
    wanted = [0, 1] if position is None else [0, 1, position]
    try:
        if type(dataset) is TensorDataset:
            columns: list[Any] = [dataset.tensors[column] for column in wanted]
        else:
            items = [dataset[i] for i in range(len(dataset))]
            columns = [[item[column] for item in items] for column in wanted]
    except (TypeError, IndexError, KeyError) as error:
        words = "(input, target)" + ("" if position is None else f" with the owner at position {position}")
        raise SettingError(
            f"{part} must be a torch Dataset that has a length and items {words}, got {type(dataset).__name__}"
        ) from error
    if not len(columns[0]):
        raise SettingError(f"{part} must hold at least one sample, got none")
    if not isinstance(columns[0], Tensor):
        arrays = [_array(value) for value in columns[0]]
        shapes = sorted({array.shape for array in arrays})
        if len(shapes) > 1:
            raise SettingError(f"{part} must hold inputs of one shape, got {shapes[0]} and {shapes[-1]}")
        columns = [np.stack(arrays), *([_number(value) for value in column] for column in columns[1:])]
    return columns[0], columns[1], columns[2] if position is not None else None


def _number(value: Any) -> Any:
    """Return a target or an owner as a Python number or string, or as an array of numbers."""
    if isinstance(value, Tensor) and value.ndim:
        return value.detach().cpu().numpy()
    return value.item() if isinstance(value, (Tensor, np.generic)) and value.ndim == 0 else value


def _array(value: Any) -> NDArray[Any]:
    """Return one input as an array, images with channels first."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    array = np.asarray(value)
    if hasattr(value, "getbands"):  # a PIL image
        return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)
    return array


@_visible_errors()
def from_npz(
    *,
    path: str = "",
    test_fraction: float = 0.2,
    split_seed: int = 0,
    classes: int = 0,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
) -> Dataset:
    """Load arrays from an .npz file.

    Parameters
    ----------
    path : path
        The file. It holds inputs x and targets y; optionally x_test and y_test for a test set, and owner, one
        integer or string per sample of x, for a natural partition.
    test_fraction, split_seed : float, int
        The fraction held out as the test set if there is no x_test, and the seed of that split.
    classes : int
        The number of classes; 0 for one more than the largest label.
    mean, std : tuple of float
        Constants that normalize bytes divided by 255. Floating-point values are used unchanged.
    """
    file = _named("npz", path)
    arrays = read_npz(file)
    test = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
    try:
        made = Dataset.from_arrays(
            arrays["x"],
            arrays["y"],
            test,
            owner=arrays.get("owner"),
            test_owner=arrays.get("owner_test"),
            test_fraction=test_fraction,
            seed=split_seed,
            classes=classes or None,
            normalize=Normalize(255.0, mean, std) if arrays["x"].dtype == np.uint8 else None,
            name=file.stem,
        )
    except (SettingError, MemoryError) as error:
        raise DataError(f"{file}: {error}") from error
    return _with_visible_names(made)


@_visible_errors()
def from_folder(
    path: str | Path = "",
    *,
    size: int = 0,
    color: bool = True,
    owners: str | Path = "",
    test_fraction: float = 0.2,
    split_seed: int = 0,
    mean: tuple[float, ...] = (0.0,),
    std: tuple[float, ...] = (1.0,),
) -> Dataset:
    """Load images from one directory per class, named after the class.

    Parameters
    ----------
    path : path
        A directory with one subdirectory per class; or with train and test, each of which has them.
    size : int
        Scale images to this height and width in pixels; 0 keeps their size, which must then be the same for all.
    color : bool
        Whether to load three channels (RGB) or one (gray).
    owners : path, optional
        A CSV file with columns file (relative to `path`) and owner, for a natural partition of the training images.
    test_fraction, split_seed : float, int
        The fraction held out as the test set if there is no test directory, and the seed of that split.
    mean, std : tuple of float
        Constants that normalize pixels scaled to 0 .. 1.
    """
    normalize = Normalize(255.0, mean, std)
    normalize.check_channels(3 if color else 1)
    base = _named("folder", str(path))
    if size < 0:
        raise SettingError(f"folder.size must be at least 0, got {size}")
    if not base.is_dir():
        raise DataError(f"folder.path must be a directory with one subdirectory per class, got {str(path)!r}")
    parts = [name for name in ("train", "test") if (base / name).is_dir()]
    if len(parts) == 1:
        raise DataError(
            f"{base} holds {parts[0]} but not {'test' if parts[0] == 'train' else 'train'}: provide both or neither"
        )
    top = base / "train" if parts else base
    classes = _class_folders(top)
    files = {part: _listed(base / part, classes) for part in parts} or {"train": _listed(base, classes)}
    pools = {part: _pixels([file for file, _ in found], size, color) for part, found in files.items()}
    labels = {part: np.array([label for _, label in found]) for part, found in files.items()}
    owner = _owner_column(Path(owners), base, [file for file, _ in files["train"]]) if str(owners) else None
    made = Dataset.from_arrays(
        pools["train"],
        labels["train"],
        (pools["test"], labels["test"]) if parts else None,
        owner=owner,
        test_fraction=test_fraction,
        seed=split_seed,
        normalize=normalize,
        name=base.resolve().name,
        class_names=classes,
    )
    return _with_visible_names(made)


def _named(dataset: str, path: str) -> Path:
    if not path:
        raise SettingError(f"dataset {dataset!r} needs the option path: -d path=...")
    return expand_user(path)


def _class_folders(top: Path) -> list[str]:
    names = sorted(p.name for p in top.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"{top} must hold one directory per class for at least two classes, got {len(names)}")
    return names


def _listed(top: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    """Return the image files under `top` with their class labels."""
    strange = set(_class_folders(top)) - set(classes)
    if strange:
        raise DataError(f"{top} must hold only classes that occur in training, got {sorted(strange)[0]!r}")
    found = []
    for label, name in enumerate(classes):
        files = sorted(p for p in (top / name).rglob("*") if p.suffix.lower() in IMAGES and p.is_file())
        if not files:
            raise DataError(f"{top / name} must hold images ({', '.join(IMAGES)}), got none")
        found += [(file, label) for file in files]
    return found


def _pixels(files: Sequence[Path], size: int, color: bool) -> NDArray[np.uint8]:
    """Read images as bytes [images, channels, height, width]."""
    from PIL import Image

    arrays = []
    where, packed, unpacked = os.path.commonpath(files), sum(file.stat().st_size for file in files), 0
    for file in files:
        try:
            with Image.open(file) as image:
                if not size:
                    unpacked += image.width * image.height * (3 if color else 1)
                    check_unpacked(where, packed, unpacked)
                if image.mode not in PLAIN_MODES:
                    raise DataError(f"{file} has pixel mode {image.mode}: convert it to 8 bits per channel first")
                plain = image.convert("RGB" if color else "L")
                array = np.asarray(plain.resize((size, size), Image.Resampling.BILINEAR) if size else plain)
        except DataError:
            raise
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{file} cannot be read as an image: {error}") from error
        arrays.append(np.moveaxis(array, -1, 0) if color else array[None])
        if arrays[-1].shape != arrays[0].shape:
            raise DataError(
                f"{file} has {array.shape[1]} x {array.shape[0]} pixels, but {files[0]} has {arrays[0].shape[2]} x "
                f"{arrays[0].shape[1]}: scale them with the option size, e.g. -d size=32"
            )
    return np.stack(arrays)


def _owner_column(table: Path, base: Path, files: Sequence[Path]) -> list[str]:
    """Read the owner of each file from a CSV file."""
    try:
        with expand_user(table).open(newline="", encoding="utf-8-sig") as file:
            rows = [(os.path.normpath(row["file"]), row["owner"]) for row in csv.DictReader(file)]
    except OSError as error:
        raise DataError(f"{table} cannot be read: {error.strerror}") from error
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise DataError(f"{table} must be a CSV file with columns file and owner") from error
    known: dict[str, str] = {}
    for name, owner in rows:
        if name in known:
            raise DataError(f"{table} must list each file once, got {name} twice")
        known[name] = owner
    names = [str(image.relative_to(base)) for image in files]
    for name in names:
        if not known.get(name):
            raise DataError(f"{table} must list the owner of every training image, got none for {name}")
    return [known[name] for name in names]


DATASETS.add(
    "npz",
    from_npz,
    "your own arrays in an .npz file: x, y, and optionally x_test, y_test, owner; -d path=FILE.npz",
)
DATASETS.add(
    "folder",
    from_folder,
    "your own images, one directory per class, under train/ and test/ or split by seed; -d path=DIRECTORY -d size=32",
)
