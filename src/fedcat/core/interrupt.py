"""Deferred handling of Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType

NOTICE = "\nstopping at the end of this round; press Ctrl-C again to stop immediately\n"


class DeferredInterrupt:
    """Defers the first Ctrl-C until `check` is called; the second one interrupts immediately.

    PyTorch swaps a net's tensors while it computes. An interrupt in the middle can leave PyTorch and the net in a
    state from which nothing can be evaluated or saved.
    """

    def __init__(self) -> None:
        self._asked = False
        self._mine = False

    def __enter__(self) -> DeferredInterrupt:
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._mine = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._asked:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        os.write(2, NOTICE.encode())  # not through sys.stderr, whose lock may be held
