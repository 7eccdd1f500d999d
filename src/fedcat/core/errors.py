"""What a user is told when a setting cannot be used."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


class SettingError(ValueError):
    """A setting that cannot be used; the message names it, its value and what would be right."""


def need(
    name: str, value: float, least: float, most: float = math.inf, *, above: bool = False, below: bool = False
) -> None:
    """Raise where an option is not a finite number between two bounds; `above` and `below` leave the bounds out."""
    holds = (value > least if above else value >= least) and (value < most if below else value <= most)
    if holds and math.isfinite(value):
        return
    right = f"> {least:g}" if above else f"at least {least:g}"
    right += " and finite" if most == math.inf else f" and {'below' if below else 'at most'} {most:g}"
    raise SettingError(f"{name} must be {right}, got {value:g}")


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
