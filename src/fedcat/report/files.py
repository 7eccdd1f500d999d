"""Files of plots."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from fedcat.core.errors import SettingError

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path) -> None:
    """Raise a `SettingError` if a plot cannot be written to `path`."""
    if path.suffix.lower() not in FORMATS:
        raise SettingError(f"the plot's file name must end in {', '.join(FORMATS)}, got {str(path)!r}")
    if not path.parent.is_dir():
        raise SettingError(f"plot {str(path)!r} cannot be written: no directory {str(path.parent)!r}")


def save(figure: Any, path: Path) -> None:
    """Write a figure; raise a `SettingError` if that is not possible."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            figure.savefig(path, dpi=150)
    except OSError as error:
        raise SettingError(f"plot {str(path)!r} cannot be written: {error.strerror}") from error
