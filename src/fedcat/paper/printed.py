"""The numbers that the paper prints."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources


@cache
def _tables() -> dict[tuple[str, float | None, str], float]:
    text = resources.files("fedcat.paper").joinpath("printed.toml").read_text(encoding="utf-8")
    rows = [row for table in tomllib.loads(text).values() for row in table]
    return {
        (row["dataset"], row.get("alpha"), method): value
        for row in rows
        for method, value in row.items()
        if method not in ("dataset", "alpha")
    }


def printed(dataset: str, alpha: float | None, method: str) -> float | None:
    """Return the test accuracy in % that the paper prints, or None if it has no such cell."""
    return _tables().get((dataset, alpha, method))
