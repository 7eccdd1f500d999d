"""Decoders of file formats. None of them executes code from a file."""

from __future__ import annotations

import json
import math
import pickletools
import string
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcat.core.errors import DataError, SettingError

Bytes = NDArray[np.uint8]
FEMNIST_CLASSES = 62
NPZ_NAMES = {"x", "y", "x_test", "y_test", "owner", "owner_test"}
LETTERS = f"\n !\"&'(),-.{string.digits}:;>?{string.ascii_uppercase}[]{string.ascii_lowercase}}}"
"""The characters of LEAF's Shakespeare, in LEAF's order."""
LINE = 80
"""Characters per line in LEAF's Shakespeare."""
_PLACES = {letter: place for place, letter in enumerate(LETTERS)}
SMALL, RATIO = 1 << 28, 100
"""A file without a published checksum may take `SMALL` bytes in memory, or `RATIO` times its own size."""


@dataclass(frozen=True)
class Writer:
    """One owner's training or test samples: a writer's images [samples, 1, 28, 28], or a role's lines [samples, 80]."""

    name: str
    x: Bytes
    y: Bytes


def check_unpacked(name: str, packed: int, unpacked: int) -> None:
    """Raise a `DataError` if a file of `packed` bytes declares implausibly much data."""
    if unpacked > max(SMALL, RATIO * packed):
        raise DataError(
            f"{name} has {packed:,} bytes and would take {unpacked:,} in memory, more than {RATIO} times as many: "
            "store it uncompressed if that is right"
        )


def read_idx(content: bytes, name: str, dimensions: int) -> Bytes:
    """Decode an idx file of bytes, the format of MNIST.

    Parameters
    ----------
    content : bytes
        The whole file, uncompressed.
    name : str
        The file's name in errors.
    dimensions : int
        The number of dimensions it must have: 3 for images, 1 for labels.
    """
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes([0, 0, 8, dimensions]):
        begin = content[:4].hex(" ") or "nothing"
        raise DataError(f"{name} is not an idx file of bytes with {dimensions} dimensions: it begins with {begin}")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    wanted = math.prod(shape)
    if len(content) - start != wanted:
        raise DataError(f"{name} must hold {wanted:,} bytes of data by its header, got {len(content) - start:,}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_cifar(content: bytes, name: str, classes: Sequence[int]) -> tuple[Bytes, Bytes]:
    """Decode a file in CIFAR's binary format.

    Parameters
    ----------
    content : bytes
        The whole file.
    name : str
        The file's name in errors.
    classes : sequence of int
        The number of classes of each label before an image: (10,) in CIFAR-10, (20, 100) in CIFAR-100.

    Returns
    -------
    images : numpy.ndarray
        [samples, 3, 32, 32]
    labels : numpy.ndarray
        [samples, labels per sample]
    """
    record = len(classes) + 3072
    if not content or len(content) % record:
        raise DataError(
            f"{name} must hold records of {record:,} bytes (CIFAR's binary format), got {len(content):,} bytes"
        )
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, record)
    labels = records[:, : len(classes)]
    for column, count in enumerate(classes):
        if labels[:, column].max() >= count:
            raise DataError(f"{name} must hold labels below {count}, got {labels[:, column].max()}")
    return records[:, len(classes) :].reshape(-1, 3, 32, 32), labels


def read_pickled_cifar(content: bytes, name: str, keys: Sequence[str]) -> tuple[Bytes, Bytes]:
    """Decode a file in CIFAR's Python format, a pickle, without unpickling it.

    The pickle's opcodes are listed, never executed: the longest string holds the images, and the integers after
    each of `keys` are the labels.

    Parameters
    ----------
    content : bytes
        The whole file.
    name : str
        The file's name in errors.
    keys : sequence of str
        The keys of the labels to read, such as ("labels",) or ("coarse_labels", "fine_labels").
    """
    images = b""
    columns: dict[str, list[int]] = {}
    open_column: list[int] | None = None
    try:
        for opcode, argument, _ in pickletools.genops(content):
            if isinstance(argument, str):
                open_column = columns.setdefault(argument, []) if argument in keys else None
                if len(argument) > len(images):
                    images = argument.encode("latin-1")
            elif isinstance(argument, int) and opcode.name.startswith("BININT") and open_column is not None:
                open_column.append(argument)
    except (ValueError, UnicodeError, struct.error) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"{name} is not in CIFAR's Python format: {reason}") from error
    counts = {len(column) for column in columns.values()}
    if set(columns) != set(keys) or counts != {len(images) // 3072} or len(images) % 3072 or not images:
        raise DataError(f"{name} is not in CIFAR's Python format: it lacks images or one of {', '.join(keys)}")
    labels = np.array([columns[key] for key in keys], dtype=np.uint8).T
    return np.frombuffer(images, dtype=np.uint8).reshape(-1, 3, 32, 32), labels


def read_npz(file: Path) -> dict[str, NDArray[Any]]:
    """Read a user's .npz file: inputs x and class labels y, and optionally x_test, y_test and owner."""
    try:
        if not file.exists():
            raise DataError(f"{file} does not exist")
        if not zipfile.is_zipfile(file):
            raise DataError(f"{file} is not an .npz file: write one with numpy.savez(path, x=..., y=...)")
        with np.load(file, allow_pickle=False) as stored:
            _check_members(file, stored.zip.infolist())
            return {name: np.asarray(stored[name]) for name in stored.files}
    except DataError:
        raise
    except (
        *(OSError, ValueError, EOFError, TypeError, KeyError, RuntimeError, zlib.error, zipfile.BadZipFile),
        MemoryError,  # a header may declare any size
    ) as error:
        raise DataError(f"{file} cannot be read as an .npz file of numbers and strings: {error}") from error


def _check_members(file: Path, members: Sequence[zipfile.ZipInfo]) -> None:
    """Raise a `DataError` if an .npz file should not be unpacked.

    Of the compressions that NumPy uses, zipfile unpacks no more than the file's directory declares; of others it may.
    """
    names = {member.filename.removesuffix(".npy") for member in members}
    if names - NPZ_NAMES or not {"x", "y"} <= names or ("x_test" in names) != ("y_test" in names):
        raise DataError(
            f"{file} must hold x and y, optionally x_test with y_test, owner and owner_test, and nothing else; "
            f"got {', '.join(sorted(names)) or 'nothing'}"
        )
    if {member.compress_type for member in members} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise DataError(f"{file} must be written by numpy.savez or numpy.savez_compressed, got another compression")
    check_unpacked(str(file), file.stat().st_size, sum(member.file_size for member in members))


def read_leaf(content: bytes, name: str, read: Callable[[str, Any, str], Writer]) -> list[Writer]:
    """Decode one of LEAF's JSON files: users, num_samples, and user_data with x and y, which `read` decodes."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is truncated or not JSON: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("user_data"), dict) or "users" not in found:
        raise DataError(f"{name} is not a LEAF file: it must hold users, num_samples and user_data")
    users, declared = found["users"], found.get("num_samples")
    if not isinstance(users, list) or set(map(str, users)) != set(found["user_data"]):
        raise DataError(f"{name} must hold user_data for exactly the users it lists")
    writers = [read(str(user), found["user_data"][str(user)], name) for user in users]
    if declared is not None and declared != [len(writer.y) for writer in writers]:
        raise DataError(f"{name} must hold as many samples per user as num_samples declares")
    return writers


def leaf_speaker(user: str, samples: Any, name: str) -> Writer:
    """Decode a role of LEAF's Shakespeare: lines of 80 characters, and the character that follows each."""
    try:
        lines, following = list(samples["x"]), list(samples["y"])
        x = np.array([[_PLACES[letter] for letter in line] for line in lines], np.uint8)
        y = np.array([_PLACES[letter] for letter in following], np.uint8)
    except (TypeError, KeyError, ValueError) as error:
        right = f"x, lines of {LINE} of LEAF's {len(LETTERS)} characters, and y, the character after each"
        raise DataError(f"{name}: {user} must have {right}") from error
    if x.shape != (len(y), LINE):
        raise DataError(f"{name}: {user} must have one character in y for each line of {LINE} characters in x")
    return Writer(user, x, y)


def leaf_writer(user: str, samples: Any, name: str) -> Writer:
    """Decode one of LEAF's writers of FEMNIST: rows of 784 pixels, and their labels."""
    try:
        x = np.array(samples["x"], dtype=np.float64).reshape(-1, 784)
        y = np.array(samples["y"])
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(f"{name}: writer {user} must have x, rows of 784 pixels, and y") from error
    return Writer(user, _gray(x, f"{name}: writer {user}", True), _character(y, len(x), f"{name}: writer {user}"))


def read_tff(path: Path) -> Iterator[Writer]:
    """Decode one of TensorFlow Federated's HDF5 files of FEMNIST: examples/WRITER/pixels and examples/WRITER/label."""
    try:
        import h5py
    except ImportError as error:
        raise SettingError(f"{path} is an HDF5 file, which needs h5py: pip install 'fedcat[hub]'") from error
    declared = 0
    try:
        with h5py.File(path, "r") as file:
            for user, samples in file["examples"].items():
                where = f"{path}: writer {user}"
                declared += samples["pixels"].nbytes + samples["label"].nbytes
                check_unpacked(str(path), path.stat().st_size, declared)
                x = np.asarray(samples["pixels"], dtype=np.float64).reshape(-1, 784)
                yield Writer(
                    user, _gray(x, where, False), _character(np.asarray(samples["label"]).reshape(-1), len(x), where)
                )
    except DataError:
        raise
    except (OSError, KeyError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).strip("'\"").splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path} is not an HDF5 file of FEMNIST (examples/WRITER/pixels, label): {reason}") from error


def _gray(x: NDArray[np.float64], name: str, exactly: bool) -> Bytes:
    """Return pixels from 0 to 1 as bytes; if `exactly`, each must be a multiple of 1 / 255."""
    if not len(x):
        raise DataError(f"{name} has no samples")
    with np.errstate(invalid="ignore", over="ignore"):
        levels = np.rint(x * 255)
        near = (np.abs(x * 255 - levels) < (1e-4 if exactly else 1.0)).all()
    if not near or levels.min() < 0 or levels.max() > 255:
        right = "on 256 gray levels from 0 to 1" if exactly else "from 0 to 1"
        raise DataError(f"{name} must have pixels {right}: the file is damaged")
    return levels.astype(np.uint8).reshape(-1, 1, 28, 28)


def _character(y: NDArray[Any], count: int, name: str) -> Bytes:
    if y.shape != (count,) or y.dtype.kind not in "iu" or y.min() < 0 or y.max() >= FEMNIST_CLASSES:
        raise DataError(f"{name} must have one class label below {FEMNIST_CLASSES} for each of its {count} samples")
    return y.astype(np.uint8)
