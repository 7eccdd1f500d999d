"""Makes a simulation's method, with the parts that it is given: the selection and the server's step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedcat.config.schedules import schedule
from fedcat.config.settings import Settings
from fedcat.core.errors import SettingError, unknown
from fedcat.core.options import arguments, plain_options
from fedcat.core.registry import part_label
from fedcat.data.federation import Federation
from fedcat.methods import METHODS, Context, Method, make_method
from fedcat.methods.selection.base import SELECTORS, Selector, from_part
from fedcat.methods.server_optimizer import OPTIONS, ServerChoice
from fedcat.models.layout import Layout


def make_server_side(
    parts: Mapping[str, Any], settings: Settings, federation: Federation, layout: Layout, start: Tensor
) -> tuple[Settings, Method]:
    """Return the method, and the settings with its options' defaults filled in.

    Parameters
    ----------
    parts : mapping
        A user's own objects: `method`, `selector`, `server`.
    settings : Settings
        All settings.
    federation : Federation
        Who holds what.
    layout : Layout
        The net.
    start : Tensor
        The initial global row.
    """
    factory = parts.get("method") or METHODS.get(settings.method)
    given = method_options(settings, factory)
    ready = arguments("method", settings.method, factory, given)
    plain = plain_options(factory)
    if plain or given:
        settings = replace(settings, options={**settings.options, settings.method: {**plain, **given}})
    chosen = {option: getattr(settings, f"server_{option}") for option in OPTIONS}
    chosen = {option: value for option, value in chosen.items() if value is not None}
    context = Context(
        seed=settings.seed,
        layout=layout,
        start=start,
        samples=federation.sizes,
        per_round=settings.k,
        epochs=settings.epochs,
        lr=schedule(settings.lr_schedule, settings.lr, settings.rounds, settings.lr_decay, settings.lr_every),
        selector=_selector(parts.get("selector"), settings, federation),
        server=ServerChoice(settings.server, chosen, parts.get("server")),
        average=settings.average,
        blank=torch.zeros_like(federation.test.inputs(slice(0, 1), layout.dtype), device=layout.device),
        classes=federation.classes,
        exact=bool(settings.exact),
    )
    method = make_method(settings.method, factory, context, ready)
    if settings.average is not None and "average" not in method.models():
        raise SettingError(f"average cannot be set: the method {settings.method!r} keeps no average over rounds")
    return settings, method


def method_options(settings: Settings, factory: Any) -> Any:
    """Return the options of the method in use; a user's class may be called by its own name alone."""
    short = part_label(factory)
    for name in settings.options:
        theirs = ":" in name or name.startswith("<")
        if name not in METHODS and not theirs and name not in (settings.method, short):
            raise unknown("method in options", name, [*(known for known, _ in METHODS), settings.method])
    return settings.options.get(settings.method, settings.options.get(short, {}))


def _selector(part: object | None, settings: Settings, federation: Federation) -> Selector | None:
    if part is None and not settings.selector:
        return None
    found = part if part is not None else SELECTORS.get(settings.selector)
    return from_part(found, settings.seed, federation.sizes, settings.k)
