"""The engines by name, and the rule by which one is picked."""

from __future__ import annotations

from fedcat.core.errors import unknown
from fedcat.data.pool import Pool
from fedcat.engines.base import Engine
from fedcat.engines.chained import chained_of
from fedcat.engines.sequential import SequentialEngine
from fedcat.engines.stacked import StackedEngine
from fedcat.engines.workers import WorkersEngine, can_fork
from fedcat.models.layout import Layout
from fedcat.models.traits import traits

NAMES = ("auto", "sequential", "stacked")

STACK_BELOW = 5e6
"""Floating-point operations of a batch's forward pass below which stacking pays on a CPU (benchmarks/engines.py)."""


def pick(
    name: str, layout: Layout, pool: Pool, batch_size: int, exact: bool = False, by_hand: bool = True
) -> tuple[str, str]:
    """Return the engine that will train a net, and why.

    `by_hand`: precision and loss are those for which gradients can be written out.

    The rule looks at the net, the batch size and the kind of device only, never at a clock, so that a run that is
    repeated or resumed picks the same engine.
    """
    if name not in NAMES:
        raise unknown("engine", name, NAMES)
    if name == "sequential":
        return name, "as asked"
    found = traits(layout, pool)
    if found.unstackable:
        return "sequential", f"the net cannot be stacked: {found.unstackable}"
    if exact and found.mixes_samples:
        reason = "its sums over a batch depend on how many nets are stacked, so that exact mode trains one at a time"
        return "sequential", f"the net mixes the samples of a batch: {reason}"
    if name == "stacked":
        return name, "as asked"
    if layout.device.type == "cuda":
        return "stacked", "on a GPU stacking pays for every net that can be stacked"
    if by_hand and chained_of(layout, pool, batch_size) is not None:
        return "stacked", "a small chain of layers: stacks of it are products of matrices on a CPU"
    work = found.flops * batch_size
    side = "below" if work < STACK_BELOW else "above"
    limit = f"{STACK_BELOW / 1e6:.0f} where stacking stops to pay on a CPU"
    why = f"{work / 1e6:.3g} MFLOP a batch forward, {side} the {limit}"
    return ("stacked" if work < STACK_BELOW else "sequential"), why


def make(
    name: str, exact: bool = False, precision: str = "fp32", memory: float | None = None, workers: int = 1
) -> Engine:
    """Return a new engine; with several workers one that trains in as many processes."""
    kind = SequentialEngine if name == "sequential" else StackedEngine
    engine = kind(exact, precision, memory)
    return WorkersEngine(engine, workers) if workers > 1 else engine


__all__ = ["NAMES", "Engine", "SequentialEngine", "StackedEngine", "WorkersEngine", "can_fork", "make", "pick"]
