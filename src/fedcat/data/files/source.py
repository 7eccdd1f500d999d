"""A published dataset: found on disk or downloaded, verified, decoded."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedcat.core.errors import DataError
from fedcat.core.text import visible
from fedcat.data.files.cache import DecodedData, load_or_decode
from fedcat.data.files.checksum import Checksum
from fedcat.data.files.download import DownloadError, fetch
from fedcat.data.files.file_layouts import FileLayout
from fedcat.data.files.locations import VARIABLE, search_paths
from fedcat.data.files.notices import notify


@dataclass(frozen=True)
class Remote:
    """A file that can be downloaded.

    Attributes
    ----------
    name : str
        The file name.
    addresses : sequence of str
        Its URLs, in order of preference.
    checksum : Checksum
        The published checksum.
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
    layouts : sequence of FileLayout
        The layouts in which its files may be stored, in order of preference.
    folder : str
        The subdirectory to download to.
    remotes : sequence of Remote
        The files to download.
    by_hand : str
        A description of the files that a user without network access must provide.
    before : callable
        Called before a download; raises if the files to download could not be read.
    """

    name: str
    layouts: Sequence[FileLayout]
    folder: str
    remotes: Sequence[Remote]
    by_hand: str
    before: Callable[[], None] = field(default=lambda: None)

    def find(self, data_dir: str | Path | None = None) -> tuple[FileLayout, dict[str, Path]] | None:
        """Return the layout and the files from the first search path that has them, or None."""
        for base in search_paths(data_dir):
            for layout in self.layouts:
                try:
                    files = layout.find(base)
                except OSError:  # an unreadable directory
                    files = None
                if files is not None:
                    return layout, files
        return None

    def get(self, data_dir: str | Path | None = None) -> tuple[FileLayout, dict[str, Path]]:
        """Return the layout and the files; download them if they are not found."""
        found = self.find(data_dir)
        if found is not None:
            return found
        searched = search_paths(data_dir)
        if not searched:
            raise DataError(
                f"dataset {self.name!r} cannot be downloaded: there is no home directory; "
                f"set --data-dir or {VARIABLE} to a directory for it"
            )
        target = searched[0] / self.folder
        missing = self._missing(searched)
        try:
            if missing:
                notify(f"note: {missing}")
            self.before()
            for remote in self.remotes:
                fetch(remote.addresses, target / remote.name, remote.checksum)
        except (DownloadError, OSError, DataError) as error:
            _remove_empty(target)
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            state = f"is incomplete ({missing})" if missing else f"is not in {' or '.join(map(str, searched))}"
            raise DataError(
                f"dataset {self.name!r} {state} and cannot be downloaded ({reason}); "
                f"put {self.by_hand} into {target} yourself, "
                f"or set --data-dir or {VARIABLE} to a directory that has them"
            ) from error
        found = self.find(data_dir)
        if found is None:
            raise DataError(f"dataset {self.name!r} was downloaded to {target} but is no longer there")
        return found

    def content(self, data_dir: str | Path | None = None) -> DecodedData:
        """Return the decoded dataset; download it if it is not found, and cache the decoded copy."""
        layout, files = self.get(data_dir)
        with _readable():
            return load_or_decode(self.name, files, lambda: self._decode(layout, files))

    def _decode(self, layout: FileLayout, files: Mapping[str, Path]) -> DecodedData:
        try:
            return layout.decode(files)
        except DataError as error:
            advice = f"replace the file, or remove it and run `fedcat data get {self.name}`"
            raise DataError(visible(f"{error}; {advice}")) from error

    def _missing(self, searched: Sequence[Path]) -> str:
        """Return which directories are incomplete, and which files they lack."""
        found = []
        for base in searched:
            for layout in self.layouts:
                with suppress(OSError):
                    found.append(layout.missing(base))
        return "; ".join(filter(None, found))


def _remove_empty(folder: Path) -> None:
    """Remove the directory of a failed download if it is empty."""
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _readable() -> Iterator[None]:
    """Turn errors from reading a file into a `DataError`."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"the archive is damaged: {error}") from error
    except OSError as error:
        where = f"{error.filename} " if error.filename else ""
        raise DataError(f"{where}cannot be read: {error.strerror or error}") from error
