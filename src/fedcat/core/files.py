"""Files that are whole or not there, and directories that one process has."""

from __future__ import annotations

import os
import re
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fedcat.core.errors import SettingError

LOCK = ".lock"
"""The file in a directory that the process holds which writes there."""
TRIES = 5
"""How often a lock is tried: a process that only looks whether there is one holds it for a moment."""
_HELD: set[Path] = set()
"""The directories that this process holds: the operating system would give it a lock twice."""


@contextmanager
def replacing(path: Path, keep: Path | None = None) -> Iterator[Path]:
    """Yield a temporary path in the same directory; it replaces `path` if the block ends without an error.

    It is on the disk before it has its name. What `path` was before becomes `keep`, if one is named.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        yield temporary
        flush(temporary)
        if keep is not None and path.exists():
            path.replace(keep)
        temporary.replace(path)
    finally:
        with suppress(OSError):  # such as a directory that is gone: what went wrong has been raised
            temporary.unlink(missing_ok=True)


def remove_temporary(folder: Path) -> None:
    """Remove the temporary files that killed processes have left in a directory and below it, also safetensors' own."""
    for path in folder.rglob(".*"):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}|\.tmp\w{6}", path.name) and path.is_file():
            path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Wait until a file is on the disk."""
    file = os.open(path, os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def save_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, keep: Path | None = None
) -> None:
    """Write named tensors as safetensors, see `replacing`; they may share memory."""
    with replacing(path, keep) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode  # as of other files: safetensors makes one that only its owner may read
        try:
            save_file({n: t.detach().cpu().contiguous().clone() for n, t in tensors.items()}, temporary, metadata)
        except SafetensorError as error:  # as an error of the operating system, such as a full disk, which it wraps
            raise OSError(re.sub(r".*I/O error: (.*?)( at path.*)?$", r"\1", str(error))) from error
        temporary.chmod(mode)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a directory: raise a `SettingError` if another process does. A process that dies holds nothing."""
    path, mine = folder / LOCK, folder.resolve()
    if mine in _HELD:
        raise SettingError(f"directory {str(folder)!r} is in use by this process: wait for it")
    for left in reversed(range(TRIES)):
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise SettingError(f"directory {str(folder)!r} cannot be written: {error.strerror}") from error
        if _lock(file) and _is(path, file):
            break
        holder = os.pread(file, 200, 0).decode(errors="replace") if hasattr(os, "pread") else ""
        os.close(file)
        if not left:
            raise SettingError(f"directory {str(folder)!r} is in use by {holder or 'another process'}: wait for it")
        time.sleep(0.05)
    try:
        _HELD.add(mine)
        with suppress(OSError):  # a full disk: who holds it is not told
            os.truncate(file, 0)
            os.write(file, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        _HELD.discard(mine)
        with suppress(OSError):
            if _is(path, file):  # not of a process that has made the directory again
                path.unlink()
        os.close(file)


def is_locked(folder: Path) -> bool:
    """Return whether a process holds a directory."""
    if folder.resolve() in _HELD:
        return True
    try:
        file = os.open(folder / LOCK, os.O_RDONLY)  # it may be another user's
    except OSError:
        return False
    try:
        return not _lock(file, alone=False)
    finally:
        os.close(file)


def _is(path: Path, file: int) -> bool:
    """Return whether a path still names an open file: who held it before may have removed it."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def _lock(file: int, alone: bool = True) -> bool:
    """Lock a file, for this process alone or not; processes that are forked from it do not inherit the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt  # type: ignore[unused-ignore]

        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        except OSError:
            return False
        return True
    try:
        fcntl.lockf(file, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
