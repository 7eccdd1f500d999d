"""Whether the fused kernels agree with autograd, tested once on the net and the machine."""

from __future__ import annotations

import importlib.util
import math
import warnings
from weakref import WeakKeyDictionary

import torch

from fedcat.core.precision import precision_context
from fedcat.data.pool import Pool
from fedcat.engines.fused.chain import Chain, chain_of
from fedcat.engines.rows import Rows
from fedcat.engines.slab import no_loss_inputs
from fedcat.engines.vmapped import Vmapped
from fedcat.models.layout import Layout
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.task import Task

LIMITS = {"fp32": 0.02, "tf32": 0.2, "bf16": 0.4}
"""Largest difference of the loss and of each tensor's gradient from autograd's in float32, relative to its norm. If two
values of a pooling window are almost equal, either may win, so even full precision differs by more than rounding."""
LARGEST_BATCH = 1024

_found: WeakKeyDictionary[Layout, WeakKeyDictionary[Pool, dict[tuple[int, str], Chain | str]]] = WeakKeyDictionary()


def usable_chain(task: Task, batch: int, precision: str) -> Chain | None:
    """Return the net as a chain of layers, or None if the fused kernels cannot train it."""
    found = _known(task, batch, precision)
    return None if isinstance(found, str) else found


def why_not(task: Task, batch: int, precision: str) -> str:
    """Return why the fused kernels cannot train a net; empty if they can."""
    found = _known(task, batch, precision)
    return found if isinstance(found, str) else ""


def _known(task: Task, batch: int, precision: str) -> Chain | str:
    if task.rule.own_loss:
        return "the method defines its own loss"
    if not task.plain_loss:
        return "the loss is not the cross entropy"
    if task.augment:
        return "its inputs are augmented"
    known = _found.setdefault(task.layout, WeakKeyDictionary()).setdefault(task.pool, {})
    if (batch, precision) not in known:
        known[batch, precision] = _try(task.layout, task.pool, batch, precision)
    return known[batch, precision]


def _try(layout: Layout, pool: Pool, batch: int, precision: str) -> Chain | str:
    if layout.dtype != torch.float32:
        return "its parameters are not float32"
    if batch > LARGEST_BATCH:
        return f"its batches are larger than {LARGEST_BATCH}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    chain = chain_of(layout, pool)
    if isinstance(chain, str):
        return chain
    try:
        distance = _distance(layout, pool, chain, batch, precision)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error from the compiler or the GPU is the reason
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    else:
        if distance <= LIMITS[precision]:
            return chain
        reason = f"its gradients differ from autograd's by {distance:.2g}"
    warnings.warn(f"the fused kernels cannot be used ({reason}): training continues without them", stacklevel=2)
    return reason


def _distance(layout: Layout, pool: Pool, chain: Chain, batch: int, precision: str) -> float:
    """Return the largest relative difference between the kernels and autograd, for two rows on one batch each."""
    from fedcat.engines.fused.program import Program

    generator = torch.Generator().manual_seed(0)
    row = layout.pack(layout.net)
    found = []
    for kind in ("fused", "vmapped"):
        rows = Rows.make(2, layout.parameter_size, 0, 1, batch, like=row)
        noise = torch.rand(2, len(row), generator=generator.manual_seed(0)).to(row)
        rows.p.copy_(row * (0.9 + 0.2 * noise))
        rows.pick.copy_(torch.randint(len(pool), (2, 1, batch), generator=generator))
        rows.pick[0, 0, batch // 2 :] = -1
        rows.count.fill_(1)
        if kind == "fused":
            program: Program | Vmapped = Program(chain, pool, rows, precision)
            program.gradients(0, 2)
        else:
            program = Vmapped(layout, pool, LocalRule(), rows, no_loss_inputs(rows.p), {}, "fp32")
            with precision_context():
                program.gradients(0, 2)
        found.append({**layout.parameter_views(rows.g.clone()), "loss": program.losses.sum(1)})
    fused, plain = found
    norm = torch.linalg.vector_norm
    least = 1e-3 * norm(torch.cat([g.flatten() for g in plain.values()]))
    found_apart = [float(norm(fused[n] - g) / torch.maximum(norm(g), least)) for n, g in plain.items()]
    return max(found_apart) if all(map(math.isfinite, found_apart)) else math.inf
