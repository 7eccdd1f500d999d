"""Errors that tell a user which setting is wrong and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MANY = 12
"""More names than this are not listed beside a close match."""


class SettingError(ValueError):
    """A setting that cannot be used; the message names it, its value and what would be right."""


class DataError(SettingError):
    """Data that is missing, damaged or in the wrong format; the message names the file."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> SettingError:
    """Build the error for a name that is not registered, with the closest name that is.

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
    close = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.6)
    hint = f"did you mean {lower[close[0]]!r}?" if close else ""
    if close and len(names) > MANY:
        return SettingError(f"unknown {kind} {name!r}: {hint}")
    return SettingError(f"unknown {kind} {name!r}: {hint}{' ' if hint else ''}available: {', '.join(names) or 'none'}")
