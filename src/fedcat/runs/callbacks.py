"""Callbacks: what happens during a run besides the run itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedcat.core.errors import SettingError
from fedcat.core.registry import accepts_call

if TYPE_CHECKING:
    from fedcat.runs.history import Record
    from fedcat.runs.run import Run


class Callback:
    """Is told what happens in a run; override what you need.

    ``run.stop("why")`` ends the run after this round; its neighbors go on. An exception in a callback ends its run as
    failed, and its neighbors go on as well.

    Attributes
    ----------
    keeps_history : bool
        Whether the callback stores all records, so that the run's state need not hold them.
    """

    keeps_history: bool = False

    def __init_subclass__(cls) -> None:
        """Check the names of the events: a misspelled one would never be called."""
        super().__init_subclass__()
        for name in vars(cls):
            if name.startswith("on_") and not hasattr(Callback, name):
                events = ", ".join(event for event in vars(Callback) if event.startswith("on_"))
                raise TypeError(f"callback {cls.__name__} has {name}, which is no event: the events are {events}")

    def on_start(self, run: Run) -> None:
        """Before the first round; after a restore ``run.resumed`` is True and ``run.history`` is not empty."""

    def on_evaluate(self, run: Run, record: Record) -> None:
        """After a round that was evaluated, before `on_round`."""

    def on_round(self, run: Run, record: Record) -> None:
        """After each round."""

    def on_close(self, run: Run) -> None:
        """Before a run ends by itself: after its last round or, if it is stopped, after that round. More can follow.

        A last round is not yet evaluated and recorded, and the method has not yet aggregated what is left over, such as
        a cycle of FedCat's that is not complete.
        """

    def on_end(self, run: Run) -> None:
        """When the run has ended; ``run.status`` says how."""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue from here."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""


CallbackPart = Callback | Callable[[], Callback]
"""A callback, which all runs share; or a class or function that makes one for each run."""


def check_list(parts: Sequence[CallbackPart]) -> Sequence[CallbackPart]:
    """Return what a user gave as callbacks; raise a `SettingError` unless it is a list."""
    if not isinstance(parts, (list, tuple)):
        raise SettingError(f"callbacks must be a list, got {parts!r}")
    return parts


def make_callbacks(parts: Sequence[CallbackPart]) -> list[Callback]:
    """Return the callbacks of one run."""
    made = []
    for part in parts:
        callback: Any = part
        if not isinstance(part, Callback) and callable(part) and accepts_call(part):
            callback = part()
        if not isinstance(callback, Callback):
            raise SettingError(f"callbacks must be Callback objects or classes, got {callback!r}")
        made.append(callback)
    return made
