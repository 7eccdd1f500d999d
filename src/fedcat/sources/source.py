"""A published dataset: the forms in which its files may lie in a folder, and where they can be had."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from fedcat.errors import DataError
from fedcat.sources.checksum import Checksum
from fedcat.sources.download import DownloadError, fetch
from fedcat.sources.places import VARIABLE, places
from fedcat.sources.prepared import Content, content_of
from fedcat.sources.telling import tell


class Form(Protocol):
    """One form in which a dataset's files may lie in a folder."""

    verified: ClassVar[bool]
    """Whether there are published checksums to compare the files with."""

    def find(self, place: Path) -> dict[str, Path] | None:
        """Return the files by name where they are all under `place`, else None."""
        ...

    def lacking(self, place: Path) -> str | None:
        """Return which folder under `place` has some of the files, and what it lacks; None where there is no such."""
        ...

    def decode(self, files: Mapping[str, Path]) -> Content:
        """Read and verify the files."""
        ...


@dataclass(frozen=True)
class Files:
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
    read: Callable[[Mapping[str, tuple[bytes, str]]], Content]

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

    def decode(self, files: Mapping[str, Path]) -> Content:
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
class Archive:
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
    read: Callable[[tarfile.TarFile, str], Content]

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

    def decode(self, files: Mapping[str, Path]) -> Content:
        """Verify the archive and read it."""
        path = files[self.name]
        wrong = self.checksum.of_file(path)
        if wrong is not None:
            raise DataError(f"{path} {wrong}")
        with tarfile.open(path) as archive:
            return self.read(archive, str(path))


@dataclass(frozen=True)
class Globs:
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
    read: Callable[[Mapping[str, Path]], Content]

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

    def decode(self, files: Mapping[str, Path]) -> Content:
        """Read the files."""
        return self.read(files)


@dataclass(frozen=True)
class Remote:
    """A file that can be downloaded.

    Attributes
    ----------
    name : str
        What it is called.
    addresses : sequence of str
        Where it can be had, in the order of preference.
    checksum : Checksum
        What it must be, as it is published.
    """

    name: str
    addresses: Sequence[str]
    checksum: Checksum


@dataclass(frozen=True)
class Source:
    """A published dataset.

    Attributes
    ----------
    name : str
        The dataset's name.
    forms : sequence of Form
        The forms in which it may lie in a folder, in the order of preference.
    folder : str
        The folder under a place to which it is downloaded.
    remotes : sequence of Remote
        What is downloaded.
    by_hand : str
        Which files a user without a network must put into a folder, in words.
    before : callable
        Called before a download; raises where what would be downloaded could not be read.
    """

    name: str
    forms: Sequence[Form]
    folder: str
    remotes: Sequence[Remote]
    by_hand: str
    before: Callable[[], None] = field(default=lambda: None)

    def find(self, data_dir: str | Path | None = None) -> tuple[Form, dict[str, Path]] | None:
        """Return the form and the files of this dataset in the first place that has them, or None."""
        for place in places(data_dir):
            for form in self.forms:
                try:
                    files = form.find(place)
                except OSError:  # a folder that may not be looked into
                    files = None
                if files is not None:
                    return form, files
        return None

    def get(self, data_dir: str | Path | None = None) -> tuple[Form, dict[str, Path]]:
        """Return the form and the files of this dataset, downloaded where they are nowhere."""
        found = self.find(data_dir)
        if found is not None:
            return found
        looked = places(data_dir)
        gaps = self._gaps(looked)
        try:
            if gaps:
                tell(f"note: {gaps}")
            self.before()
            for remote in self.remotes:
                fetch(remote.addresses, looked[0] / self.folder / remote.name, remote.checksum)
        except (DownloadError, OSError, DataError) as error:
            _remove_empty(looked[0] / self.folder)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            where = f"is not whole ({gaps})" if gaps else f"is not in {' or '.join(map(str, looked))}"
            raise DataError(
                f"dataset {self.name!r} {where} and cannot be downloaded ({reason}); "
                f"by hand: put {self.by_hand} into {looked[0] / self.folder}, or name a folder that has them with "
                f"--data-dir or {VARIABLE}"
            ) from error
        found = self.find(data_dir)
        if found is None:
            raise DataError(f"dataset {self.name!r} was downloaded to {looked[0] / self.folder} but is not there now")
        return found

    def content(self, data_dir: str | Path | None = None) -> Content:
        """Return the decoded dataset; downloaded where it is nowhere, kept prepared for the next time."""
        form, files = self.get(data_dir)
        with _readable():
            return content_of(self.name, files, lambda: self._decoded(form, files))

    def _decoded(self, form: Form, files: Mapping[str, Path]) -> Content:
        try:
            return form.decode(files)
        except DataError as error:
            advice = f"put the right one there, or remove it and run `fedcat data get {self.name}`"
            raise DataError(f"{error}; {advice}") from error

    def _gaps(self, looked: Sequence[Path]) -> str:
        """Return what is there in part, and what it lacks."""
        found = []
        for place in looked:
            for form in self.forms:
                with suppress(OSError):
                    found.append(form.lacking(place))
        return "; ".join(filter(None, found))


def _remove_empty(folder: Path) -> None:
    """Remove a folder that a download made and left empty."""
    with suppress(OSError):
        folder.rmdir()


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


@contextmanager
def _readable() -> Iterator[None]:
    """Turn what reading a file can raise into one line about it."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"the archive is damaged: {error}") from error
    except OSError as error:
        where = f"{error.filename} " if error.filename else ""
        raise DataError(f"{where}cannot be read: {error.strerror or error}") from error
