"""Downloads files over HTTP, with resumption and verification.

Partial data is kept next to the target as NAME.part and renamed once its checksum is right.
"""

from __future__ import annotations

import glob
import http.client
import os
import platform
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from fedcat.data.files.checksum import CHUNK, Checksum
from fedcat.data.files.notices import notify, show_download
from fedcat.version import __version__

ATTEMPTS = 4
"""Attempts per URL after server errors or broken connections without progress."""
PAUSE = 1.0
"""Seconds before the second attempt; the pause doubles each time."""
TIMEOUT = 30.0
"""Seconds without data after which a connection counts as broken."""
ABANDONED = 10 * TIMEOUT
"""Seconds without data after which another process's partial file counts as abandoned."""


class DownloadError(Exception):
    """A file could not be downloaded; the message says why."""


class _InterruptedError(Exception):
    """A transfer ended early; another attempt may resume it."""


def fetch(addresses: Sequence[str], target: Path, checksum: Checksum) -> None:
    """Download a file to `target` from the first URL whose content has the right checksum.

    Parameters
    ----------
    addresses : sequence of str
        The file's URLs, in order of preference.
    target : Path
        Where to store it. The file appears there complete and verified, or not at all.
    checksum : Checksum
        The published checksum.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if target.exists():
            return
        reasons = []
        with _own_part(target) as part:
            for address in addresses:
                try:
                    _fetch_from(address, part, checksum)
                except DownloadError as error:
                    reasons.append(str(error))
                else:
                    part.replace(target)
                    return
        if target.exists():
            return
    raise DownloadError("; ".join(reasons))


def _fetch_from(address: str, part: Path, checksum: Checksum) -> None:
    """Download one URL into `part` until its checksum is right."""
    failures, most = 0, _size(part)
    while True:
        before = _size(part)
        try:
            _transfer(address, part)
        except _InterruptedError as error:
            failures = 1 if _size(part) > most else failures + 1
            most = max(most, _size(part))
            if failures == ATTEMPTS:
                raise DownloadError(f"{address}: {error}") from error
            time.sleep(PAUSE * 2 ** (failures - 1))
            continue
        if not part.exists():
            raise DownloadError(f"{address}: another process took over the partial file")
        wrong = checksum.of_file(part)
        if wrong is None:
            return
        part.unlink()
        if not before:
            raise DownloadError(f"the file from {address} {wrong}")
        notify(f"the partial download of {address.rpartition('/')[2]} had the wrong checksum: downloading it again")


def _transfer(address: str, part: Path) -> None:
    """Append the missing bytes to `part`."""
    have = _size(part)
    headers = {"User-Agent": f"fedcat/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT) as response:
            resumed = response.status == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            have = have if resumed else 0
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else None
            _copy(response, part, address.rpartition("/")[2], have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # no bytes beyond those in `part`: the checksum decides whether it is complete
            return
        if error.code >= 500 or error.code == 429:
            raise _InterruptedError(f"the server returned {error.code} {error.reason}") from error
        raise DownloadError(f"{address}: the server returned {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DownloadError(f"{address}: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _InterruptedError(f"the connection was lost ({error or type(error).__name__})") from error


def _copy(response: IO[bytes], part: Path, name: str, have: int, total: int | None) -> None:
    """Write the response to `part` after its first `have` bytes."""
    with _writable(part, "ab" if have else "wb") as file, show_download(name, have, total) as advance:
        while chunk := response.read(CHUNK):
            try:
                file.write(chunk)
            except OSError as error:
                raise DownloadError(f"{part} cannot be written: {error.strerror}") from error
            have += len(chunk)
            advance(len(chunk))
    if total is not None and have < total:
        raise _InterruptedError(f"the connection was lost after {have:,} of {total:,} bytes")


def _writable(part: Path, mode: str) -> IO[bytes]:
    try:
        file: IO[bytes] = part.open(mode)
    except OSError as error:
        raise DownloadError(f"{part} cannot be written: {error.strerror}") from error
    return file


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _own_part(target: Path) -> Iterator[Path]:
    """Yield a partial file next to `target` that only this process writes to.

    It starts from what an earlier process left: NAME.part, or that process's own partial file if the process has ended
    or has not written for a while. If `target` is not complete at the end, the larger partial file becomes NAME.part.
    """
    left = target.with_name(f"{target.name}.part")
    own = target.with_name(f"{target.name}.{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    with suppress(OSError):
        _take_over(target, left, own)
    try:
        yield own
    finally:
        if target.exists():
            for stale in [own, left, *_abandoned(target)]:
                stale.unlink(missing_ok=True)
        elif _size(own) > _size(left):
            own.replace(left)
        else:
            own.unlink(missing_ok=True)


def _take_over(target: Path, left: Path, own: Path) -> None:
    """Start `own` from the largest partial file that no process writes to.

    NAME.part, which its owner closed, is renamed, so that only one process gets it. Other partial files are copied: if
    the owner resumes after all, it must not write into a file verified here.
    """
    largest = max([left, *_abandoned(target)], key=_size)
    if not _size(largest):
        return
    if largest == left:
        left.rename(own)
    else:
        shutil.copyfile(largest, own)
        largest.unlink()


def _abandoned(target: Path) -> list[Path]:
    """Return the partial files whose processes have ended or have not written for a while."""
    found = []
    for part in target.parent.glob(f"{glob.escape(target.name)}.*-*-*.part"):
        host, _, number = part.name.removeprefix(f"{target.name}.").rpartition("-")[0].rpartition("-")
        with suppress(OSError):
            ended = host == _host() and number.isdecimal() and not _alive(int(number))
            if ended or time.time() - part.stat().st_mtime > ABANDONED:
                found.append(part)
    return found


def _host() -> str:
    return re.sub(r"\W+", "_", platform.node()) or "host"


def _alive(process: int) -> bool:
    if sys.platform == "win32":  # os.kill would terminate the process
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Let processes on this machine download a file one at a time; the others then find it complete.

    This only saves network traffic: without working locks, each process downloads into its own partial file.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    path = target.with_name(f".{target.name}.lock")
    notified = False
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not notified:
                    notify(f"another process is downloading {target.name}: waiting for it")
                notified = True
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass
            if not _same(file, path):  # the previous holder has removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _same(file: IO[str], path: Path) -> bool:
    try:
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except OSError:
        return False
