"""Decoded datasets kept as safetensors in the user's cache folder, under the checksum of the files they came from."""

from __future__ import annotations

import hashlib
import json
import time
import zlib
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

FORMAT = "1"
"""Counts up when decoding changes, so that older copies are not used."""
MARKS = "checksums.json"
"""Which checksum each source file had, and its size and times then: a file that was not touched is not read again."""


@dataclass(frozen=True)
class DecodedData:
    """A decoded dataset: arrays by name, and lists of words by name."""

    arrays: Mapping[str, NDArray[Any]]
    words: Mapping[str, Sequence[str]] = field(default_factory=dict)


def load_or_decode(name: str, files: Mapping[str, Path], decode: Callable[[], DecodedData]) -> DecodedData:
    """Return a dataset's content: the prepared copy where there is one for these very files, else decoded anew.

    Parameters
    ----------
    name : str
        The dataset's name, for the copy's own.
    files : mapping
        The source files by the names under which they were found.
    decode : callable
        Reads and verifies them. Nothing is written where it raises.
    """
    folder = locations.cache() / "prepared"
    seen = {name: _mark(path) for name, path in files.items()}
    key, marks = _key(folder, files)
    copy = folder / f"{name}-{key[:20]}.safetensors"
    content = _read(copy)
    try:
        if content is None:
            began = time.perf_counter()
            with show_status(f"preparing {name}"):
                content = decode()
                _check_untouched(files, seen)
                _write(copy, content)
            notify(f"prepared {name} in {time.perf_counter() - began:.1f} s, once")
        if marks:
            _write_marks(folder, marks)
    except _CacheError as error:
        notify(f"note: no prepared copy of {name} is kept, {folder} cannot be written: {error}")
    assert content is not None
    return content


class _CacheError(Exception):
    """The cache folder cannot be written."""


def _key(folder: Path, files: Mapping[str, Path]) -> tuple[str, dict[str, Any]]:
    """Return a SHA-256 over the files' own, and those that had to be computed: files that were touched."""
    known = _read_marks(folder)
    digest = hashlib.sha256(f"format {FORMAT}".encode())
    fresh = {}
    for name, path in sorted(files.items()):
        mark = _mark(path)
        place = str(path.resolve())
        entry = known.get(place)
        if not isinstance(entry, dict) or entry.get("mark") != mark:
            entry = fresh[place] = {"mark": mark, "sha256": file_digest(path)}
        digest.update(f"\n{name} {entry['sha256']}".encode())
    return digest.hexdigest(), fresh


def _mark(path: Path) -> list[int]:
    """Return what changes when a file is written to."""
    state = path.stat()
    return [state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]


def _check_untouched(files: Mapping[str, Path], seen: Mapping[str, list[int]]) -> None:
    """Raise where a file was written to since its checksum was taken: the copy would be kept under a wrong one."""
    for name, path in files.items():
        if _mark(path) != seen[name]:
            raise DataError(f"{path} was changed while it was read: wait until it is whole, and try again")


def _read_marks(folder: Path) -> dict[str, Any]:
    try:
        known = json.loads((folder / MARKS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _write_marks(folder: Path, fresh: Mapping[str, Any]) -> None:
    text = json.dumps({**_read_marks(folder), **fresh}, indent=1)
    with _kept(folder / MARKS) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _read(copy: Path) -> DecodedData | None:
    """Return what a copy holds, or None where there is none or it is damaged."""
    try:
        if not copy.exists():
            return None
        with safe_open(copy, framework="np") as file:
            told = json.loads(file.metadata()["fedcat"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if {name: _crc(array) for name, array in arrays.items()} != told["crc32"]:
            return None
        return DecodedData(arrays, told["words"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def _write(copy: Path, content: DecodedData) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in content.arrays.items()}
    crc = {name: _crc(array) for name, array in arrays.items()}
    words = {name: list(listed) for name, listed in content.words.items()}
    told = {"fedcat": json.dumps({"crc32": crc, "words": words})}
    with _kept(copy) as temporary:
        save_file(arrays, temporary, told)


def _crc(array: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(array).data)


@contextmanager
def _kept(path: Path) -> Iterator[Path]:
    """Write a file of the cache."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        raise _CacheError(getattr(error, "strerror", None) or error) from error
