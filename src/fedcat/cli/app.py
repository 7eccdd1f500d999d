"""The commands, and the lists of parts."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from fedcat.cli import bench, data, listing, plot, reproduce, run
from fedcat.cli.options import (
    Command,
    Group,
)
from fedcat.cli.tables import (
    say,
    show_parts,
    show_registry,
)
from fedcat.config.layers import RENAMED
from fedcat.config.presets import preset, preset_datasets, preset_names
from fedcat.config.toml import toml
from fedcat.core.errors import SettingError
from fedcat.core.options import options
from fedcat.data.augment import AUGMENTATIONS
from fedcat.data.dataset import DATASETS
from fedcat.methods import METHODS
from fedcat.methods.aggregation import AGGREGATORS
from fedcat.methods.selection import SELECTORS
from fedcat.methods.server_optimizer import SERVER_OPTIMIZERS
from fedcat.models.losses import LOSSES
from fedcat.models.metrics import METRICS
from fedcat.models.nets import NETS
from fedcat.protocol.local_optimizer import OPTIMIZERS
from fedcat.version import __version__

app = typer.Typer(
    cls=Group,
    help="Federated learning on skewed data: FedCat and its baselines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command(cls=Command)(run.run)
app.command(cls=Command)(run.compare)
app.command(cls=Command)(run.resume)
app.command("list", cls=Command)(listing.list_runs)
app.add_typer(data.app, name="data")
app.command(cls=Command)(bench.bench)
app.command(cls=Command)(plot.plot)
app.add_typer(reproduce.app, name="reproduce")
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)

WHICH = (
    "Which one? On skewed data fedcat-plus, at 1.5 times FedAvg's traffic. On small, easy data scaffold with --clip 10 "
    "often does as well or better, and where clients hold almost the same classes scaffold does as well, at twice the "
    "traffic. At FedAvg's own traffic fedcross or fedmr, with --average 0.95."
)
"""What the comparison of all methods on the paper's data says (docs/fedcat-plus.md)."""

File = Annotated[Path | None, typer.Argument(help="a TOML settings file; flags override it", show_default=False)]


def _version(asked: bool) -> None:
    if asked:
        out.print(f"fedcat {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, metavar=" ", help="print the version")
    ] = False,
) -> None:
    pass


@app.command("methods", cls=Command)
def list_methods() -> None:
    """List the methods and their options, the selectors, the aggregators and the server optimizers."""
    show_parts(out, METHODS)
    out.print()
    say(out, WHICH)
    out.print()
    show_registry(out, SELECTORS)
    out.print()
    show_parts(out, AGGREGATORS)
    out.print()
    show_parts(out, SERVER_OPTIMIZERS)


@app.command("training", cls=Command)
def list_training() -> None:
    """List what clients train with: the losses, the local optimizers and their options, and the augmentations."""
    show_registry(out, LOSSES)
    out.print()
    show_parts(out, OPTIMIZERS)
    out.print()
    show_registry(out, AUGMENTATIONS)


@app.command("nets", cls=Command)
def list_nets() -> None:
    """List the nets."""
    show_registry(out, NETS)


@app.command("metrics", cls=Command)
def list_metrics() -> None:
    """List the metrics."""
    show_registry(out, METRICS)


@app.command("presets", cls=Command)
def show_presets(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="lab or paper; default: both")] = None,
    dataset: Annotated[
        str | None, typer.Argument(metavar="[DATASET]", help="one of its datasets; default: all")
    ] = None,
) -> None:
    """Print presets as TOML; `fedcat presets lab cifar10 > mine.toml` is a settings file to start from."""
    texts = [
        f"# fedcat presets {one} {each}\n{toml(preset(one, each))}"
        for one in ([name] if name else preset_names())
        for each in ([dataset] if dataset else preset_datasets(one))
    ]
    out.print("\n".join(texts), end="", markup=False, soft_wrap=True)


def main() -> None:
    """Run the command line; a user's mistake ends with one line and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name that the terminal cannot show must not stop a run
    warnings.showwarning = partial(_show_warning, warnings.showwarning)
    try:
        code = app(standalone_mode=False)
    except SettingError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        _fail(f"{str(error.filename)!r}: {error.strerror}")  # such as a name that is too long
    except (KeyboardInterrupt, typer.Abort):
        err.print("interrupted")
        sys.exit(130)
    except Exception as error:
        message = getattr(error, "format_message", None)  # the argument parser's own errors
        if message is None:
            raise
        if not message():  # the help was shown for lack of a command
            sys.exit(2)
        _fail(_flag_hint(error) or message())
    sys.exit(code or 0)


def _flag_hint(error: Exception) -> str:
    """Return what to type instead of an unknown flag, or an empty text if there is nothing to say."""
    flag = str(getattr(error, "option_name", ""))
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    if name in RENAMED:
        return f"option {flag} is now called --{RENAMED[name].replace('_', '-')}"
    for kind, letter, registry in (("method", "o", METHODS), ("dataset", "d", DATASETS)):
        takers = [part for part, _ in registry if name in options(registry.get(part))]
        if takers:
            return f"no such option: {flag}; {name} is an option of the {kind} {takers[0]}: use -{letter} {name}=VALUE"
    return ""


def _show_warning(others: Callable[..., None], message: Warning | str, kind: Any, file: str, *where: Any) -> None:
    """Print fedcat's own warnings as lines without source locations, and others as they are."""
    if Path(file).is_relative_to(Path(__file__).parents[1]):
        say(err, f"note: {message}")
    else:
        others(message, kind, file, *where)


def _fail(message: str) -> NoReturn:
    say(err, f"error: {message}")
    sys.exit(2)
