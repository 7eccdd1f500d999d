"""Where data is searched: the setting data_dir, FEDCAT_DATA, the user's cache directory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedcat.core.errors import DataError

VARIABLE = "FEDCAT_DATA"


def cache_dir() -> Path | None:
    """Return the user's directory for downloads and decoded copies, which need not exist; None without a home."""
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a passwd entry, as in some containers
        return None
    return base / "fedcat"


def expand_user(text: str | Path) -> Path:
    """Return a path with a leading ~ expanded, or unchanged if there is no such user."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        return Path(text)


def search_paths(data_dir: str | Path | None = None, *, must_exist: bool = True) -> list[Path]:
    """Return the directories that are searched for data, in order; downloads go to the first.

    Parameters
    ----------
    data_dir : path, optional
        A directory chosen for this run.
    must_exist : bool
        Whether data_dir and FEDCAT_DATA must exist; the cache directory need not.
    """
    chosen = [("data_dir", str(data_dir or "")), (VARIABLE, os.environ.get(VARIABLE, ""))]
    found = []
    for setting, text in chosen:
        if text:
            path = expand_user(text)
            if must_exist and not path.is_dir():
                raise DataError(f"{setting} must be an existing directory, got {text!r}")
            found.append(path)
    cache = cache_dir()
    return list(dict.fromkeys([*found, *([cache] if cache else [])]))
