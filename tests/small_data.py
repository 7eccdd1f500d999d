"""Small files in the formats in which datasets are published, and sources whose checksums are theirs."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import json
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from fedcat.data.files import catalog
from fedcat.data.files.checksum import Checksum
from fedcat.data.files.source import Remote, Source

RNG = np.random.default_rng(7)
TRAIN, TEST = 120, 30


def md5(content: bytes) -> Checksum:
    return Checksum("md5", hashlib.md5(content).hexdigest(), len(content))


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist_files() -> dict[str, bytes]:
    """The four idx files, unpacked."""
    files = {}
    for stem, count in (("train", TRAIN), ("t10k", TEST)):
        files[f"{stem}-images-idx3-ubyte"] = idx(RNG.integers(256, size=(count, 28, 28), dtype=np.uint8))
        files[f"{stem}-labels-idx1-ubyte"] = idx((np.arange(count) % 10).astype(np.uint8))
    return files


def cifar_records(count: int, classes: tuple[int, ...]) -> bytes:
    labels = np.stack([np.arange(count) % c for c in classes], axis=1).astype(np.uint8)
    return np.concatenate([labels, RNG.integers(256, size=(count, 3072), dtype=np.uint8)], axis=1).tobytes()


def cifar_files(name: str) -> dict[str, bytes]:
    """The files of the binary version by their names."""
    if name == "cifar10":
        stems = [f"data_batch_{i}" for i in range(1, 6)]
        return {f"{s}.bin": cifar_records(TRAIN // 5, (10,)) for s in stems} | {
            "test_batch.bin": cifar_records(TEST, (10,))
        }
    return {"train.bin": cifar_records(TRAIN, (20, 100)), "test.bin": cifar_records(TEST, (20, 100))}


class _Python2Pickler(pickle._Pickler):  # type: ignore[name-defined]
    """Writes texts and bytes as Python 2 wrote its strings, as CIFAR's publisher did."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def _string(self, text):
        content = text if isinstance(text, bytes) else text.encode("latin-1")
        short = len(content) < 256
        head = b"U" + bytes([len(content)]) if short else b"T" + struct.pack("<i", len(content))
        self.write(head + content)
        self.memoize(text)

    dispatch[str] = _string
    dispatch[bytes] = _string


def pickled_cifar(records: bytes, classes: tuple[int, ...]) -> bytes:
    """The Python version of a binary file: a protocol 2 pickle of a dict with a NumPy array."""
    rows = np.frombuffer(records, dtype=np.uint8).reshape(-1, len(classes) + 3072)
    keys = ("labels",) if len(classes) == 1 else ("coarse_labels", "fine_labels")
    labels = {key: rows[:, column].tolist() for column, key in enumerate(keys)}
    names = [f"image_{i}.png" for i in range(len(rows))]
    batch = {"batch_label": "training batch 1 of 5", **labels, "data": rows[:, len(classes) :], "filenames": names}
    file = io.BytesIO()
    _Python2Pickler(file, protocol=2).dump(batch)
    return file.getvalue()


def tar(files: dict[str, bytes], folder: str, packed: str = "gz") -> bytes:
    """A packed tar file; the same files give the same bytes."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"{folder}/{name}" if folder else name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(file.getvalue(), mtime=0) if packed == "gz" else bz2.compress(file.getvalue())


def writers(count: int = 6, samples: int = 12) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Samples by part and writer; the writers' sizes differ."""
    parts: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {"train": {}, "test": {}}
    for number in range(count):
        for part, size in (("train", samples + number), ("test", 3)):
            x = RNG.integers(256, size=(size, 784), dtype=np.uint8)
            parts[part][f"f{number:04}_00"] = (x, RNG.integers(62, size=size))
    return parts


def leaf_files(parts) -> dict[str, bytes]:
    """LEAF's JSON files by their paths; the training part is in two of them."""

    def text(users):
        data = {u: {"x": (x / 255.0).tolist(), "y": y.tolist()} for u, (x, y) in users.items()}
        sizes = [len(y) for _, y in users.values()]
        return json.dumps({"users": list(users), "num_samples": sizes, "user_data": data}).encode()

    train = list(parts["train"].items())
    return {
        "train/all_data_0_keep_0_train_9.json": text(dict(train[::2])),
        "train/all_data_1_keep_0_train_9.json": text(dict(train[1::2])),
        "test/all_data_0_keep_0_test_9.json": text(parts["test"]),
    }


def tff_files(parts) -> dict[str, bytes]:
    """TensorFlow Federated's two HDF5 files by their names."""
    import h5py

    files = {}
    for part, users in parts.items():
        file = io.BytesIO()
        with h5py.File(file, "w") as h5:
            for user, (x, y) in users.items():
                h5[f"examples/{user}/pixels"] = (x / 255).astype(np.float32).reshape(-1, 28, 28)
                h5[f"examples/{user}/label"] = y.astype(np.int32)
        files[f"fed_emnist_{part}.h5"] = file.getvalue()
    return files


def write(folder: Path, files: dict[str, bytes], *, packed: bool = False) -> Path:
    for name, content in files.items():
        path = folder / (name + ".gz" if packed else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    return folder


def mnist_source(files: dict[str, bytes], server: str = "http://127.0.0.1:9/") -> Source:
    """MNIST with the checksums of these files, to be had packed from a server."""
    packed = {f"{name}.gz": gzip.compress(content, mtime=0) for name, content in files.items()}
    return replace(
        catalog.MNIST,
        layouts=[replace(catalog.MNIST.layouts[0], checksums={name: md5(content) for name, content in files.items()})],
        remotes=[Remote(name, [server + name], md5(content)) for name, content in packed.items()],
    )


def cifar_source(name: str, files: dict[str, bytes], server: str = "http://127.0.0.1:9/") -> Source:
    """CIFAR with the checksums of these files; its archive can be had from a server."""
    ten = name == "cifar10"
    classes = (10,) if ten else (20, 100)
    stems = [file.removesuffix(".bin") for file in files]
    pickled = {file.removesuffix(".bin"): pickled_cifar(content, classes) for file, content in files.items()}
    archive = md5(tar(files, "cifar-10-batches-bin" if ten else "cifar-100-binary"))
    made = catalog._cifar_source(
        name=name,
        packed="cifar-10-binary.tar.gz" if ten else "cifar-100-binary.tar.gz",
        folder="cifar-10-batches-bin" if ten else "cifar-100-binary",
        python="cifar-10-batches-py" if ten else "cifar-100-python",
        classes=classes,
        keys=("labels",) if ten else ("coarse_labels", "fine_labels"),
        parts={"train": stems[:-1], "test": stems[-1:]},
        binary={file: md5(content) for file, content in files.items()},
        pickled={file: md5(content) for file, content in pickled.items()},
        archive=archive,
    )
    return replace(made, remotes=[replace(r, addresses=[server + r.name], checksum=archive) for r in made.remotes])


def femnist_source(archive: bytes, server: str = "http://127.0.0.1:9/") -> Source:
    """FEMNIST whose archive has another checksum and can be had from a server."""
    checksum = Checksum("sha256", hashlib.sha256(archive).hexdigest())
    real = catalog.FEMNIST
    layouts = [*real.layouts[:2], replace(real.layouts[2], checksum=checksum)]
    remotes = [replace(r, addresses=[server + r.name], checksum=checksum) for r in real.remotes]
    return replace(real, layouts=layouts, remotes=remotes)
