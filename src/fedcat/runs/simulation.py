"""Simulations, one or many side by side. A round is: plan, train, absorb, evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedcat.core.errors import SettingError
from fedcat.data.pool import Pool
from fedcat.engines.base import Engine, Job
from fedcat.methods.base import Method, run_server_work
from fedcat.protocol.hop import Hop
from fedcat.protocol.ledger import Ledger
from fedcat.protocol.reply import Reply
from fedcat.protocol.reply_check import ReplyCheck
from fedcat.protocol.task import Task

T = TypeVar("T")
Score = tuple[float, float]
"""Accuracy and mean loss."""


@dataclass
class Record:
    """One round in a run's history.

    Attributes
    ----------
    round : int
        The number of rounds completed.
    accuracy, loss : float or None
        Of the global model on the test data; None if this round was not evaluated.
    up, down : int
        Bytes sent by the clients and by the server since the start.
    seconds : float
        Seconds since the start. Of simulations side by side, this one's share: an estimate. The time of each launch is
        shared by local steps, server work in equal parts, evaluation by models.
    clients : list of int
        The clients of the hops, in the order of their copies.
    train_loss : float or None
        The mean training loss over the round's hops whose reply arrived.
    lost : list
        [client, status, reason] of the hops whose reply did not arrive.
    others : mapping
        Accuracy and loss of the other models that are evaluated.
    """

    round: int
    accuracy: float | None
    loss: float | None
    up: int
    down: int
    seconds: float
    clients: list[int]
    train_loss: float | None
    lost: list[list[Any]] = field(default_factory=list)
    others: dict[str, list[float]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the record as plain values, without those that are empty or not finite."""
        plain = asdict(self)
        plain["others"] = {name: [v if math.isfinite(v) else None for v in s] for name, s in self.others.items()}
        return {k: v for k, v in plain.items() if k == "clients" or not _is_empty(v)}


def _is_empty(value: Any) -> bool:
    return value in (None, {}, []) or (isinstance(value, float) and not math.isfinite(value))


class Simulation:
    """One method on one federation, run step by step.

    Parameters
    ----------
    method : Method
        The server side.
    task : Task
        The client side.
    engine : Engine
        The engine that trains.
    test : Pool
        The test data, on the engine's device.
    rounds : int
        The number of rounds to run.
    evaluate_every : int
        Rounds between evaluations; the last round is always evaluated.
    evaluate : sequence of str
        Models to evaluate besides the global one: ``mean``, ``copies``.
    bound : float, optional
        The largest norm of a client's update that is accepted.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        engine: Engine,
        test: Pool,
        rounds: int,
        evaluate_every: int = 10,
        evaluate: Sequence[str] = (),
        bound: float | None = None,
    ) -> None:
        self.method, self.task, self.engine, self.test = method, task, engine, test
        self.rounds, self.evaluate_every, self.evaluate = rounds, evaluate_every, tuple(evaluate)
        self.ledger = Ledger()
        self.history: list[Record] = []
        self.seconds = 0.0
        self.alone = True
        """Whether nothing ran beside it, so that its seconds are measured and not a share."""
        self.reply_check = ReplyCheck(task.layout.size, task.layout.dtype, bound)
        self._closed = False
        self._ended: dict[int, list[tuple[Hop, Reply]]] = {}

    @property
    def done(self) -> bool:
        """Whether all rounds are complete and recorded."""
        return len(self.history) >= self.rounds

    def plan(self, until: int | None = None) -> list[Job]:
        """Return the hops of rounds before `until` that can start now.

        Without `until`, a round starts only after the previous one is recorded, so that it can be evaluated first.
        """
        hops = self.method.plan(min(len(self.history) + 1 if until is None else until, self.rounds))
        self.reply_check.expect(hops)
        for hop in hops:
            self.ledger.sent(hop.round, hop.client, hop.bytes_down)
        return [(self.task, hop) for hop in hops]

    def absorb(self, replies: Sequence[Reply]) -> None:
        """Pass the replies that the reply check admits to the method."""
        admitted = self.reply_check.admit(replies)
        for hop, reply in admitted:
            self.ledger.received(hop.round, hop.client, reply.bytes_up)
            self._ended.setdefault(hop.round, []).append((hop, reply))
        self.method.absorb([reply for _, reply in admitted])
        wrong = self.wrong_row()
        if wrong is not None:
            raise SettingError(wrong)

    def wrong_row(self) -> str | None:
        """Return what is wrong with the method's global row, or None."""
        row, layout = self.method.models()["global"], self.task.layout
        if isinstance(row, torch.Tensor) and row.shape == (layout.size,) and row.dtype == layout.dtype:
            return None
        got = f"{row.dtype} of shape {tuple(row.shape)}" if hasattr(row, "shape") else type(row).__name__
        name = type(self.method).__name__
        return f"method {name} must keep a global row of {layout.dtype} of shape ({layout.size},), got {got}"

    def due(self) -> dict[str, Tensor]:
        """Return the rows to evaluate before the next round is recorded; none if no evaluation is due.

        After the last round the method is closed first.
        """
        number = len(self.history) + 1
        if number > min(self.method.round, self.rounds):
            return {}
        if number == self.rounds and not self._closed:
            self.method.close()
            self._closed = True
        if number < self.rounds and number % self.evaluate_every:
            return {}
        return dict(self.method.models(*self.evaluate))

    def record(self, scores: Mapping[str, Score] | None = None) -> list[Record]:
        """Record the newly completed rounds, and evaluate if an evaluation is due.

        Parameters
        ----------
        scores : mapping, optional
            Accuracy and loss of the rows that `due` returned, if the caller has already evaluated them.
        """
        fresh = []
        while len(self.history) < min(self.method.round, self.rounds):
            found = dict(self._scores(self.due()) if scores is None else scores)
            scores = None
            fresh.append(self._record(len(self.history) + 1, found))
            self.history.append(fresh[-1])
        return fresh

    def _record(self, number: int, scores: dict[str, Score]) -> Record:
        ended = sorted(self._ended.pop(number - 1, []), key=lambda pair: pair[0].copy)
        losses = [reply.loss for _, reply in ended if reply.arrived]
        accuracy, loss = scores.pop("global", (None, None))
        return Record(
            round=number,
            accuracy=accuracy,
            loss=loss,
            up=self.ledger.up,
            down=self.ledger.down,
            seconds=round(self.seconds, 4),
            clients=[hop.client for hop, _ in ended],
            train_loss=sum(losses) / len(losses) if losses else None,
            lost=[[hop.client, reply.status.value, reply.why] for hop, reply in ended if not reply.arrived],
            others={name: list(score) for name, score in scores.items()},
        )

    def _scores(self, rows: Mapping[str, Tensor]) -> dict[str, Score]:
        return evaluate_due([(self, rows)])[0]

    def score(self) -> float:
        """Return the global model's accuracy on the test data."""
        return self._scores(self.method.models())["global"][0]

    def step(self) -> list[Record]:
        """Plan, train and absorb once; return the rounds that this completed."""
        return step_together([self])[0]

    def run(self) -> list[Record]:
        """Step until all rounds are complete and return the history."""
        while not self.done:
            self.step()
        return self.history

    def client_accuracies(self) -> list[dict[str, Any]]:
        """Return the global model's accuracy and loss on each client's training data."""
        row = self.method.models()["global"]
        results = []
        for client in range(self.task.federation.clients):
            index = torch.from_numpy(self.task.federation.indices(client)).to(row.device)
            ((accuracy, loss),) = self.engine.evaluate(self.task.layout, [row], self.task.pool, index)
            results.append({"client": client, "samples": len(index), "accuracy": accuracy, "loss": loss})
        return results


def step_together(simulations: Sequence[Simulation]) -> list[list[Record]]:
    """Step several simulations at once; those that share an engine train in one call.

    Returns
    -------
    list of list of Record
        The rounds that each simulation completed.
    """
    waiting = [simulation for simulation in simulations if not simulation.done]
    for engine in dict.fromkeys(simulation.engine for simulation in waiting):
        group = [simulation for simulation in waiting if simulation.engine is engine]
        planned = [_timed(simulation, simulation.plan) for simulation in group]
        if not any(planned):
            raise RuntimeError("no simulation has a hop to start: a method waits for replies that are not outstanding")
        begin = time.perf_counter()
        replies = engine.train([job for jobs in planned for job in jobs])
        elapsed = time.perf_counter() - begin
        launches = sum(reply.seconds for reply in replies) or 1.0  # more than elapsed if several processes train
        for simulation, jobs in zip(group, planned, strict=True):
            own, replies = replies[: len(jobs)], replies[len(jobs) :]
            simulation.seconds += elapsed * sum(reply.seconds for reply in own) / launches
            simulation.alone &= len(group) == 1
            _timed(simulation, partial(simulation.absorb, own))
        works = {simulation: simulation.method.work() for simulation in group}
        busy = [simulation for simulation, work in works.items() if work is not None]
        begin = time.perf_counter()
        run_server_work(works.values())
        for simulation in busy:
            simulation.seconds += (time.perf_counter() - begin) / len(busy)
    due = [(simulation, _timed(simulation, simulation.due)) for simulation in simulations]
    scores = evaluate_due(due)
    return [simulation.record(found) for (simulation, _), found in zip(due, scores, strict=True)]


def evaluate_due(due: Sequence[tuple[Simulation, Mapping[str, Tensor]]]) -> list[dict[str, Score]]:
    """Return accuracy and loss of rows of several simulations, evaluated in as few passes as possible."""
    scores: list[dict[str, Score]] = [{} for _ in due]
    groups: dict[object, list[int]] = {}
    for position, (simulation, rows) in enumerate(due):
        if rows:
            key = (simulation.engine, simulation.task.layout, simulation.test)
            groups.setdefault(key, []).append(position)
    for positions in groups.values():
        first = due[positions[0]][0]
        keys = [(position, name) for position in positions for name in due[position][1]]
        begin = time.perf_counter()
        found = first.engine.evaluate(first.task.layout, [due[p][1][name] for p, name in keys], first.test)
        share = (time.perf_counter() - begin) / len(keys)
        for (position, name), score in zip(keys, found, strict=True):
            scores[position][name] = score
            due[position][0].seconds += share
    return scores


def _timed(simulation: Simulation, call: Callable[[], T]) -> T:
    """Call a function and add its time to the simulation's seconds."""
    begin = time.perf_counter()
    try:
        return call()
    finally:
        simulation.seconds += time.perf_counter() - begin


def run_together(
    simulations: Sequence[Simulation],
    on_round: Callable[[int, Record], None] | None = None,
    between: Callable[[], None] | None = None,
) -> None:
    """Run several simulations side by side until all are done.

    Parameters
    ----------
    simulations : sequence of Simulation
        The simulations to run.
    on_round : callable, optional
        Called with a simulation's position and each round that it completes.
    between : callable, optional
        Called after every step; if it raises, the run ends with only complete rounds recorded.
    """
    while not all(simulation.done for simulation in simulations):
        for position, records in enumerate(step_together(simulations)):
            for record in records:
                if on_round is not None:
                    on_round(position, record)
        if between is not None:
            between()
