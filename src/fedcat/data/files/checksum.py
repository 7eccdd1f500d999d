"""Published checksums of files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Checksum:
    """The published digest and size of a file.

    Attributes
    ----------
    algorithm : str
        ``md5`` or ``sha256``.
    digest : str
        The published digest, in hexadecimal.
    size : int, optional
        The number of bytes, if known.
    """

    algorithm: str
    digest: str
    size: int | None = None

    def complaint(self, size: int, digest: str) -> str | None:
        """Return what is wrong with a file of this size and digest, or None."""
        if self.size is not None and size > self.size:
            return f"is larger than the published file, which has {self.size:,} bytes: it is a different file"
        if self.size is not None and size < self.size:
            return f"has {size:,} bytes, but the published file has {self.size:,}: it is truncated or a different file"
        if digest != self.digest:
            return (
                f"has {self.algorithm} {digest}, but the published file has {self.digest}: "
                "it is damaged or a different file"
            )
        return None

    def of_bytes(self, content: bytes) -> str | None:
        """Return what is wrong with this content, or None."""
        return self.complaint(len(content), hashlib.new(self.algorithm, content).hexdigest())

    def of_file(self, path: Path) -> str | None:
        """Return what is wrong with this file, or None."""
        return self.complaint(path.stat().st_size, file_digest(path, self.algorithm))


def file_digest(path: Path, algorithm: str = "sha256") -> str:
    """Return a file's digest in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()
