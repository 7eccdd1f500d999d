"""A run: one method on one federation with one seed. A round is: plan, train, absorb, evaluate, record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedcat.config.settings import Settings
from fedcat.core.errors import SettingError
from fedcat.core.text import plural
from fedcat.data.federation import Federation
from fedcat.engines.base import Engine, Job
from fedcat.engines.evaluation import Evaluation, Scores
from fedcat.methods.base import Method
from fedcat.models.metrics import ClientScores, make_metrics, make_monitor
from fedcat.protocol.ledger import Ledger
from fedcat.protocol.reply import Reply
from fedcat.protocol.reply_check import NOT_FINITE
from fedcat.protocol.task import Task
from fedcat.runs.evaluations import count_evaluation, evaluations, final_clients
from fedcat.runs.history import Record
from fedcat.runs.inbox import Inbox
from fedcat.runs.lifecycle import Lifecycle
from fedcat.runs.result import Result
from fedcat.runs.summary import Decisions, RunSummary, summarize

STATE_VERSION = 2


class Run(Lifecycle):
    """One method on one federation with one seed, from its first round to its last.

    Parameters
    ----------
    name : str
        The run's name, unique among the runs that are driven together.
    settings : Settings
        What was asked for, with every default filled in.
    decisions : Decisions
        What the builder decided.
    federation : Federation
        Who holds what.
    method : Method
        The server side.
    task : Task
        The client side.
    engine : Engine
        The engine that trains.
    metrics : sequence
        Metrics besides accuracy and loss: `Metric` objects or functions.
    notes : sequence of str
        Lines that the user should read.

    Attributes
    ----------
    ledger : Ledger
        The traffic.
    seconds : float
        The time taken so far.
    inbox : Inbox
        What replies pass through: simulated faults and checks; it keeps the simulated clock.
    alone : bool
        Whether nothing ran beside it, so that its seconds are measured and not a share.
    clients : list or None
        The final model's metrics on each client's own data, if they are wanted.

    See `Lifecycle` for its history, callbacks, status and notes.
    """

    def __init__(
        self,
        name: str,
        settings: Settings,
        decisions: Decisions,
        federation: Federation,
        method: Method,
        task: Task,
        engine: Engine,
        metrics: Sequence[Any] = (),
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(name, notes)
        self.settings, self.decisions, self.federation = settings, decisions, federation
        self.method, self.task, self.engine = method, task, engine
        self.metrics = make_metrics(metrics, task.loss, federation.classes > 0)
        self.monitor = make_monitor(settings.monitor, self.metrics)
        self.ledger = Ledger()
        self.inbox = Inbox(settings, federation.clients, task.layout)
        self.seconds = 0.0
        self.alone = True
        self.clients: list[dict[str, Any]] | None = None
        self._closed = False

    @property
    def rounds(self) -> int:
        """The number of rounds to run."""
        return self.settings.rounds

    # Training

    def plan(self, until: int | None = None) -> list[Job]:
        """Return the hops of rounds before `until` that can start now.

        Without `until`, a round starts only after the previous one is recorded, so that it can be evaluated first.
        """
        hops = self.method.plan(min(len(self.history) + 1 if until is None else until, self.rounds))
        self.inbox.expect(hops, self.method.uploads)
        for hop in hops:
            self.ledger.sent(hop)
        return [(self.task, hop) for hop in hops]

    def absorb(self, replies: Sequence[Reply]) -> None:
        """Pass the replies that the inbox admits to the method."""
        admitted = self.inbox.admit(replies)
        for hop, reply in admitted:
            self.ledger.received(hop, reply)
        self.method.absorb([reply for _, reply in admitted])
        self.check_row()

    def check_row(self) -> None:
        """Raise a `SettingError` if the method's global row is unsound."""
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

    # Evaluation

    @property
    def behind(self) -> bool:
        """Whether the method has completed a round that is not recorded."""
        return len(self.history) < min(self.method.round, self.rounds)

    def due(self) -> dict[tuple[str, str], Evaluation]:
        """Return the evaluations before the next round is recorded, by data and model; none if none is due.

        After the last round the method is closed first.
        """
        number = len(self.history) + 1
        if not self.behind:
            return {}
        if number == self.rounds and not self._closed:
            self.tell("on_close")
            self.method.close()
            self._closed = True
        if number < self.rounds and number % self.settings.evaluation_interval:
            return {}
        return evaluations(self)

    def record(self, scores: Mapping[tuple[str, str], Scores | ClientScores]) -> Record | None:
        """Record the next round if it is complete, with the results of what was due."""
        number = len(self.history) + 1
        if not self.behind:
            return None
        record = Record(number, seconds=round(self.seconds, 4), hops=self.ledger.of_round(number - 1))
        record.simulated_seconds = round(self.inbox.pass_round(number - 1), 6)
        for (name, model), found in scores.items():
            if isinstance(found, ClientScores):
                setattr(record, name, {m.name: found.spread(m) for m in self.metrics.values()})
                count_evaluation(self, name, found)
            elif model == "global":
                record.metrics = found
            else:
                record.others[model] = found
        record.down, record.up = self.ledger.until(number)
        record.evaluation = self.ledger.evaluation
        self.history.append(record)
        self.ledger.forget(number)
        return record

    def announce(self, record: Record) -> None:
        """Tell the callbacks of a round, and end the run if it was the last."""
        if record.evaluated:
            self.tell("on_evaluate", record)
        self.tell("on_round", record)
        if self.done:
            self.end()

    def _finish(self) -> None:
        """Evaluate the final model on each client, if that is wanted."""
        if self.settings.per_client:
            self.clients = final_clients(self)

    def _closing_notes(self) -> list[str]:
        """Return notes on replies that are missing and on numbers that are not finite."""
        notes = []
        lost = [hop for record in self.history for hop in record.lost]
        hops = sum(len(record.hops) for record in self.history)
        if lost and self.status == "untrained":
            first = f"the first hop was {lost[0].status}: {lost[0].why}"
            notes.append(f"no hop arrived: the model is the initial one; {first}")
        elif lost:
            first = f"the first was {lost[0].status}: {lost[0].why}"
            notes.append(f"the replies of {len(lost)} of {hops} hops are missing; {first}")
        if any(NOT_FINITE in hop.why for hop in lost) and not self.settings.corrupt:
            notes[-1] += "; training diverges, try a smaller lr"
        banned = self.method.bans.banned
        if banned:
            notes.append(f"banned for refused replies: {plural(len(banned), 'client')}, {_listed(banned)}")
        if self.status != "failed" and not torch.isfinite(self.method.models()["global"]).all():
            notes.append("the global model contains numbers that are not finite")
        return notes

    def rows(self) -> dict[str, Tensor]:
        """Return the models to keep by name, or none if the method's row is unsound."""
        return self.method.models() if self.wrong_row() is None else {}

    def summary(self) -> RunSummary:
        """Return what the run has given so far."""
        return summarize(self)

    def result(self, folder: Path | None = None, unwritten: str = "") -> Result:
        """Return the result of a run that has ended; `folder` is where it was written, `unwritten` why not wholly."""
        return Result(
            settings=self.settings,
            history=self.history,
            federation=self.federation,
            summary=self.summary(),
            folder=folder,
            unwritten=unwritten,
            error=self.error if isinstance(self.error, Exception) else None,
            clients=self.clients,
            _layout=self.task.layout,
            _rows={name: row.cpu() for name, row in self.rows().items()},
        )

    # State

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue from here, at any moment, also in mid-round.

        It holds plain values and tensors, see `fedcat.runs.state`. Hops that are on their way are not part of it: they
        are planned again, with the same names. The tensors are not changed by later rounds.
        """
        kept = any(callback.keeps_history for callback in self.callbacks)
        return {
            **self._identity(),
            "run": self.name,
            "rounds": len(self.history),
            "history": None if kept else [record.as_dict() for record in self.history],
            "server": self.method.state(),
            "ledger": self.ledger.state(),
            "seconds": self.seconds,
            "inbox": self.inbox.state(),
            "alone": self.alone,
            "notes": self.lasting_notes,
            "callbacks": self._callbacks_state(),
        }

    def _identity(self) -> dict[str, Any]:
        """Return what a state and the run that continues from it must have in common."""
        net = f"{self.settings.net}, {self.task.layout.size:,} numbers"
        settings, federation = self.settings, self.federation.hash
        method, seed = settings.method, settings.seed
        return {"version": STATE_VERSION, "method": method, "seed": seed, "net": net, "federation": federation}

    def restore(self, state: Mapping[str, Any], history: Sequence[Record] | None = None) -> None:
        """Continue from a state.

        Parameters
        ----------
        state : mapping
            What `state` returned, in this process or another.
        history : sequence of Record, optional
            The records, if the state does not hold them because a callback keeps them.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                hint = "; the data, its partition or their seed differ" if name == "federation" else ""
                raise SettingError(
                    f"the state is of another run: its {name} is {state[name]!r}, this one's {value!r}{hint}"
                )
        if history is None and state["history"] is None:
            raise SettingError(
                "the state does not hold the history, which the run's directory keeps: pass it as "
                "restore(state, read_history(directory)), from fedcat.runs.run_files"
            )
        records = [Record.from_dict(one) for one in state["history"]] if history is None else list(history)
        if len(records) < state["rounds"]:
            raise SettingError(f"the state is of round {state['rounds']}, but the history ends at {len(records)}")
        self._renew()
        self._closed, self.clients = False, None
        self.inbox.restore(state["inbox"])
        self.history = records[: state["rounds"]]
        self.method.restore(state["server"])
        self.ledger.restore(state["ledger"])
        self.seconds, self.alone, self.late_notes = state["seconds"], state["alone"], list(state["notes"])
        self._restore_callbacks(state["callbacks"])
        self.resumed = True


def _listed(clients: Sequence[int], most: int = 10) -> str:
    names = ", ".join(map(str, clients[:most]))
    return names if len(clients) <= most else f"{names} and {len(clients) - most} more"
