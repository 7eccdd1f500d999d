"""A cache of decoded datasets: safetensors in the user's cache directory, keyed by the checksum of the source files."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fedcat.core.errors import DataError
from fedcat.core.files import replacing
from fedcat.data.files import locations
from fedcat.data.files.checksum import file_digest
from fedcat.data.files.notices import notify, show_status

FORMAT = "2"
"""Increment this when decoding changes, so that older copies are ignored."""
CHECKSUMS = "checksums.json"
"""The checksum of each source file, with its size and times, so that an unchanged file is not hashed again."""


@dataclass(frozen=True)
class DecodedData:
    """A decoded dataset: arrays by name, and lists of strings by name."""

    arrays: Mapping[str, NDArray[Any]]
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load_or_decode(name: str, files: Mapping[str, Path], decode: Callable[[], DecodedData]) -> DecodedData:
    """Return a decoded dataset, from the cache if it holds a copy for exactly these files.

    Parameters
    ----------
    name : str
        The dataset's name; the copy's file name starts with it.
    files : mapping
        The source files, by name.
    decode : callable
        Reads and verifies them. If it raises, nothing is written.
    """
    content = None
    try:
        folder = _folder()
        before = {name: _stat(path) for name, path in files.items()}
        key, new_checksums = _key(folder, files)
        copy = folder / f"{name}-{key[:20]}.safetensors"
        content = _read(copy)
        if content is None:
            began = time.perf_counter()
            with show_status(f"decoding {name}"):
                content = decode()
                _check_unchanged(files, before)
                _write(copy, content)
            notify(f"decoded {name} in {time.perf_counter() - began:.1f} s and cached it")
        if new_checksums:
            _write_checksums(folder, new_checksums)
    except _CacheError as error:
        notify(f"note: {name} is not cached: {error}")
    return decode() if content is None else content


class _CacheError(Exception):
    """The cache cannot be used."""


def _folder() -> Path:
    """Return the directory of the copies; raise a `_CacheError` if it could hold copies that someone else made."""
    base = locations.cache_dir()
    if base is None:
        raise _CacheError("there is no home directory; set XDG_CACHE_HOME")
    folder = base / "prepared"
    if folder.exists() and sys.platform != "win32":
        stat = folder.stat()
        if stat.st_uid != os.getuid() or stat.st_mode & 0o022:
            raise _CacheError(f"others can write to {folder}")
    return folder


def _key(folder: Path, files: Mapping[str, Path]) -> tuple[str, dict[str, Any]]:
    """Return a SHA-256 over the files' checksums, and the entries of new or changed files, which were hashed now."""
    known = _read_checksums(folder)
    digest = hashlib.sha256(f"format {FORMAT}".encode())
    fresh = {}
    for name, path in sorted(files.items()):
        stat = _stat(path)
        location = str(path.resolve())
        entry = known.get(location)
        if not isinstance(entry, dict) or entry.get("mark") != stat:
            entry = fresh[location] = {"mark": stat, "sha256": file_digest(path)}
        digest.update(f"\n{name} {entry['sha256']}".encode())
    return digest.hexdigest(), fresh


def _stat(path: Path) -> list[int]:
    """Return a file's size, times and inode, which change when it is written to."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _check_unchanged(files: Mapping[str, Path], before: Mapping[str, list[int]]) -> None:
    """Raise a `DataError` if a file changed since its checksum was computed: the cache key would be wrong."""
    for name, path in files.items():
        if _stat(path) != before[name]:
            raise DataError(f"{path} changed while it was read: wait until it is complete and try again")


def _read_checksums(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_checksums(folder: Path, fresh: Mapping[str, Any]) -> None:
    text = json.dumps({**_read_checksums(folder), **fresh}, indent=1)
    with _replacing(folder / CHECKSUMS) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _read(copy: Path) -> DecodedData | None:
    """Return the content of a cached copy, or None if it is missing or damaged."""
    try:
        if not copy.exists():
            return None
        with safe_open(copy, framework="np") as file:
            metadata = json.loads(file.metadata()["fedcat"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        content = DecodedData(arrays, metadata["words"])
        return content if metadata["sha256"] == _digest(copy, content) else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _write(copy: Path, content: DecodedData) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in content.arrays.items()}
    words = {name: list(listed) for name, listed in content.words.items()}
    digest = _digest(copy, DecodedData(arrays, words))
    metadata = {"fedcat": json.dumps({"sha256": digest, "words": words})}
    with _replacing(copy) as temporary:
        save_file(arrays, temporary, metadata)


def _digest(copy: Path, content: DecodedData) -> str:
    """Return the SHA-256 of a copy's content and of its name, which tells the source files."""
    arrays = sorted(content.arrays.items())
    kinds = {name: (str(array.dtype), array.shape) for name, array in arrays}
    digest = hashlib.sha256(json.dumps([copy.name, kinds, content.words], sort_keys=True).encode())
    for _, array in arrays:
        digest.update(array.data)
    return digest.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces `path` in the cache; raise a `_CacheError` if that fails."""
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise _CacheError(f"{path.parent} cannot be written: {getattr(error, 'strerror', None) or error}") from error
