"""Words for messages."""

from __future__ import annotations


def plural(count: int, word: str) -> str:
    """Return a number and a noun, with an s unless it is one."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def visible(text: str) -> str:
    r"""Return a text from files with the characters escaped that a terminal would act on, such as ``\x1b``."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
