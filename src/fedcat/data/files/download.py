"""Fetches files over HTTP: resumed where it broke off, verified before anybody sees it.

What has arrived is kept beside the target as NAME.part until the checksum is right; only then it takes its name.
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
"""How often one address is tried where it answers with a server's error or breaks off without a byte."""
PAUSE = 1.0
"""Seconds before the second attempt; each further pause is twice as long."""
TIMEOUT = 30.0
"""Seconds without a byte after which a connection counts as broken."""
ABANDONED = 10 * TIMEOUT
"""Seconds without a byte after which what a process has fetched counts as left behind."""


class DownloadError(Exception):
    """A file that could not be had; the message says why."""


class _BrokenOffError(Exception):
    """A transfer that ended early; another attempt may go on from there."""


def fetch(addresses: Sequence[str], target: Path, checksum: Checksum) -> None:
    """Download a file to `target`, from the first address that gives the right one.

    Parameters
    ----------
    addresses : sequence of str
        Where the file can be had, in the order of preference.
    target : Path
        Where to put it. It appears there whole and verified, or not at all.
    checksum : Checksum
        What it must be.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _in_turn(target):
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
    """Fill `part` from one address until its checksum is right."""
    failures, most = 0, _size(part)
    while True:
        before = _size(part)
        try:
            _transfer(address, part)
        except _BrokenOffError as error:
            failures = 1 if _size(part) > most else failures + 1
            most = max(most, _size(part))
            if failures == ATTEMPTS:
                raise DownloadError(f"{address}: {error}") from error
            time.sleep(PAUSE * 2 ** (failures - 1))
            continue
        if not part.exists():
            raise DownloadError(f"{address}: another process has taken what was fetched")
        wrong = checksum.of_file(part)
        if wrong is None:
            return
        part.unlink()
        if not before:
            raise DownloadError(f"what {address} gives {wrong}")
        notify(f"what was there of {address.rpartition('/')[2]} did not fit: downloading it anew")


def _transfer(address: str, part: Path) -> None:
    """Append what `part` lacks to it."""
    have = _size(part)
    headers = {"User-Agent": f"fedcat/{__version__}", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT) as answer:
            resumed = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {have}-")
            have = have if resumed else 0
            length = answer.headers.get("Content-Length")
            total = have + int(length) if length else None
            _copy(answer, part, address.rpartition("/")[2], have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing follows what is there: the checksum will tell whether that is the file
            return
        if error.code >= 500 or error.code == 429:
            raise _BrokenOffError(f"the server answers {error.code} {error.reason}") from error
        raise DownloadError(f"{address}: the server answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise DownloadError(f"{address}: {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _BrokenOffError(f"the connection broke ({error or type(error).__name__})") from error


def _copy(answer: IO[bytes], part: Path, name: str, have: int, total: int | None) -> None:
    """Write what arrives after the first `have` bytes of `part`."""
    with _writable(part, "ab" if have else "wb") as file, show_download(name, have, total) as advance:
        while piece := answer.read(CHUNK):
            try:
                file.write(piece)
            except OSError as error:
                raise DownloadError(f"{part} cannot be written: {error.strerror}") from error
            have += len(piece)
            advance(len(piece))
    if total is not None and have < total:
        raise _BrokenOffError(f"the connection broke after {have:,} of {total:,} bytes")


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
    """Give a name beside `target` that is this process's alone, for what has arrived.

    It begins with what an earlier process left: as NAME.part, or under a name of its own if that process has ended, or
    has not written for a while. What is left at the end is NAME.part again.
    """
    left = target.with_name(f"{target.name}.part")
    own = target.with_name(f"{target.name}.{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
    with suppress(OSError):
        _take_over(target, left, own)
    try:
        yield own
    finally:
        if target.exists():
            for stale in [own, left, *_left_behind(target)]:
                stale.unlink(missing_ok=True)
        elif _size(own) > _size(left):
            own.replace(left)
        else:
            own.unlink(missing_ok=True)


def _take_over(target: Path, left: Path, own: Path) -> None:
    """Begin `own` with the largest part that nobody writes to.

    One that its owner closed is renamed, so that one process alone gets it. Another is copied: if its owner should wake
    up after all, it must not write into what has been verified here.
    """
    behind = _left_behind(target)
    largest = max([left, *behind], key=_size)
    if not _size(largest):
        return
    if largest == left:
        left.rename(own)
    else:
        shutil.copyfile(largest, own)
        largest.unlink()


def _left_behind(target: Path) -> list[Path]:
    """Return the parts whose processes have ended, or have not written for a while."""
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
    if sys.platform == "win32":  # where asking would end it
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def _in_turn(target: Path) -> Iterator[None]:
    """Let processes of this machine fetch a file one after another; the later ones then find it there.

    This spares the network only: where locks do not work, each of them downloads into a file of its own.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    path = target.with_name(f".{target.name}.lock")
    told = False
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    notify(f"another process downloads {target.name}: waiting for it")
                told = True
                fcntl.flock(file, fcntl.LOCK_EX)
            except OSError:
                pass
            if not _same(file, path):  # who held it has removed it since
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
