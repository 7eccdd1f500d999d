"""The life of a run: who is told of its events, how it is stopped, and how it ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fedcat.runs.callbacks import Callback
from fedcat.runs.history import Record


class Lifecycle(ABC):
    """Begins, tells its callbacks what happens, and ends once.

    Attributes
    ----------
    name : str
        The run's name.
    history : list of Record
        The rounds that are complete.
    callbacks : list of Callback
        Who is told.
    resumed : bool
        Whether it continues from a state.
    error, error_in_callback : BaseException or None, bool
        Why it failed, and whether a callback raised it.
    early_notes, late_notes : sequence of str
        Lines that the user should read, before and after the rounds.
    """

    def __init__(self, name: str, notes: Sequence[str] = ()) -> None:
        self.name = name
        self.early_notes, self.late_notes = tuple(notes), list[str]()
        self.history: list[Record] = []
        self.callbacks: list[Callback] = []
        self.resumed = False
        self.error: BaseException | None = None
        self.error_in_callback = False
        self._status = ""
        self._stopping = False
        self._of_end: list[str] = []  # those of the notes that are about how it ended

    def _callbacks_state(self) -> list[list[Any]]:
        """Return the callbacks' state, each with the name of its class."""
        return [[type(callback).__name__, callback.state()] for callback in self.callbacks]

    def _restore_callbacks(self, states: Sequence[Sequence[Any]]) -> None:
        """Restore the callbacks, matched by class; those that the state does not know begin afresh."""
        waiting = [list(entry) for entry in states]
        for callback in self.callbacks:
            mine = next((entry for entry in waiting if entry[0] == type(callback).__name__), None)
            if mine is not None:
                waiting.remove(mine)
                callback.restore(mine[1])

    def _renew(self) -> None:
        """Forget how it ended, to go on from a state."""
        self._of_end = []
        self.error, self.error_in_callback, self._status, self._stopping = None, False, "", False

    @property
    @abstractmethod
    def rounds(self) -> int:
        """The number of rounds to run."""

    @abstractmethod
    def _finish(self) -> None:
        """Do what is left to do before the callbacks are told of the end."""

    @abstractmethod
    def _closing_notes(self) -> list[str]:
        """Return what the user should read about the rounds."""

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do: all rounds are recorded, or the run was stopped or failed."""
        return bool(self._status) or self._stopping or len(self.history) >= self.rounds

    @property
    def status(self) -> str:
        """How the run ended, see `RunSummary`; ``running`` before its end."""
        return self._status or "running"

    @property
    def notes(self) -> list[str]:
        """Lines that the user should read."""
        return [*self.early_notes, *self.late_notes]

    def tell(self, event: str, *given: Any) -> None:
        """Tell the callbacks of an event; an exception in one of them ends the run as failed."""
        for callback in self.callbacks:
            with self._failing_alone(f"{event} of the callback {type(callback).__name__}"):
                getattr(callback, event)(self, *given)

    @contextmanager
    def _failing_alone(self, what: str) -> Iterator[None]:
        """Turn an exception into the failure of this run, so that the others go on."""
        try:
            yield
        except Exception as error:
            error.add_note(f"in {what}, run {self.name!r}")
            self.error_in_callback |= self.error is None
            self.error = self.error or error
            self._stopping = True

    def stop(self, why: str = "") -> None:
        """Stop this run at the end of the round; the others go on."""
        if self.done:
            return
        self._stopping = True
        if self.error is None:
            reason = f": {why}" if why else ""
            self._note_end(f"stopped after round {len(self.history)} of {self.rounds}{reason}")

    def end(self, cause: BaseException | None = None) -> None:
        """End the run and tell the callbacks; `cause` is what ended it before it was done."""
        if self._status:
            return
        if cause is not None and not self.done:
            self.error = cause
        if self.error is None:
            if len(self.history) < self.rounds:
                self.tell("on_close")
            with self._failing_alone("the evaluation on each client"):
                self._finish()
        self._status = self._outcome()
        self._note_end(*([_described(self.error)] if self._status == "failed" else []), *self._closing_notes())
        for callback in reversed(self.callbacks):  # the first one, which writes the run's directory, is told last
            with self._failing_alone(f"on_end of the callback {type(callback).__name__}"):
                callback.on_end(self)  # type: ignore[arg-type]
            if self.error_in_callback and self._status != "failed":
                self._status = "failed"
                self.late_notes.append(_described(self.error))

    def _note_end(self, *notes: str) -> None:
        self.late_notes += notes
        self._of_end += notes

    @property
    def lasting_notes(self) -> list[str]:
        """The late notes that hold also if the run goes on."""
        return [note for note in self.late_notes if note not in self._of_end]

    def _outcome(self) -> str:
        if isinstance(self.error, KeyboardInterrupt):
            return "interrupted"
        if self.error is not None:
            return "failed"
        if len(self.history) < self.rounds:
            return "stopped"
        return "finished" if any(hop.arrived for record in self.history for hop in record.hops) else "untrained"


def _described(error: BaseException | None) -> str:
    where = getattr(error, "__notes__", [])
    return f"{type(error).__name__}: {error}" + (f" ({where[0]})" if where else "")
