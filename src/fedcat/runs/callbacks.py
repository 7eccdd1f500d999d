"""Callbacks: what happens during a run besides the run itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedcat.core.errors import SettingError

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

    def on_start(self, run: Run) -> None:
        """Before the first round; after a restore ``run.resumed`` is True and ``run.history`` is not empty."""

    def on_evaluate(self, run: Run, record: Record) -> None:
        """After a round that was evaluated, before `on_round`."""

    def on_round(self, run: Run, record: Record) -> None:
        """After each round."""

    def on_end(self, run: Run) -> None:
        """When the run has ended; ``run.status`` says how."""

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to continue from here."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore from `state`."""


CallbackPart = Callback | Callable[[], Callback]
"""A callback, which all runs share; or a class or function that makes one for each run."""


def make_callbacks(parts: Sequence[CallbackPart]) -> list[Callback]:
    """Return the callbacks of one run."""
    made = []
    for part in parts:
        callback = part if isinstance(part, Callback) or not callable(part) else part()
        if not isinstance(callback, Callback):
            raise SettingError(f"callbacks must be Callback objects or classes, got {callback!r}")
        made.append(callback)
    return made
