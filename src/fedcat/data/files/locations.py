"""Where data lies: a folder that is named, FEDCAT_DATA, the user's cache folder."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from fedcat.core.errors import DataError

VARIABLE = "FEDCAT_DATA"


def cache() -> Path:
    """Return the folder of this user in which downloads and prepared copies are kept; it need not exist."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = _home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache")
    return base / "fedcat"


def expand_user(text: str | Path) -> Path:
    """Return a path with a leading ~ replaced by the user's folder, where there is such a user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry, as in some containers
        return Path(tempfile.gettempdir())


def places(data_dir: str | Path | None = None, *, must_exist: bool = True) -> list[Path]:
    """Return the folders in which data is looked for, in their order; downloads go to the first.

    Parameters
    ----------
    data_dir : path, optional
        A folder that the user named for this run.
    must_exist : bool
        Whether a folder that the user named must be there; the cache folder never needs to.
    """
    named = [("data_dir", str(data_dir or "")), (VARIABLE, os.environ.get(VARIABLE, ""))]
    found = []
    for setting, text in named:
        if text:
            path = expand_user(text)
            if must_exist and not path.is_dir():
                raise DataError(f"{setting} must name a folder that is there, got {text!r}")
            found.append(path)
    return list(dict.fromkeys([*found, cache()]))
