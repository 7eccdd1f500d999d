"""Command-line options made from the settings: one definition serves every command."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fedcat.config.layers import option_settings
from fedcat.config.settings import DATA, LOCAL, SERVER, TABLES, Settings, value_type
from fedcat.core.errors import SettingError
from fedcat.core.options import Typed, declarations, options
from fedcat.core.registry import Registry
from fedcat.data.partitions import PARTITIONS
from fedcat.methods.aggregation import AGGREGATORS
from fedcat.methods.server_optimizer import SERVER_OPTIMIZERS
from fedcat.protocol.local_optimizer import OPTIMIZERS


class _UntypedHelp:
    """Lists ``--help`` without a type."""

    def get_help_option(self, ctx: Any) -> Any:
        """Return the option, with a blank in the place of its type."""
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = " "
        return option


class Command(_UntypedHelp, TyperCommand):
    """A command."""


class Group(_UntypedHelp, TyperGroup):
    """A group of commands."""


PARTS: dict[str, tuple[Registry[Any], str]] = {
    "partition_options": (PARTITIONS, DATA),
    "optimizer_options": (OPTIMIZERS, LOCAL),
    "aggregator_options": (AGGREGATORS, SERVER),
    "server_options": (SERVER_OPTIMIZERS, SERVER),
}
"""The parts whose options are flags of their own, by their table, and the panels that show them."""


def _table_option(flags: tuple[str, ...], help: str) -> Any:
    return Annotated[list[str] | None, typer.Option(*flags, metavar="NAME=VALUE", help=f"{help}; repeatable")]


MethodOptions = _table_option(
    ("--option", "-o"),
    "option of the method, such as epsilon=0.5; METHOD.NAME=VALUE: of this method alone, also its optimizer, lr, "
    "momentum, weight_decay, clip, epochs, batch_size or average, such as scaffold.clip=10",
)
Trust = Annotated[
    bool,
    typer.Option(
        "--trust", metavar=" ", help="import what the settings file names as module:attribute, which runs its code"
    ),
]
DatasetOptions = _table_option(("--dataset-option", "-d"), "option of the dataset, such as labels=fine")
PartitionOptions = _table_option(("--partition-option", "-p"), "option of the partition; built-in ones are also flags")
OptimizerOptions = _table_option(
    ("--optimizer-option",), "option of the local optimizer; those of adam and adamw are also flags"
)
AggregatorOptions = _table_option(("--aggregator-option",), "option of the aggregator; built-in ones are also flags")
ServerOptions = _table_option(("--server-option", "-s"), "option of the server optimizer; built-in ones are also flags")


def method_tables(texts: list[str] | None) -> dict[str, Any]:
    """Return options of the methods that take them, and those of single methods, which were typed as METHOD.NAME."""
    typed = assignments("option", texts, "NAME=VALUE or METHOD.NAME=VALUE")
    plain: dict[str, Any] = {name: value for name, value in typed.items() if "." not in name}
    single: dict[str, dict[str, Any]] = {}
    for name, value in typed.items():
        method, dot, option = name.rpartition(".")
        if dot and option in plain:
            raise SettingError(f"option must set {option} only once, got {option} and {name}")
        if dot:
            single.setdefault(method, {})[option] = value
    return {name: table for name, table in (("method_options", plain), ("options", single)) if table}


def with_settings(
    *, without: tuple[str, ...] = (), only: tuple[str, ...] | None = None, defaults: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for every setting, or for the named ones.

    With `defaults`, the help shows them; a command whose settings come from elsewhere has none.
    The command is called with a keyword ``given``: a mapping of the settings that the user typed.
    """
    names = [f.name for f in fields(Settings) if f.name not in TABLES]
    shown = [n for n in (*names, *option_settings()) if n not in without and (only is None or n in only)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in inspect.signature(command, eval_str=True).parameters.values() if p.name != "given"]
        added = [_parameter(name, defaults) for name in shown]

        @wraps(command)
        def called(**values: Any) -> None:
            typed = {p.name: values.pop(p.name) for p in added}
            lists = {name: ",".join(value) for name, value in typed.items() if isinstance(value, list) and value}
            plain = {name: value for name, value in typed.items() if value is not None and not isinstance(value, list)}
            given = {n: Typed(v) if isinstance(v, str) else v for n, v in {**plain, **lists}.items()}
            command(given=given, **values)

        parameters = [*own, *added]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {p.name: p.annotation for p in parameters}
        return called

    return decorate


def _parameter(name: str, defaults: bool) -> inspect.Parameter:
    """Return the parameter from which typer makes a setting's option."""
    flag = "--" + name.replace("_", "-")
    if name in option_settings():
        table, option, _ = option_settings()[name]
        help, panel = _option_help(table, option), PARTS[table][1]
        metavar = "NAME" if option_settings()[name][2] is str else "NUMBER"
    else:
        found = Settings.__dataclass_fields__[name]
        help, panel = found.metadata["help"], found.metadata["panel"]
        kind = value_type(name)
        metavar = found.metadata["metavar"] or ("NAME" if kind is str else "A,B" if kind is list else "NUMBER")
        if kind is bool:
            help += " [off]" if found.default is False else ""
            choice = typer.Option(
                f"{flag}/--no-{flag[2:]}", help=help, metavar=" ", show_default=False, rich_help_panel=panel
            )
            return _keyword(name, bool | None, choice)
        if defaults and kind is not list and found.default not in (None, ""):
            help += f" [{found.default}]"
    made = typer.Option(flag, help=help, metavar=metavar, show_default=False, rich_help_panel=panel)
    return _keyword(name, list[str] | None if metavar == "A,B" else str | None, made)


def _keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _option_help(table: str, option: str) -> str:
    """Return the help of an option that several parts declare, with their defaults."""
    registry, _ = PARTS[table]
    parts = {part: registry.get(part) for part, _ in registry if option in options(registry.get(part))}
    defaults: dict[Any, list[str]] = {}
    for part, factory in parts.items():
        defaults.setdefault(options(factory)[option], []).append(part)
    help = next(declarations(factory)[option].help for factory in parts.values())
    if len(defaults) == 1:
        return f"{help} [{next(iter(defaults))}]"
    listed = "; ".join(f"{', '.join(names)}: {value}" for value, names in defaults.items())
    return f"{help} [{listed}]"


def assignments(kind: str, texts: list[str] | None, form: str = "NAME=VALUE") -> dict[str, Typed]:
    """Read texts of the form NAME=VALUE, each name once."""
    found: dict[str, Typed] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise SettingError(f"{kind} must have the form {form}, got {text!r}")
        part, dot, option = name.strip().rpartition(".")
        name = part + dot + option.replace("-", "_")
        if name in found:
            raise SettingError(f"{kind} must set {name} only once")
        found[name] = Typed(value.strip())
    return found
