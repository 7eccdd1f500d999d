"""The engines by name, and the rule that picks one."""

from __future__ import annotations

from dataclasses import dataclass

from fedcat.core.errors import unknown_name
from fedcat.data.pool import Pool
from fedcat.engines.base import Engine
from fedcat.engines.gradients.manual import manual_gradients
from fedcat.engines.sequential import SequentialEngine
from fedcat.engines.stacked import StackedEngine
from fedcat.engines.workers import WorkersEngine, can_fork
from fedcat.models.layout import Layout
from fedcat.models.traits import traits

NAMES = ("auto", "sequential", "stacked")

STACK_BELOW = 5e6
"""Floating-point operations per forward batch below which stacking is faster on a CPU (benchmarks/engines.py)."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine that will train a net.

    Attributes
    ----------
    name : str
        ``sequential`` or ``stacked``.
    reason : str
        Why it was picked.
    forced : bool
        Whether the net leaves no choice; the user should then be told.
    """

    name: str
    reason: str
    forced: bool = False


def pick(
    name: str,
    layout: Layout,
    pool: Pool,
    batch_size: int,
    exact: bool = False,
    plain: bool = True,
    stackable: bool = True,
) -> EngineChoice:
    """Pick the engine that will train a net.

    `plain` means that the loss allows hand-written gradients, `stackable` that the local optimizer is known as algebra
    on rows.

    The rule depends only on the net, the batch size and the type of device, never on timing, so a repeated or resumed
    run picks the same engine.
    """
    if name not in NAMES:
        raise unknown_name("engine", name, NAMES)
    if name == "sequential":
        return EngineChoice(name, "as requested")
    if not stackable:
        return EngineChoice("sequential", "only the optimizers named sgd, adam and adamw can be stacked", forced=True)
    found = traits(layout, pool)
    if found.unstackable:
        return EngineChoice("sequential", f"the net cannot be stacked: {found.unstackable}", forced=True)
    if exact and found.mixes_samples:
        why = "sums over a batch depend on how many nets are stacked, so exact mode trains one net at a time"
        return EngineChoice("sequential", f"the net mixes the samples of a batch: {why}", forced=True)
    if name == "stacked":
        return EngineChoice(name, "as requested")
    if layout.device.type == "cuda":
        return EngineChoice("stacked", "on a GPU, stacking is faster for every net that can be stacked")
    if found.recurrent:
        return EngineChoice("sequential", "recurrent layers: on a CPU, PyTorch's own are faster than stacks of them")
    if plain and manual_gradients(layout, pool, batch_size) is not None:
        return EngineChoice("stacked", "a small chain of layers: on a CPU, stacks of it are batched matrix products")
    work = found.flops * batch_size
    side = "below" if work < STACK_BELOW else "above"
    limit = f"{STACK_BELOW / 1e6:.0f} MFLOP limit for stacking on a CPU"
    reason = f"{work / 1e6:.3g} MFLOP per forward batch, {side} the {limit}"
    return EngineChoice("stacked" if work < STACK_BELOW else "sequential", reason)


def make(
    name: str, exact: bool = False, precision: str = "fp32", memory: float | None = None, workers: int = 1
) -> Engine:
    """Return a new engine; with `workers` > 1, it trains in that many processes."""
    kind = SequentialEngine if name == "sequential" else StackedEngine
    engine = kind(exact, precision, memory)
    return WorkersEngine(engine, workers) if workers > 1 else engine


__all__ = [
    "NAMES",
    "Engine",
    "EngineChoice",
    "SequentialEngine",
    "StackedEngine",
    "WorkersEngine",
    "can_fork",
    "make",
    "pick",
]
