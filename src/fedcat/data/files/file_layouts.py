"""The forms in which a dataset's files may lie in a folder."""

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
    """One form in which a dataset's files may lie in a folder."""

    verified: ClassVar[bool]
    """Whether there are published checksums to compare the files with."""

    def find(self, place: Path) -> dict[str, Path] | None:
        """Return the files by name where they are all under `place`, else None."""
        ...

    def lacking(self, place: Path) -> str | None:
        """Return which folder under `place` has some of the files, and what it lacks; None where there is no such."""
        ...

    def decode(self, files: Mapping[str, Path]) -> DecodedData:
        """Read and verify the files."""
        ...


@dataclass(frozen=True)
class NamedFiles:
    """Files of fixed names, each with a published checksum of its content; each may be compressed by gzip.

    Attributes
    ----------
    folders : sequence of str
        Where under a place they may lie.
    checksums : mapping
        What each file must be, by name, when it is not compressed.
    read : callable
        Decodes the files' content by name; errors call a file by the path that stands beside it.
    """

    verified: ClassVar[bool] = True
    folders: Sequence[str]
    checksums: Mapping[str, Checksum]
    read: Callable[[Mapping[str, tuple[bytes, str]]], DecodedData]

    def find(self, place: Path) -> dict[str, Path] | None:
        """Return the files, all of one folder."""
        for folder in self.folders:
            found = {name: path for name in self.checksums if (path := _present(place / folder / name))}
            if len(found) == len(self.checksums):
                return found
        return None

    def lacking(self, place: Path) -> str | None:
        """Return which folder has some of the files, and what it lacks."""
        for folder in self.folders:
            absent = [name for name in self.checksums if not _present(place / folder / name)]
            if 0 < len(absent) < len(self.checksums):
                return f"{place / folder} lacks {', '.join(absent)}"
        return None

    def decode(self, files: Mapping[str, Path]) -> DecodedData:
        """Read the files and compare each with its checksum."""
        contents = {}
        for name, path in files.items():
            content = _plain(path)
            wrong = self.checksums[name].of_bytes(content)
            if wrong is not None:
                raise DataError(f"{path} {'unpacked ' if path.suffix == '.gz' else ''}{wrong}")
            contents[name] = (content, str(path))
        return self.read(contents)


@dataclass(frozen=True)
class TarArchive:
    """One compressed tar file with a published checksum of its own.

    Attributes
    ----------
    folders : sequence of str
        Where under a place it may lie.
    name : str
        What it is called.
    checksum : Checksum
        What it must be.
    read : callable
        Decodes the opened archive; errors call it by the path that is the second argument.
    """

    verified: ClassVar[bool] = True
    folders: Sequence[str]
    name: str
    checksum: Checksum
    read: Callable[[tarfile.TarFile, str], DecodedData]

    def find(self, place: Path) -> dict[str, Path] | None:
        """Return the archive."""
        for folder in self.folders:
            path = place / folder / self.name
            if path.is_file():
                return {self.name: path}
        return None

    def lacking(self, place: Path) -> str | None:
        """Return None: one file is there or not."""
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
    """Files whose names only follow a pattern, and that have no published checksum.

    Attributes
    ----------
    folders : sequence of str
        Where under a place they may lie.
    patterns : sequence of str
        Each must fit at least one file.
    read : callable
        Decodes the files, by their paths under the folder.
    """

    verified: ClassVar[bool] = False
    folders: Sequence[str]
    patterns: Sequence[str]
    read: Callable[[Mapping[str, Path]], DecodedData]

    def find(self, place: Path) -> dict[str, Path] | None:
        """Return the files, all of one folder."""
        for folder in self.folders:
            base = place / folder
            found = [[p for p in sorted(base.glob(pattern)) if p.name[0] != "."] for pattern in self.patterns]
            if all(found):
                return {str(path.relative_to(base)): path for paths in found for path in paths}
        return None

    def lacking(self, place: Path) -> str | None:
        """Return which folder has files of some of the patterns, and what it lacks."""
        for folder in self.folders:
            absent = [pattern for pattern in self.patterns if not any((place / folder).glob(pattern))]
            if 0 < len(absent) < len(self.patterns):
                return f"{place / folder} lacks {', '.join(absent)}"
        return None

    def decode(self, files: Mapping[str, Path]) -> DecodedData:
        """Read the files."""
        return self.read(files)


def _present(path: Path) -> Path | None:
    """Return the file, or the one compressed by gzip beside it."""
    return next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)


def _plain(path: Path) -> bytes:
    """Return a file's content, unpacked where it is compressed by gzip."""
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is no gzip file, or is damaged: {error}") from error
