"""Words for messages."""

from __future__ import annotations

import json
import math
from typing import Any


def plural(count: int, word: str) -> str:
    """Return a number and a noun, with an s unless it is one."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def visible(text: str) -> str:
    r"""Return a text from files with the characters escaped that a terminal would act on, such as ``\x1b``."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return plain values as JSON; numbers that are not finite, which JSON does not know, become null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
