"""What users call from Python."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedcat.core.errors import SettingError, unknown_name
from fedcat.models.nets import NETS, net_builder
from fedcat.runs.build import Builder
from fedcat.runs.comparison import Comparison, VariantResult
from fedcat.runs.folder import SETTINGS, model_path, models_in, read_model, read_summary
from fedcat.runs.runner import OnRound, execute
from fedcat.runs.summary import Result


def run(
    *,
    settings: str | Path | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    **given: Any,
) -> Result:
    """Run one method on one federation.

    Parameters
    ----------
    settings : path, optional
        A settings file, which lies below what is given.
    out : path, optional
        A directory to write the run to; it must be empty or not exist. Without it nothing is written.
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
    prepared = Builder().build(given, settings)
    return execute([prepared], [None if out is None else Path(out)], on_round)[0]


def compare(
    methods: Sequence[Any],
    seeds: int | Sequence[int] = 3,
    sweep: Mapping[str, Sequence[Any]] | None = None,
    *,
    settings: str | Path | None = None,
    out: str | Path | None = None,
    on_round: OnRound | None = None,
    **given: Any,
) -> list[VariantResult]:
    """Run several methods over several seeds side by side in one engine; see `Comparison` for the parameters."""
    return Comparison(methods, seeds, sweep, out, settings, **given).run(on_round)


def load_model(folder: str | Path, net: Any = None, model: str = "global") -> nn.Module:
    """Return the trained net of a run's folder.

    Parameters
    ----------
    folder : path
        The run's folder.
    net : torch.nn.Module or callable, optional
        A net of the kind that was trained, needed where the run's net was an object that cannot be imported.
    model : str
        ``global``, or ``average`` where the run kept an average over rounds.
    """
    path = Path(folder)
    known = models_in(path)
    if known and model not in known:
        raise unknown_name("model", model, known)
    file = model_path(path, model)
    summary = read_summary(path)
    settings = tomllib.loads((path / SETTINGS).read_text(encoding="utf-8"))
    name, dtype = settings["net"], getattr(torch, settings["dtype"])
    if isinstance(net, nn.Module):
        return read_model(file, net.to(dtype))
    if net is None and name not in NETS and ":" not in name:
        raise SettingError(
            f"net {name!r} of this run is not known by name: pass the net as load_model(folder, net=...)"
        )
    shape, classes = tuple(summary["input_shape"]), summary["classes"]
    return read_model(file, net_builder(net or NETS.get(name), shape, classes)().to(dtype))
