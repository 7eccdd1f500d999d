"""The driver: takes any number of runs through their rounds, with or without a barrier."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch

from fedcat.engines.base import Engine
from fedcat.engines.evaluation import Scores, evaluate
from fedcat.methods.base import run_server_work
from fedcat.models.metrics import ClientScores
from fedcat.protocol.hop import Hop, HopId
from fedcat.protocol.reply import Reply, Status
from fedcat.runs.run import Run

T = TypeVar("T")
Name = tuple[str, HopId]
"""Names a hop among all runs."""


class Planned(NamedTuple):
    """A hop that is on its way or waits for its client, and when it is given up."""

    run: Run
    hop: Hop
    deadline: float


class Driver:
    """Plans, submits, collects, absorbs, evaluates and records, until all runs are done.

    Runs that share an engine share its launches. With a barrier, a run's round waits for all of its replies, and the
    next one starts after it is evaluated. Without a barrier, replies are absorbed as they come, and a method may start
    hops of later rounds; the global models, the accuracies and the traffic of each round are the same. After a step,
    hops may be under way that only this driver knows: keep it until the runs are done.

    Parameters
    ----------
    runs : sequence of Run
        The runs; their names must differ.
    barrier : bool
        Whether a round waits for all of its replies before anything else starts.
    deadline : float, optional
        Seconds after which a hop that was planned is given up as late. Bytes that come later are counted.
    """

    def __init__(self, runs: Sequence[Run], barrier: bool = True, deadline: float | None = None) -> None:
        self.runs = {run.name: run for run in runs}
        if len(self.runs) < len(runs):
            raise ValueError(f"runs must have different names, got {sorted(run.name for run in runs)}")
        self.barrier, self.deadline = barrier, deadline
        self._held: dict[Name, Planned] = {}  # their clients are busy
        self._owed: dict[Name, Planned] = {}  # an engine has them
        self._late: dict[Name, Planned] = {}  # an engine has them, but they were given up
        self._dropped: list[Reply] = []  # their simulated clients dropped out, so no engine gets them
        self._started = False

    @property
    def active(self) -> list[Run]:
        """The runs that are not done."""
        return [run for run in self.runs.values() if not run.done]

    def run(self, between: Callable[[], None] | None = None) -> None:
        """Step until all runs are done; `between` is called after every step, and may raise to end them.

        Each run ends, and tells its callbacks, as soon as it is done; if an exception ends the others, they end too.
        Meanwhile Python's garbage collector leaves out what was there before: the modules of PyTorch alone are hundreds
        of thousands of objects, which many short runs would search again and again.
        """
        cause: BaseException | None = None
        gc.freeze()
        try:
            self.start()
            while self.active:
                self.step()
                if between is not None and self.active:
                    between()
        except BaseException as error:
            cause = error
            raise
        finally:
            gc.unfreeze()
            for run in self.runs.values():
                run.end(cause)
            for engine in {run.engine for run in self.runs.values()}:
                engine.forget()

    def start(self) -> None:
        """Tell the callbacks that the runs start, and record what restored ones have completed.

        The first step does so otherwise.
        """
        if not self._started:
            self._started = True
            for run in self.runs.values():
                run.tell("on_start")
            while self._record():
                pass

    def step(self) -> None:
        """Collect replies once from every engine; with a barrier, that is a round of at least one of its runs.

        It is a round of every run if the engine returns all replies at once. A GPU trains many runs as two halves, of
        which each step collects one.
        """
        self.start()
        for engine in dict.fromkeys(run.engine for run in self.active):
            group = [run for run in self.active if run.engine is engine]
            for run in group:
                self._plan(run)
            replies: dict[str, list[Reply]] = {run.name: [] for run in group}
            for reply in self._collect(engine):
                if reply.run in replies:  # a run that was stopped takes no more
                    replies[reply.run].append(reply)
            for run in group:
                if replies[run.name]:
                    _timed(run, partial(run.absorb, replies[run.name]))
            self._work(group)
        while self._record():
            pass

    def _plan(self, run: Run) -> None:
        """Submit the hops of a run that can start now; those of a client that is busy wait for it."""
        hops = _timed(run, partial(run.plan, None if self.barrier else run.rounds))
        end = math.inf if self.deadline is None else time.monotonic() + self.deadline
        for _, hop in hops:
            dropped = run.inbox.dropped(hop, run.name)
            if dropped is None:
                self._submit((run.name, hop.id), Planned(run, hop, end))
            else:
                self._dropped.append(dropped)

    def _submit(self, name: Name, planned: Planned) -> None:
        run, hop, _ = planned
        waits = run.engine.one_per_client and any(
            other.run is run and other.hop.client == hop.client
            for other in (*self._owed.values(), *self._late.values())
        )
        (self._held if waits else self._owed)[name] = planned
        if not waits:
            run.engine.submit([(run.task, hop)])

    def _collect(self, engine: Engine) -> list[Reply]:
        """Return replies that end hops: with a barrier, all that a run's round still waits for; else at least one."""
        replies = [reply for reply in self._dropped if self.runs[reply.run].engine is engine]
        self._dropped = [reply for reply in self._dropped if reply not in replies]
        if not replies and not self._waiting(engine):
            raise RuntimeError("no run has a hop to start: a method waits for replies that are not outstanding")
        while (waiting := self._waiting(engine)) and not self._enough(replies, waiting):
            replies += self._receive(engine)
            for name, planned in list(self._held.items()):
                if planned.run.engine is engine:
                    del self._held[name]
                    self._submit(name, planned)
        return replies

    def _enough(self, replies: Sequence[Reply], waiting: Sequence[Planned]) -> bool:
        """Return whether a step may end: with a barrier, if there are all replies of a run's round."""
        found = {reply.run for reply in replies if reply.run in self.runs and not self.runs[reply.run].done}
        return bool(found - {planned.run.name for planned in waiting} if self.barrier else found)

    def _waiting(self, engine: Engine) -> list[Planned]:
        """Return the hops that the engine owes, and those that wait for their clients."""
        return [planned for planned in (*self._owed.values(), *self._held.values()) if planned.run.engine is engine]

    def _receive(self, engine: Engine) -> list[Reply]:
        """Wait for replies or for the next deadline; a reply that was given up or is repeated ends nothing."""
        first = min(planned.deadline for planned in self._waiting(engine))
        begin = time.perf_counter()
        found = engine.collect(None if math.isinf(first) else max(0.0, first - time.monotonic()))
        self._share(found, time.perf_counter() - begin, engine)
        ended = []
        for reply in found:
            late = self._late.pop((reply.run, reply.hop), None)
            if late is not None:
                late.run.ledger.add_up(late.hop, reply.bytes_up)
            elif self._owed.pop((reply.run, reply.hop), None) is not None:
                ended.append(reply)
        return [*ended, *self._give_up(engine)]

    def _give_up(self, engine: Engine) -> list[Reply]:
        """Return late replies for the hops whose deadline has passed."""
        now, ended = time.monotonic(), []
        for name, (run, hop, deadline) in [*self._owed.items(), *self._held.items()]:
            if deadline > now or run.engine is not engine:
                continue
            if name in self._owed:
                self._late[name] = self._owed.pop(name)
                why = f"no reply within {self.deadline:g} s"
            else:
                del self._held[name]
                run.ledger.never_sent(hop)
                why = f"the client was busy for {self.deadline:g} s"
            ended.append(Reply.lost(hop, Status.LATE, why, run.name))
        return ended

    def _share(self, replies: Sequence[Reply], elapsed: float, engine: Engine) -> None:
        """Add the time of a launch to the runs that were in it, in proportion to the time of their hops."""
        shares = {run: 0.0 for run in self.active if run.engine is engine}
        for reply in replies:
            run = self.runs.get(reply.run)
            if run in shares:
                shares[run] += reply.seconds
        total = sum(shares.values())  # more than elapsed if several processes train
        for run, seconds in shares.items():
            run.seconds += elapsed * (seconds / total if total else 1 / len(shares))
            run.alone &= len(shares) == 1

    def _work(self, group: Sequence[Run]) -> None:
        """Do what is left to do on the server, for several runs together where possible."""
        works = {run: run.method.work() for run in group}
        busy = [run for run, work in works.items() if work is not None]
        begin = time.perf_counter()
        run_server_work(works.values())
        for run in busy:
            run.seconds += (time.perf_counter() - begin) / len(busy)

    def _record(self) -> bool:
        """Record the next round of each run that has completed one, after what is due is evaluated in few passes.

        Return whether there was one: without a barrier, a method may complete several rounds at once.
        """
        due = [(run, _timed(run, run.due)) for run in self.active if run.behind]
        jobs = [(run, key, job) for run, jobs in due for key, job in jobs.items()]
        begin = time.perf_counter()
        try:
            found = evaluate([job for _, _, job in jobs])
        except torch.OutOfMemoryError:
            for engine in {run.engine for run, _ in due}:
                engine.release()
            found = evaluate([job.alone() for _, _, job in jobs])
        share = (time.perf_counter() - begin) / max(1, sum(len(job.on) for _, _, job in jobs))
        scores: dict[Run, dict[tuple[str, str], Scores | ClientScores]] = {run: {} for run, _ in due}
        for (run, key, job), score in zip(jobs, found, strict=True):
            scores[run][key] = score
            run.seconds += share * len(job.on)
        records = {run: run.record(mine) for run, mine in scores.items()}
        for run, record in records.items():
            if record is not None:
                run.announce(record)
        return bool(records)


def _timed(run: Run, call: Callable[[], T]) -> T:
    """Call a function and add its time to the run's seconds."""
    begin = time.perf_counter()
    try:
        return call()
    finally:
        run.seconds += time.perf_counter() - begin
