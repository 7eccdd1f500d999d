"""Registries of named parts: methods, datasets, nets, selectors. Users name theirs ``package.module:attribute``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from fedcat.core.errors import SettingError, unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """A registry of named parts of one kind."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._parts: dict[str, T] = {}
        self._notes: dict[str, str] = {}

    def add(self, name: str, part: T, note: str = "") -> None:
        """Register `part` under `name`; `note` is its description in listings."""
        if name in self._parts:
            raise SettingError(f"{self.kind} {name!r} is already registered: choose another name")
        self._parts[name] = part
        self._notes[name] = note

    def register(self, name: str, note: str = "") -> Callable[[T], T]:
        """Return a decorator that registers the decorated object under `name`."""

        def enter(part: T) -> T:
            self.add(name, part, note)
            return part

        return enter

    def get(self, name: str) -> T:
        """Return the part registered under `name`, or import it if `name` has the form ``module:attribute``."""
        if not isinstance(name, str):
            raise SettingError(f"{self.kind} must be a string, got {name!r}")
        if name in self._parts:
            return self._parts[name]
        if ":" in name:
            return self._load(name)
        if name.startswith("<"):
            raise SettingError(
                f"{self.kind} {name!r} was passed as a Python object, which a file cannot refer to: pass it from "
                "Python again, or name it as module:attribute"
            )
        raise unknown_name(self.kind, name, self._parts)

    def _load(self, name: str) -> T:
        module_name, _, attribute = name.partition(":")
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)  # last: a file here must not hide an installed module
        try:
            if module_name.startswith("."):
                raise ImportError("the name of a module must not begin with a dot")
            found: object = importlib.import_module(module_name)
            for part in attribute.split("."):
                found = getattr(found, part)
                if isinstance(found, ModuleType):
                    raise AttributeError(f"{part!r} is a module that {module_name!r} imports")
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingError(f"{self.kind} {name!r} cannot be imported as module:attribute: {error}") from error
        return found  # type: ignore[return-value]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Yield (name, note) pairs in alphabetical order."""
        return iter(sorted(self._notes.items()))

    def __contains__(self, name: str) -> bool:
        return name in self._parts


def name_of(part: Any) -> str:
    """Return the name under which a part stands in the settings."""
    return part if isinstance(part, str) else import_path(part) or f"<{label_of(part)}>"


def accepts_call(function: Callable[..., Any], *arguments: object, **named: object) -> bool:
    """Return whether `function` can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments, **named)
    except (TypeError, ValueError):
        return False
    return True


def import_path(part: object) -> str | None:
    """Return the ``module:attribute`` name under which `part` can be imported, or None if it cannot."""
    module = getattr(part, "__module__", None)
    qualname = getattr(part, "__qualname__", None)
    if not module or not qualname or module == "__main__" or "<" in qualname:
        return None
    return f"{module}:{qualname}"


def label_of(part: object) -> str:
    """Return a display name for a user-defined object."""
    inner = getattr(part, "func", part)
    name = getattr(part, "name", None) or getattr(inner, "__name__", None) or type(part).__name__
    return str(name).strip("<>")
