"""Signals, as a flag: a handler sets it and nothing else happens there. The training loop asks at its step boundaries."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Whether this process was asked to stop.

    Call the object to ask. Handlers that were there before are called too; a default action (to die at once) is
    replaced. Processes forked later, such as data workers, ignore the request: the loop ends them when it is done.
    Must be made in the main thread.

    Attributes:
        received: the first signal's name, or None.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.received: str | None = None
        self._owner = os.getpid()
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in signals}

    def __call__(self) -> bool:
        return self.received is not None

    def close(self) -> None:
        """Puts the former handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            return
        if self.received is None:
            self.received = signal.Signals(number).name
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
