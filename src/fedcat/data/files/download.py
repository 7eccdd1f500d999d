"""Downloads of published files with pooch, verified before they get their names."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcat.core.files import replacing
from fedcat.data.files.checksum import Checksum
from fedcat.data.files.notices import show_download
from fedcat.version import __version__

if TYPE_CHECKING:
    from requests import RequestException

ATTEMPTS = 3
"""Attempts per URL after server errors and broken connections."""
PAUSE = 1.0
"""Seconds before the second attempt; the pause doubles each time."""
TIMEOUT = 30.0
"""Seconds without data after which a connection counts as broken."""
CHUNK = 1 << 18
"""Bytes after which the progress bar moves."""
HEADERS = {"User-Agent": f"fedcat/{__version__}", "Accept-Encoding": "identity"}


class DownloadError(Exception):
    """A file could not be downloaded; the message says why."""


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
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    reasons = []
    for address in addresses:
        try:
            _fetch_from(address, target, checksum)
        except DownloadError as error:
            reasons.append(str(error))
        else:
            return
    raise DownloadError("; ".join(reasons))


def _fetch_from(address: str, target: Path, checksum: Checksum) -> None:
    """Download one URL; try again after errors that may pass."""
    try:
        from pooch import HTTPDownloader
        from requests import RequestException
    except ImportError as error:
        raise DownloadError(f"downloads need {error.name}: pip install pooch") from error
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with replacing(target) as temporary, show_download(target.name) as bar:
                HTTPDownloader(bar, CHUNK, timeout=TIMEOUT, headers=HEADERS)(address, str(temporary), None)
                wrong = checksum.of_file(temporary)
                if wrong is not None:
                    raise DownloadError(f"the file from {address} {wrong}")
            return
        except RequestException as error:
            if attempt == ATTEMPTS or not _may_pass(error):
                raise DownloadError(f"{address}: {_reason(error)}") from error
        except OSError as error:
            raise DownloadError(f"{target} cannot be written: {error.strerror or error}") from error
        time.sleep(PAUSE * 2 ** (attempt - 1))


def _may_pass(error: RequestException) -> bool:
    """Return whether another attempt may succeed: after a server's error, or if a transfer broke off or stalled."""
    from requests.exceptions import ChunkedEncodingError, ReadTimeout
    from urllib3.exceptions import ReadTimeoutError

    if error.response is not None:
        return error.response.status_code >= 500 or error.response.status_code == 429
    return isinstance(error, ChunkedEncodingError | ReadTimeout) or isinstance(error.__context__, ReadTimeoutError)


def _reason(error: BaseException) -> str:
    """Return the server's answer, or the first error of the chain that led to this one."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server returned {response.status_code} {response.reason}"
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__
