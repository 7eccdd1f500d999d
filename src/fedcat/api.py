"""What users call from Python."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcat.config.layers import SettingsFile, untrusted
from fedcat.config.settings import Settings
from fedcat.config.toml import read_toml
from fedcat.core.errors import SettingError, unknown_name
from fedcat.models.nets import NETS, net_builder
from fedcat.runs.build import Builder
from fedcat.runs.callbacks import CallbackPart, check_list
from fedcat.runs.comparison import Comparison
from fedcat.runs.progress import LastingConsole, ProgressDisplay
from fedcat.runs.result import Result
from fedcat.runs.resume import Resumed, build_again, holding
from fedcat.runs.run import Run
from fedcat.runs.run_files import COMPARISON, SETTINGS, model_path, models_in, read_model, read_summary
from fedcat.runs.runner import execute, stored_result
from fedcat.runs.variant_result import VariantResult


def run(
    *,
    settings: str | Path | None = None,
    trust: bool = False,
    out: str | Path | None = None,
    progress: bool = False,
    callbacks: Sequence[CallbackPart] = (),
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
    callbacks : sequence of Callback
        Told of the start, of each round and evaluation, and of the end; they may stop the run. An exception in one
        ends the run, and is raised after what there is has been written.
    **given
        Settings, see `Settings`. `method` may be a `Method` class, `dataset` a `Dataset`, a `Federation` or a function,
        `net` a ``torch.nn.Module`` or a function that makes one, `partition` and `selector` functions,
        `server_optimizer` a `ServerOptimizer` class, and the entries of `metrics` functions. `method_options` are
        options of the method.

    Returns
    -------
    Result
        The history, the model and the summary.
    """
    built = Builder().build(given, SettingsFile.read(settings, trust, given))
    path = None if out is None else Path(out)
    return _run(built, path, progress, check_list(callbacks), hold=path)


def _run(
    built: Run, place: Path | Resumed | None, progress: bool, callbacks: Sequence[CallbackPart], hold: Path | None
) -> Result:
    _warn(built.early_notes, 4)
    shown = [ProgressDisplay(LastingConsole(highlight=False), [built], [built.settings.method])] if progress else []
    result = execute([built], None if place is None else [place], [*shown, *callbacks], hold)[0]
    if result.error is not None:
        raise result.error
    _warn(built.late_notes, 4)
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
    callbacks: Sequence[CallbackPart] = (),
    **given: Any,
) -> list[VariantResult]:
    """Run several methods over several seeds side by side in one engine.

    See `Comparison` for the parameters, and `run` for `progress` and what is issued as a warning. A callback that is an
    object is told of all runs; a class or function makes one for each run. An exception in a callback ends its run with
    a warning, and the others go on.
    """
    comparison = Comparison(methods, seeds, sweep, out, settings, trust, **given)
    return _compare(comparison, progress, check_list(callbacks))


def _compare(comparison: Comparison, progress: bool, callbacks: Sequence[CallbackPart]) -> list[VariantResult]:
    _warn(comparison.notes, 4)
    left = comparison.pending
    labels = [comparison.label_of(run) for run in left]
    shown = [ProgressDisplay(LastingConsole(highlight=False), left, labels)] if progress and left else []
    found = comparison.run([*shown, *callbacks])
    _warn(comparison.late_notes, 4)
    return found


def resume(
    folder: str | Path,
    *,
    trust: bool = False,
    progress: bool = False,
    callbacks: Sequence[CallbackPart] = (),
    **given: Any,
) -> Result | list[VariantResult]:
    """Let a run or a comparison go on from where its last checkpoint has it.

    In exact mode, and on the same machine, it ends with the bits that it would have without the interruption. A run
    that is complete is not run again.

    Parameters
    ----------
    folder : path
        The directory of a run or of a comparison.
    trust : bool
        Whether to import what the directory names as ``module:attribute``, which runs its code.
    progress, callbacks
        See `run`. Callbacks get the state back that callbacks of the same class had.
    **given
        `rounds`, if there shall be more; `checkpoint_every`, `data_dir`, `memory`, `device`, `threads` and `workers`;
        and the parts, such as `net`, that the run was given as Python objects, or whose modules may be imported. For a
        comparison, parts that differ between its runs are given as a list: ``method=[Mine, Other]``.

    Returns
    -------
    Result or list of VariantResult
        What `run` or `compare` would have returned.
    """
    path = Path(folder)
    with holding(path):
        if (path / COMPARISON).exists():
            return _compare(Comparison.resume(path, trust, **given), progress, check_list(callbacks))
        again = build_again(Builder(), path, given, trust)
        if again.complete:
            return stored_result(again)
        return _run(again.run, again, progress, check_list(callbacks), hold=None)


def _warn(notes: Iterable[str], level: int) -> None:
    for note in notes:
        warnings.warn(note, stacklevel=level)


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
    settings = read_toml(path / SETTINGS)
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
    shape, outputs = tuple(summary.input_shape), summary.outputs
    try:
        made = net_builder(net or NETS.get(name), shape, outputs)().to(dtype)
    except (RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, SettingError):
            raise
        why = str(error).splitlines()[0]
        raise SettingError(f"net {name!r} cannot be made for inputs of {shape} and {outputs} outputs: {why}") from error
    return read_model(file, made)
