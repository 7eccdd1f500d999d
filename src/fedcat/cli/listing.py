"""The command `fedcat list`: the runs of a directory, how they ended and what they reached."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fedcat.cli.tables import say
from fedcat.core.errors import SettingError
from fedcat.core.text import visible
from fedcat.runs.listing import Listed, find_runs, listed

out = Console(highlight=False, markup=False)


def list_runs(
    folder: Annotated[Path, typer.Argument(metavar="[DIRECTORY]", help="where to look, also in comparisons")] = Path(
        "runs"
    ),
) -> None:
    """List the runs in a directory: status, rounds, accuracy.

    A run that is `running` is held by a process. One that is `killed` has no process and did not end: `fedcat resume`
    lets it go on, as it does with those that were `interrupted`, `stopped` or `failed`.
    """
    if not folder.is_dir():
        raise SettingError(f"directory {str(folder)!r} does not exist")
    lines = [listed(path) for path in find_runs(folder)]
    if not lines:
        say(out, f"no runs in {folder}")
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in ("run", "status", "rounds", "metric", "last", "best"):
        table.add_column(heading, justify="right" if heading in ("rounds", "last", "best") else "left")
    for line in lines:
        rounds = f"{line.rounds}/{line.planned}" if line.planned else ""
        table.add_row(_name(line, folder), visible(line.status), rounds, visible(line.metric), line.last, line.best)
    out.print(table)
    for line in lines:
        if line.why:
            say(out, f"{_name(line, folder)}: {visible(line.why)}")


def _name(line: Listed, folder: Path) -> str:
    """Return a run's path below the directory that is listed."""
    return visible(line.path.resolve().name if line.path == folder else str(line.path.relative_to(folder)))
