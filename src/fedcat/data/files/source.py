"""A published dataset: found in a folder or downloaded, verified, decoded."""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedcat.core.errors import DataError
from fedcat.data.files.cache import DecodedData, load_or_decode
from fedcat.data.files.checksum import Checksum
from fedcat.data.files.download import DownloadError, fetch
from fedcat.data.files.file_layouts import FileLayout
from fedcat.data.files.locations import VARIABLE, places
from fedcat.data.files.notices import notify


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
    forms: Sequence[FileLayout]
    folder: str
    remotes: Sequence[Remote]
    by_hand: str
    before: Callable[[], None] = field(default=lambda: None)

    def find(self, data_dir: str | Path | None = None) -> tuple[FileLayout, dict[str, Path]] | None:
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

    def get(self, data_dir: str | Path | None = None) -> tuple[FileLayout, dict[str, Path]]:
        """Return the form and the files of this dataset, downloaded where they are nowhere."""
        found = self.find(data_dir)
        if found is not None:
            return found
        looked = places(data_dir)
        gaps = self._gaps(looked)
        try:
            if gaps:
                notify(f"note: {gaps}")
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

    def content(self, data_dir: str | Path | None = None) -> DecodedData:
        """Return the decoded dataset; downloaded where it is nowhere, kept prepared for the next time."""
        form, files = self.get(data_dir)
        with _readable():
            return load_or_decode(self.name, files, lambda: self._decoded(form, files))

    def _decoded(self, form: FileLayout, files: Mapping[str, Path]) -> DecodedData:
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
