"""What a user is told when a setting cannot be used."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SettingError(ValueError):
    """A setting that cannot be used; the message names it, its value and what would be right."""


def unknown(kind: str, name: str, known: Iterable[str]) -> SettingError:
    """Build the error for a name that nobody registered, with the nearest known name.

    Parameters
    ----------
    kind : str
        What the name is a name of, such as ``method``.
    name : str
        The name that was not found.
    known : iterable of str
        The names that exist.
    """
    names = sorted(set(known))
    lower = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.6)
    hint = f"did you mean {lower[close[0]]!r}? " if close else ""
    return SettingError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}")


class DataError(SettingError):
    """Data that is absent, damaged or not what it should be; the message names the file."""
