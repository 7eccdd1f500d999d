"""The command line's options, made of the settings: one definition serves every command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from fedcat.config.settings import Settings, parse
from fedcat.core.errors import SettingError, unknown
from fedcat.data.dataset import DATASETS, dataset_options

_PANELS = {
    "data": ("dataset", "data_dir", "partition", "alpha", "shards", "min_samples", "partition_tries", "data_seed"),
    "method": ("preset", "method", "devices", "fraction", "per_round", "rounds", "selector", "bound"),
    "server": ("server", "server_lr", "server_momentum", "server_beta2", "server_tau", "average"),
    "local training": ("net", "epochs", "batch_size", "lr", "momentum", "weight_decay", "clip"),
    "step size over rounds": ("lr_schedule", "lr_decay", "lr_every"),
    "evaluation": ("evaluate_every", "evaluate", "per_device"),
    "machine": ("seed", "engine", "device", "dtype", "precision", "memory", "exact", "threads", "workers"),
}


def with_settings(
    *, without: tuple[str, ...] = (), only: tuple[str, ...] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for every setting, or for those that are named.

    The command is called with a keyword ``given``: a mapping of the settings that the user named.
    """
    hidden = (*without, "options", "dataset_options")
    names = [f.name for f in fields(Settings) if f.name not in hidden and (only is None or f.name in only)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        added = [_parameter(name) for name in names]

        @wraps(command)
        def called(**values: Any) -> None:
            given = {p.name: values.pop(p.name) for p in added}
            command(given={n: _value(n, v) for n, v in given.items() if v is not None and v != []}, **values)

        parameters = [*own, *added]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    found = next(f for f in fields(Settings) if f.name == name)
    hint = get_type_hints(Settings)[name]
    flag = "--" + name.replace("_", "-")
    help = found.metadata["help"]
    panel = next(panel for panel, names in _PANELS.items() if name in names)
    kind: Any
    if hint in (bool, bool | None):
        help += " [off]" if found.default is False else ""
        kind, flags, metavar = bool | None, [f"{flag}/--no-{flag[2:]}"], None
    elif hint == list[str]:
        kind, flags, metavar = list[str] | None, [flag], "A,B"
    else:
        if found.default not in (None, ""):
            help += f" [{found.default}]"
        kind, flags, metavar = str | None, [flag], "NAME" if hint is str else "NUMBER"
    option = typer.Option(*flags, help=help, metavar=metavar, show_default=False, rich_help_panel=panel)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _value(name: str, given: Any) -> Any:
    if isinstance(given, list):
        return [part.strip() for text in given for part in text.split(",")]
    return parse(name, given) if isinstance(given, str) else given


def assignments(kind: str, texts: list[str], form: str = "NAME=VALUE") -> dict[str, str]:
    """Read texts of the form NAME=VALUE, each name once."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise SettingError(f"{kind} must be written {form}, got {text!r}")
        name = name.strip().replace("-", "_")
        if name in found:
            raise SettingError(f"{kind} must name {name} once, got it twice")
        found[name] = value.strip()
    return found


def dataset_table(datasets: Sequence[str], stored: Any, texts: list[str]) -> Any:
    """Return the datasets' options of a settings file with those of the command line."""
    named = assignments("dataset-option", texts)
    if not named:
        return stored
    if not isinstance(stored, Mapping):
        raise SettingError(f"dataset_options must be a table of options, got {stored!r}")
    known = {name: value for one in datasets for name, value in dataset_options(DATASETS.get(one)).items()}
    dataset = ", ".join(datasets)
    for name in named:
        if not known:
            raise SettingError(f"dataset {dataset} has no options, got {name!r}")
        if name not in known:
            raise unknown(f"option of dataset {dataset}", name, known)
    return {**stored, **{name: typed(name, text, known[name]) for name, text in named.items()}}


def typed(name: str, text: str, default: Any) -> Any:
    """Read an option's value from the text that a user typed; where the default is a text it stays one."""
    return text if isinstance(default, str) else parse(name, text)
