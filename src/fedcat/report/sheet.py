"""Tables of text, which a terminal and a page show alike."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH = 150
"""Characters in a line of a page."""


@dataclass(frozen=True)
class Sheet:
    """A table of text.

    Attributes
    ----------
    title : str
        The heading.
    columns : sequence of str
        The headings of the columns; the first is of the rows' names.
    rows : sequence of sequence of str
        The cells.
    notes : sequence of str
        What a reader must know, one paragraph each.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = field(default_factory=tuple)

    def markdown(self, level: int = 2) -> str:
        """Return the table as Markdown, under a heading of this level."""
        lines = [f"{'#' * level} {self.title}", ""]
        for note in self.notes:
            lines += [wrapped(note), ""]
        lines += [_line(self.columns), _line(["---"] * len(self.columns))]
        return "\n".join([*lines, *(_line(row) for row in self.rows), ""])


def wrapped(text: str, indent: str = "") -> str:
    """Return a paragraph in lines that a page can hold; those after the first are indented."""
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
