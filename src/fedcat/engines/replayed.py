"""The stacked engine on a GPU: an arena for each form of launch, and launches split to fit into memory."""

from __future__ import annotations

import gc
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fedcat.core.device import current_device
from fedcat.engines.arena import Arena, Launch
from fedcat.engines.base import Job
from fedcat.engines.fused.chain import Chain
from fedcat.engines.fused.trial import usable_chain, why_not
from fedcat.engines.slab import replies_of
from fedcat.engines.width import FIXED, Width
from fedcat.models.layout import Layout
from fedcat.models.traits import traits
from fedcat.protocol.local_rule import LocalRule
from fedcat.protocol.reply import Reply
from fedcat.protocol.task import Task

KEPT = 4
"""Number of arenas to keep for the next round."""
UNLIMITED = 1_000_000
"""Number of rows that fit if there is no GPU memory to run out of."""
SHARE = 0.9
"""Fraction of the memory to plan with; the rest is a reserve."""
OUTSIDE = 3
"""Copies of all hops' rows that a memory limit must leave room for: their starts, their ends and the averaging."""
LIMIT = 65_535
"""Maximum number of rows of a kernel launch."""


class Replayed:
    """Trains launches on a GPU by replaying captured steps.

    Parameters
    ----------
    exact, precision, memory
        See `Engine`.
    """

    def __init__(self, exact: bool, precision: str, memory: float | None) -> None:
        self.exact, self.precision, self.memory = exact, precision, memory
        self._arenas: OrderedDict[object, tuple[Arena, float]] = OrderedDict()
        self._most: dict[object, int] = {}
        self._kernels: WeakKeyDictionary[Layout, dict[object, str]] = WeakKeyDictionary()
        self.width = Width(FIXED, FIXED) if exact else Width()

    def takes(self, task: Task) -> bool:
        """Return whether launches of a task can be replayed: on a GPU, for nets that do not mix samples."""
        return task.layout.device.type == "cuda" and not traits(task.layout, task.pool).mixes_samples

    def train(self, jobs: list[Job], rules: Sequence[LocalRule]) -> list[Reply]:
        """Train hops that share a net and a loss, given longest first; return the replies in the order of the jobs.

        `rules` are those of the hops, in an order that is the same in every round: memory and graphs depend on it.
        """
        task, hop = jobs[0]
        with current_device(hop.start.device):
            return self._train(task, jobs, rules)

    def _train(self, task: Task, jobs: list[Job], rules: Sequence[LocalRule]) -> list[Reply]:
        task.layout.net.train()
        batch = max(task.padding for task, _ in jobs)
        key = (task.layout, task.pool, task.loss, task.optimizer, task.augment, batch, *rules)
        if key not in self._most:
            self._arenas.clear()
        chain = usable_chain(task, batch, self.precision)
        self._kernels.setdefault(task.layout, {})[task.loss_key] = why_not(task, batch, self.precision)
        if key not in self._most:
            self._most[key] = self._fitting(jobs, rules, chain, batch)
        waiting, done = [jobs], []
        while waiting:
            part = waiting.pop()
            most = self._most[key]
            whole = min(most, FIXED) if self._fill(chain) > 1 else most
            if len(part) > whole:
                pieces = -(-len(part) // whole)
                size = -(-len(part) // pieces)
                waiting += [part[begin : begin + size] for begin in reversed(range(0, len(part), size))]
                continue
            launch = Launch(part, self.width, batch, rules)
            form = launch.form()
            try:
                done.append((launch, *self._arena(launch, form, chain, most).run(launch)))
            except torch.OutOfMemoryError:
                alone = not any(kept != form for kept in self._arenas)
                self._arenas.clear()
                torch.cuda.empty_cache()
                if alone and (len(part) == 1 or self._fill(chain) > 1):
                    raise
                self._most[key] = len(part) // 2 if alone else most
                waiting.append(part)
        return [reply for launch, ends, losses in done for reply in self._replies(launch, ends, losses)]

    def kernels(self, task: Task) -> str:
        """Return a description of what computes a task's steps."""
        reason = self._kernels.get(task.layout, {}).get(task.loss_key, "nothing has been trained yet")
        return f"torch.vmap, replayed: {reason}" if reason else "fused"

    def release(self) -> None:
        """Free the arenas' memory."""
        self._arenas.clear()
        self._most.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _fill(self, chain: Chain | None) -> int:
        """Return the number of rows to pad a launch to; the fused kernels do not depend on it."""
        return FIXED if self.exact and chain is None else 1

    def _arena(self, launch: Launch, form: object, chain: Chain | None, most: int) -> Arena:
        """Return an arena for a launch; evict the least recently used ones if there are too many or memory is short."""
        share = max(len(launch.jobs), self._fill(chain)) / most
        if form not in self._arenas:
            while self._arenas and (len(self._arenas) >= KEPT or self.taken() + share > 1):
                self._arenas.popitem(last=False)
            self._arenas[form] = Arena(launch, chain, self.precision, self.width, self._fill(chain)), share
        self._arenas.move_to_end(form)
        return self._arenas[form][0]

    def taken(self) -> float:
        """Return the fraction of the memory that the arenas take."""
        return sum(share for _, share in self._arenas.values())

    def _replies(self, launch: Launch, ends: Tensor, losses: Tensor) -> list[Reply]:
        means = (losses.cpu().numpy() / launch.counts).tolist()
        found = replies_of(launch.jobs, launch.slabs, ends, launch.counts, means)
        return [reply for _, reply in sorted(zip(launch.place, found, strict=True), key=lambda pair: pair[0])]

    def _fitting(self, jobs: list[Job], rules: Sequence[LocalRule], chain: Chain | None, batch: int) -> int:
        """Return how many rows fit into memory, measured on one row per rule, which takes no step."""
        device = jobs[0][1].start.device
        if device.type != "cuda":
            return UNLIMITED
        few = list({task.rule: (task, hop) for task, hop in reversed(jobs)}.values())
        launch = Launch(few, self.width, batch, rules)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        arena = Arena(launch, chain, self.precision, self.width, self._fill(chain))
        arena.rest()
        row = (torch.cuda.max_memory_allocated(device) - before) / arena.count
        del arena
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        start, outside, room = jobs[0][1].start, 0, float(free)
        if self.memory is not None:
            outside = OUTSIDE * len(jobs) * start.numel() * start.element_size()
            room = min(free, self.memory - before) - outside
        most = int(SHARE * room / row)
        least = self._fill(chain)
        if self.memory is not None and most < least:
            needed = (before + outside + least * row / SHARE) / 1e9
            warnings.warn(
                f"memory {self.memory / 1e9:.3g} GB is too small: the data and {least} rows of this net, the minimum "
                f"that can be trained at a time, take about {needed:.3g} GB",
                stacklevel=2,
            )
        return max(1, min(most, LIMIT))
