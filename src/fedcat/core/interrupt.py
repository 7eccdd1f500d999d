"""Deferred handling of signals that ask the process to end."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Ctrl-C, the request of a scheduler or an operating system to end, and a terminal that is gone."""

NOTICE = "\nstopping at the end of this round; press Ctrl-C again to stop immediately\n"


class Interrupt(KeyboardInterrupt):
    """A signal asked for the end.

    Attributes
    ----------
    number : int
        The signal.
    between : bool
        Whether nothing was under way, so that every run can be continued from here.
    """

    def __init__(self, number: int, between: bool) -> None:
        super().__init__(signal.Signals(number).name)
        self.number, self.between = number, between

    @property
    def exit_code(self) -> int:
        """What a shell reports of a process that a signal has ended."""
        return 128 + self.number


class DeferredInterrupt:
    """Defers the first signal until `check` is called; the second one interrupts immediately.

    PyTorch swaps a net's tensors while it computes. An interrupt in the middle can leave PyTorch and the net in a
    state from which nothing can be evaluated or saved.
    """

    def __init__(self) -> None:
        self._asked: int | None = None
        self._before: dict[int, Any] = {}
        self._terminals = [stream for stream in (1, 2) if os.isatty(stream)]

    def __enter__(self) -> DeferredInterrupt:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                before = signal.getsignal(number)
                if before in (signal.default_int_handler, signal.SIG_DFL):  # not ignored, as by nohup, nor another's
                    self._before[number] = before
                    signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def check(self) -> None:
        """Raise an `Interrupt` if a signal has come."""
        if self._asked is not None:
            raise Interrupt(self._asked, between=True)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked is not None:
            raise Interrupt(number, between=False)
        self._asked = number
        if number == getattr(signal, "SIGHUP", None):
            self._leave_terminal()
        with suppress(OSError):  # such as a pipe whose reader the same Ctrl-C has ended
            os.write(2, NOTICE.encode())  # not through sys.stderr, whose lock may be held

    def _leave_terminal(self) -> None:
        """Let what is printed to a terminal that is gone vanish, instead of ending the run by an error."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in self._terminals:
            os.dup2(nowhere, stream)
        os.close(nowhere)
