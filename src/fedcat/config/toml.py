"""Settings files: reading TOML, and writing it.

The writer is our own: settings are flat tables, and no TOML writer is among the packages that a machine with PyTorch
usually has.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcat.core.errors import SettingError


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a settings file; names and values are checked by `resolve`."""
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
        _check_integers(found)
        return found
    except FileNotFoundError as error:
        raise SettingError(f"settings file {str(path)!r} does not exist") from error
    except OSError as error:
        folder = isinstance(error, (IsADirectoryError, PermissionError)) and (path / "settings.toml").is_file()
        hint = f", use {str(path / 'settings.toml')!r}" if folder else ""
        raise SettingError(f"settings file {str(path)!r} cannot be read: {error.strerror}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise SettingError(f"settings file {str(path)!r} is not valid TOML: {error}") from error


def _check_integers(value: Any) -> None:
    """Raise a ValueError for an integer of more than 64 bits, which TOML does not know and which cannot be printed."""
    if isinstance(value, int) and abs(value) >= 2**64:
        raise ValueError("an integer has more than 64 bits")
    for entry in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(entry)


def toml(values: Mapping[str, Any]) -> str:
    """Return settings by name as the text of a TOML file; values that are None are left out.

    Tables come last. Those in `options` hold the options of one method each.
    """
    plain = {name: value for name, value in values.items() if not isinstance(value, Mapping)}
    tables = {name: value for name, value in values.items() if isinstance(value, Mapping) and name != "options"}
    tables = {name: table for name, table in tables.items() if table}
    tables |= {f"options.{_key(method)}": table for method, table in values.get("options", {}).items()}
    lines = _lines(plain)
    for title, table in tables.items():
        lines += ["", f"[{title}]", *_lines(table)]
    return "\n".join(lines) + "\n"


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {_value(value)}" for name, value in table.items() if value is not None]


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
