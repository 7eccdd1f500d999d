"""What users call from Python."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from fedcat.config.layers import SettingsFile, untrusted
from fedcat.config.settings import Settings
from fedcat.core.errors import SettingError, unknown_name
from fedcat.models.nets import NETS, net_builder
from fedcat.runs.build import Builder, PreparedRun
from fedcat.runs.comparison import Comparison, VariantResult
from fedcat.runs.folder import SETTINGS, model_path, models_in, read_model, read_summary
from fedcat.runs.progress import ProgressDisplay
from fedcat.runs.runner import OnRound, execute
from fedcat.runs.simulation import Record
from fedcat.runs.summary import Result


def run(
    *,
    settings: str | Path | None = None,
    trust: bool = False,
    out: str | Path | None = None,
    progress: bool = False,
    on_round: OnRound | None = None,
    **given: Any,
) -> Result:
    """Run one method on one federation.

    What a user should know, such as a setting without effect or clients whose replies were refused, is issued as a
    warning, and stands in the summary's notes.

    Parameters
    ----------
    settings : path, optional
        A settings file, which lies below what is given.
    trust : bool
        Whether to import what the settings file names as ``module:attribute``, which runs its code.
    out : path, optional
        A directory to write the run to; it must be empty or not exist. Without it nothing is written.
    progress : bool
        Show a progress bar, or lines if there is no terminal.
    on_round : callable, optional
        Called with 0 and each round's `Record` when the round is complete.
    **given
        Settings, see `Settings`. `method` may be a `Method` class, `dataset` a `Dataset`, a `Federation` or a function,
        `net` a ``torch.nn.Module`` or a function that makes one, `partition` and `selector` functions, and
        `server_optimizer` a `ServerOptimizer` class. `method_options` are options of the method.

    Returns
    -------
    Result
        The history, the model and the summary.
    """
    prepared = Builder().build(given, SettingsFile.read(settings, trust, given))
    _warn(prepared.notes)
    with _shown(progress, on_round, [prepared.settings.method], [prepared]) as call:
        result = execute([prepared], [None if out is None else Path(out)], call)[0]
    _warn(result.summary["notes"][len(prepared.notes) :])
    return result


def compare(
    methods: Sequence[Any],
    seeds: int | Sequence[int] = 3,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    *,
    settings: str | Path | None = None,
    trust: bool = False,
    out: str | Path | None = None,
    progress: bool = False,
    on_round: OnRound | None = None,
    **given: Any,
) -> list[VariantResult]:
    """Run several methods over several seeds side by side in one engine.

    See `Comparison` for the parameters, and `run` for `progress`, `on_round` and what is issued as a warning.
    """
    comparison = Comparison(methods, seeds, sweep, out, settings, trust, **given)
    _warn(comparison.notes)
    labels = [label for label in comparison.labels for _ in comparison.seeds]
    with _shown(progress, on_round, labels, comparison.runs) as call:
        found = comparison.run(call)
    _warn(comparison.late_notes(found))
    return found


def _warn(notes: Iterable[str]) -> None:
    for note in notes:
        warnings.warn(note, stacklevel=3)


@contextmanager
def _shown(
    progress: bool, on_round: OnRound | None, labels: list[str], runs: Sequence[PreparedRun]
) -> Iterator[OnRound | None]:
    """Yield what to call after each round: the user's function, and the progress display if one is wanted."""
    if not progress:
        yield on_round
        return
    display = ProgressDisplay(Console(highlight=False), labels, [run.settings.rounds for run in runs])

    def call(position: int, record: Record) -> None:
        display(position, record)
        if on_round is not None:
            on_round(position, record)

    with display:
        yield call


def load_model(folder: str | Path, net: Any = None, model: str = "global", *, trust: bool = False) -> nn.Module:
    """Return the trained net of a run's folder.

    Parameters
    ----------
    folder : path
        The run's folder.
    net : torch.nn.Module, callable or str, optional
        A net of the kind that was trained, needed where the run's net was an object that cannot be imported.
    model : str
        ``global``, or ``average`` where the run kept an average over rounds.
    trust : bool
        Whether to import a net that the folder names as ``module:attribute``, which runs its code.
    """
    path = Path(folder)
    known = models_in(path)
    if known and model not in known:
        raise unknown_name("model", model, known)
    file = model_path(path, model)
    summary = read_summary(path)
    settings = tomllib.loads((path / SETTINGS).read_text(encoding="utf-8"))
    checked = Settings.checked({key: settings.get(key) for key in ("net", "dtype")})
    name, dtype = checked.net, getattr(torch, checked.dtype)
    if isinstance(net, nn.Module):
        return read_model(file, net.to(dtype))
    if isinstance(net, str):
        net = NETS.get(net)
    if net is None and name not in NETS and ":" in name and not trust:
        raise untrusted("net", name, "pass it as load_model(folder, net=...), or say trust=True")
    if net is None and name not in NETS and ":" not in name:
        raise SettingError(
            f"net {name!r} of this run is not known by name: pass the net as load_model(folder, net=...)"
        )
    shape, classes = tuple(summary["input_shape"]), summary["classes"]
    return read_model(file, net_builder(net or NETS.get(name), shape, classes)().to(dtype))
