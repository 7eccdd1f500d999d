"""The published datasets: names, checksums and URLs of their files, and how to decode them."""

from __future__ import annotations

import importlib.util
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedcat.core.errors import DataError
from fedcat.core.text import visible
from fedcat.data.files.cache import DecodedData
from fedcat.data.files.checksum import Checksum
from fedcat.data.files.file_layouts import GlobFiles, NamedFiles, TarArchive
from fedcat.data.files.formats import (
    Bytes,
    Writer,
    leaf_speaker,
    leaf_writer,
    read_cifar,
    read_idx,
    read_leaf,
    read_pickled_cifar,
    read_tff,
)
from fedcat.data.files.source import Remote, Source

Named = Mapping[str, tuple[bytes, str]]


def _md5(digest: str, size: int) -> Checksum:
    return Checksum("md5", digest, size)


# MNIST: the checksums of the .gz files are the published ones. Those of the decompressed files were computed from them,
# so that files compressed again by someone else are accepted too.

_IDX = {
    "train-images-idx3-ubyte": _md5("6bbc9ace898e44ae57da46a324031adb", 47_040_016),
    "train-labels-idx1-ubyte": _md5("a25bea736e30d166cdddb491f175f624", 60_008),
    "t10k-images-idx3-ubyte": _md5("2646ac647ad5339dbf082846283269ea", 7_840_016),
    "t10k-labels-idx1-ubyte": _md5("27ae3e4e09519cfbb04c329615203637", 10_008),
}
_IDX_PACKED = {
    "train-images-idx3-ubyte.gz": _md5("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    "train-labels-idx1-ubyte.gz": _md5("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    "t10k-images-idx3-ubyte.gz": _md5("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    "t10k-labels-idx1-ubyte.gz": _md5("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
}
_MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


def _mnist(files: Named) -> DecodedData:
    arrays = {}
    for part, stem in (("train", "train"), ("test", "t10k")):
        arrays[f"{part}_x"] = read_idx(*files[f"{stem}-images-idx3-ubyte"], 3)[:, None]
        arrays[f"{part}_y"] = read_idx(*files[f"{stem}-labels-idx1-ubyte"], 1)
    return DecodedData(arrays)


MNIST = Source(
    name="mnist",
    layouts=[NamedFiles(("mnist", "MNIST/raw", "MNIST", "raw", ""), _IDX, _mnist)],
    folder="mnist",
    remotes=[Remote(name, [m + name for m in _MNIST_MIRRORS], checksum) for name, checksum in _IDX_PACKED.items()],
    by_hand=f"{', '.join(_IDX)} (with or without .gz)",
)


# CIFAR: the binary format is preferred; the Python format, which torchvision downloads, is read without unpickling.


def _cifar(
    parts: Mapping[str, Sequence[str]], read: Callable[[bytes, str], tuple[Bytes, Bytes]], files: Named
) -> DecodedData:
    arrays = {}
    for part, names in parts.items():
        images, labels = zip(*(read(*files[name]) for name in names), strict=True)
        arrays[f"{part}_x"], arrays[f"{part}_y"] = np.concatenate(images), np.concatenate(labels)
    return DecodedData(arrays)


def _cifar_archive(
    folder: str, names: Iterable[str], read: Callable[[Named], DecodedData]
) -> Callable[[tarfile.TarFile, str], DecodedData]:
    def read_archive(archive: tarfile.TarFile, path: str) -> DecodedData:
        files = {}
        for name in names:
            try:
                member = archive.extractfile(f"{folder}/{name}")
            except KeyError:
                member = None
            if member is None:
                raise DataError(f"{path} must hold {folder}/{name}")
            files[name] = (member.read(), f"{path}: {name}")
        return read(files)

    return read_archive


def _cifar_source(
    name: str,
    packed: str,
    folder: str,
    python: str,
    classes: Sequence[int],
    keys: Sequence[str],
    parts: Mapping[str, Sequence[str]],
    binary: Mapping[str, Checksum],
    pickled: Mapping[str, Checksum],
    archive: Checksum,
) -> Source:
    """Make a source for the archive `packed`, its unpacked `folder`, or torchvision's directory `python`."""

    def from_binary(files: Named) -> DecodedData:
        with_suffix = {part: [f"{stem}.bin" for stem in stems] for part, stems in parts.items()}
        return _cifar(with_suffix, lambda content, path: read_cifar(content, path, classes), files)

    def from_python(files: Named) -> DecodedData:
        return _cifar(parts, lambda content, path: read_pickled_cifar(content, path, keys), files)

    return Source(
        name=name,
        layouts=[
            NamedFiles((folder, f"{name}/{folder}", name, ""), binary, from_binary),
            TarArchive((name, "", folder), packed, archive, _cifar_archive(folder, binary, from_binary)),
            NamedFiles((python, f"{name}/{python}"), pickled, from_python),
        ],
        folder=name,
        remotes=[Remote(packed, [f"https://www.cs.toronto.edu/~kriz/{packed}"], archive)],
        by_hand=f"{packed} (the binary version, packed or unpacked)",
    )


CIFAR10 = _cifar_source(
    name="cifar10",
    packed="cifar-10-binary.tar.gz",
    folder="cifar-10-batches-bin",
    python="cifar-10-batches-py",
    classes=(10,),
    keys=("labels",),
    parts={"train": [f"data_batch_{i}" for i in range(1, 6)], "test": ["test_batch"]},
    binary={
        "data_batch_1.bin": _md5("5dd7e06a14cb22eb9f671a540d1b7c25", 30_730_000),
        "data_batch_2.bin": _md5("5ea93a67294ea407fff1d09f752e9692", 30_730_000),
        "data_batch_3.bin": _md5("942cd6a4bcdd0dd3c604fbe906cb4421", 30_730_000),
        "data_batch_4.bin": _md5("ae636b3ba5c66a11e91e8cb52e771fcb", 30_730_000),
        "data_batch_5.bin": _md5("53f37980c15c3d472c316c40844f3f0d", 30_730_000),
        "test_batch.bin": _md5("803d5f7f4d78ea53de84dbe85f74fb6d", 30_730_000),
    },
    pickled={
        "data_batch_1": Checksum("md5", "c99cafc152244af753f735de768cd75f"),
        "data_batch_2": Checksum("md5", "d4bba439e000b95fd0a9bffe97cbabec"),
        "data_batch_3": Checksum("md5", "54ebc095f3ab1f0389bbae665268c751"),
        "data_batch_4": Checksum("md5", "634d18415352ddfa80567beed471001a"),
        "data_batch_5": Checksum("md5", "482c414d41f54cd18b22e5b47cb7c3cb"),
        "test_batch": Checksum("md5", "40351d587109b95175f43aff81a1287e"),
    },
    archive=Checksum("md5", "c32a1d4ab5d03f1284b67883e8d87530"),
)

CIFAR100 = _cifar_source(
    name="cifar100",
    packed="cifar-100-binary.tar.gz",
    folder="cifar-100-binary",
    python="cifar-100-python",
    classes=(20, 100),
    keys=("coarse_labels", "fine_labels"),
    parts={"train": ["train"], "test": ["test"]},
    binary={
        "train.bin": _md5("6172c7755cfe09b2fe270c85cebc1b15", 153_700_000),
        "test.bin": _md5("4499cfba6c016c1be1438163640a0898", 30_740_000),
    },
    pickled={
        "train": Checksum("md5", "16019d7e3df5f24257cddd939b257f8d"),
        "test": Checksum("md5", "f0ef6b0ae62326f3e7ffdfab6717acfc"),
    },
    archive=Checksum("md5", "03b5dce01913d631647c71ecec9e9cb8"),
)


# FEMNIST: the output of LEAF's scripts has no published checksum; TensorFlow Federated's archive has one.

_H5 = ("fed_emnist_train.h5", "fed_emnist_test.h5")
_TFF = "fed_emnist.tar.bz2"


def _concatenate(train: Iterable[Writer], test: Iterable[Writer], dataset: str = "FEMNIST") -> DecodedData:
    """Concatenate the owners' samples, sorted by owner name."""
    parts = {
        "train": _by_name(f"training files of {dataset}", train),
        "test": _by_name(f"test files of {dataset}", test),
    }
    names = sorted({name for part in parts.values() for name in part})
    arrays: dict[str, np.ndarray] = {}
    for part, writers in parts.items():
        found = [writer for name in names if (writer := writers.get(name))]
        if not found:
            raise DataError(f"{dataset} must have samples in its {part} set, got none")
        arrays[f"{part}_x"] = np.concatenate([writer.x for writer in found])
        arrays[f"{part}_y"] = np.concatenate([writer.y for writer in found])
        sizes = [len(writers[name].y) if name in writers else 0 for name in names]
        arrays[f"{part}_sizes"] = np.array(sizes, dtype=np.int64)
    return DecodedData(arrays, {"writers": [visible(name) for name in names]})


def _by_name(files: str, writers: Iterable[Writer]) -> dict[str, Writer]:
    found: dict[str, Writer] = {}
    for writer in writers:
        if writer.name in found:
            raise DataError(f"the {files} must hold each owner once, got {writer.name} twice")
        found[writer.name] = writer
    return found


def _from_leaf(
    files: Mapping[str, Path], read: Callable[[str, Any, str], Writer] = leaf_writer, dataset: str = "FEMNIST"
) -> DecodedData:
    def part(name: str) -> Iterable[Writer]:
        for label, path in files.items():
            if label.startswith(name):
                yield from read_leaf(path.read_bytes(), str(path), read)

    return _concatenate(part("train"), part("test"), dataset)


def _from_h5(files: Mapping[str, Path]) -> DecodedData:
    train, test = (files[name] for name in _H5)
    return _concatenate(read_tff(train), read_tff(test))


def _from_tff_archive(archive: tarfile.TarFile, path: str) -> DecodedData:
    with tempfile.TemporaryDirectory(prefix="fedcat-") as folder:
        files = {}
        for member in archive:
            name = Path(member.name).name
            if name in _H5 and (content := archive.extractfile(member)) is not None:
                files[name] = Path(folder) / name
                with files[name].open("wb") as target:
                    shutil.copyfileobj(content, target, 1 << 20)
        if len(files) < len(_H5):
            raise DataError(f"{path} must hold {' and '.join(_H5)}")
        return _from_h5(files)


def _need_h5py() -> None:
    if importlib.util.find_spec("h5py") is None:
        raise DataError("reading the file requires h5py: pip install 'fedcat[hub]'")


_TFF_CHECKSUM = Checksum("sha256", "fe1ed5a502cea3a952eb105920bff8cffb32836b5173cb18a57a32c3606f3ea0")

FEMNIST = Source(
    name="femnist",
    layouts=[
        GlobFiles(
            ("femnist", "femnist/data", "leaf/data/femnist/data", "data/femnist/data", "data", ""),
            ("train/*.json", "test/*.json"),
            _from_leaf,
        ),
        GlobFiles(("femnist", "fed_emnist", "datasets", ""), _H5, _from_h5),
        TarArchive(("femnist", ""), _TFF, _TFF_CHECKSUM, _from_tff_archive),
    ],
    folder="femnist",
    remotes=[Remote(_TFF, [f"https://storage.googleapis.com/tff-datasets-public/{_TFF}"], _TFF_CHECKSUM)],
    by_hand=f"LEAF's train/*.json and test/*.json, or TensorFlow Federated's {_TFF},",
    before=_need_h5py,
)


# Shakespeare: LEAF publishes scripts that make the files, not the files.


def _only_scripts() -> None:
    raise DataError("LEAF publishes the scripts that make the files, not the files")


SHAKESPEARE = Source(
    name="shakespeare",
    layouts=[
        GlobFiles(
            ("shakespeare", "shakespeare/data", "leaf/data/shakespeare/data", "data/shakespeare/data", ""),
            ("train/*.json", "test/*.json"),
            partial(_from_leaf, read=leaf_speaker, dataset="Shakespeare"),
        )
    ],
    folder="shakespeare",
    remotes=(),
    by_hand="the train/*.json and test/*.json that LEAF's data/shakespeare/preprocess.sh makes",
    before=_only_scripts,
)

SOURCES = {source.name: source for source in (MNIST, CIFAR10, CIFAR100, FEMNIST, SHAKESPEARE)}
