"""The layouts in which a dataset's files may be stored in a directory."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from fedcat.core.errors import DataError
from fedcat.data.files.cache import DecodedData
from fedcat.data.files.checksum import Checksum


class FileLayout(Protocol):
    """One layout in which a dataset's files may be stored in a directory."""

    verified: ClassVar[bool]
    """Whether the files have published checksums, against which they are verified."""

    def find(self, base: Path) -> dict[str, Path] | None:
        """Return the files by name if `base` has all of them, else None."""
        ...

    def missing(self, base: Path) -> str | None:
        """Return which directory under `base` is incomplete, and what it lacks; None if there is none."""
        ...

    def decode(self, files: Mapping[str, Path]) -> DecodedData:
        """Read and verify the files."""
        ...


@dataclass(frozen=True)
class NamedFiles:
    """Files with fixed names and published checksums of their content.

    A file whose size is published may be compressed with gzip: no more than that is unpacked of it.

    Attributes
    ----------
    folders : sequence of str
        Subdirectories that may hold them.
    checksums : mapping
        The checksum of each uncompressed file, by name.
    read : callable
        Decodes the files, given (content, path for errors) by name.
    """

    verified: ClassVar[bool] = True
    folders: Sequence[str]
    checksums: Mapping[str, Checksum]
    read: Callable[[Mapping[str, tuple[bytes, str]]], DecodedData]

    def find(self, base: Path) -> dict[str, Path] | None:
        """Return the files, all from one directory."""
        for folder in self.folders:
            found = {name: path for name in self.checksums if (path := self._present(base / folder / name))}
            if len(found) == len(self.checksums):
                return found
        return None

    def missing(self, base: Path) -> str | None:
        """Return which directory has only some of the files, and which it lacks."""
        for folder in self.folders:
            absent = [name for name in self.checksums if not self._present(base / folder / name)]
            if 0 < len(absent) < len(self.checksums):
                return f"{base / folder} lacks {', '.join(absent)}"
        return None

    def decode(self, files: Mapping[str, Path]) -> DecodedData:
        """Read the files and verify their checksums."""
        contents = {}
        for name, path in files.items():
            content = _plain(path, self.checksums[name].size)
            wrong = self.checksums[name].of_bytes(content)
            if wrong is not None:
                raise DataError(f"{path}{', decompressed,' if path.suffix == '.gz' else ''} {wrong}")
            contents[name] = (content, str(path))
        return self.read(contents)

    def _present(self, path: Path) -> Path | None:
        """Return the path of a file or of its gzip-compressed version, or None if neither exists."""
        packed = [path.with_name(path.name + ".gz")] if self.checksums[path.name].size is not None else []
        return next((p for p in (path, *packed) if p.is_file()), None)


@dataclass(frozen=True)
class TarArchive:
    """One compressed tar file with a published checksum.

    Attributes
    ----------
    folders : sequence of str
        Subdirectories that may hold it.
    name : str
        The file name.
    checksum : Checksum
        The published checksum.
    read : callable
        Decodes the open archive, given the archive and its path for errors.
    """

    verified: ClassVar[bool] = True
    folders: Sequence[str]
    name: str
    checksum: Checksum
    read: Callable[[tarfile.TarFile, str], DecodedData]

    def find(self, base: Path) -> dict[str, Path] | None:
        """Return the archive."""
        for folder in self.folders:
            path = base / folder / self.name
            if path.is_file():
                return {self.name: path}
        return None

    def missing(self, base: Path) -> str | None:
        """Return None: a single file cannot be incomplete."""
        return None

    def decode(self, files: Mapping[str, Path]) -> DecodedData:
        """Verify the archive and read it."""
        path = files[self.name]
        wrong = self.checksum.of_file(path)
        if wrong is not None:
            raise DataError(f"{path} {wrong}")
        with tarfile.open(path) as archive:
            return self.read(archive, str(path))


@dataclass(frozen=True)
class GlobFiles:
    """Files whose names match patterns, without published checksums.

    Attributes
    ----------
    folders : sequence of str
        Subdirectories that may hold them.
    patterns : sequence of str
        Glob patterns; each must match at least one file.
    read : callable
        Decodes the files, given by their paths relative to the subdirectory.
    """

    verified: ClassVar[bool] = False
    folders: Sequence[str]
    patterns: Sequence[str]
    read: Callable[[Mapping[str, Path]], DecodedData]

    def find(self, base: Path) -> dict[str, Path] | None:
        """Return the files, all from one directory."""
        for folder in self.folders:
            directory = base / folder
            found = [[p for p in sorted(directory.glob(pattern)) if p.name[0] != "."] for pattern in self.patterns]
            if all(found):
                return {str(path.relative_to(directory)): path for paths in found for path in paths}
        return None

    def missing(self, base: Path) -> str | None:
        """Return which directory matches only some of the patterns, and which it lacks."""
        for folder in self.folders:
            absent = [pattern for pattern in self.patterns if not any((base / folder).glob(pattern))]
            if 0 < len(absent) < len(self.patterns):
                return f"{base / folder} lacks {', '.join(absent)}"
        return None

    def decode(self, files: Mapping[str, Path]) -> DecodedData:
        """Read the files."""
        return self.read(files)


def _plain(path: Path, size: int | None) -> bytes:
    """Return a file's content, decompressed if it is a .gz file, up to one byte more than its published size."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(-1 if size is None else size + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged or not a gzip file: {error}") from error
