"""Signals, as a flag: a handler sets it and nothing else happens there. The training loop asks at its step boundaries.

Who gets a signal depends on who sends it. torchrun hands SIGTERM on to its workers and kills them 30 s later. SLURM
signals every process of a job step, the workers of data loaders included, and those die of SIGTERM (torch sees to
that, whatever handler they inherited), upon which the loader raises in the middle of a step and nothing is saved. So::

    stop = StopSignal()
    loader = DataLoader(
        ..., num_workers=4, worker_init_fn=StopSignal.ignore_in_worker, multiprocessing_context="fork"
    )
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from reshard.errors import UsageError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopSignal:
    """Whether this process was asked to stop.

    Call the object to ask. Handlers of the program's own that were there before are called too; a default action (to
    die at once, to raise KeyboardInterrupt) is replaced. A process forked later does not report a stop and runs no
    such handler: there SIGTERM ends it, as ``multiprocessing`` counts on, and the other signals do nothing. One that
    is spawned, or forked from a server, has the defaults: any of the signals ends it.

    Args:
        signals: which of them ask.

    Attributes:
        received: the first signal's name, or None.

    Raises:
        UsageError: made outside the main thread, where Python allows no handlers.
    """

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS) -> None:
        self.received: str | None = None
        self._owner = os.getpid()
        self._previous: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "signals can be caught in the main thread only",
                found=threading.current_thread().name,
                hint="make the StopSignal before you start threads, and hand it on",
            )
        for number in signals:
            self._previous[number] = signal.signal(number, self._handle)

    def __call__(self) -> bool:
        return self.received is not None

    def close(self) -> None:
        """Puts the former handlers back. In the main thread only, as for making one."""
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous = {}

    @staticmethod
    def ignore_in_worker(worker_id: int = 0) -> None:
        """The ``worker_init_fn`` of a ``DataLoader`` whose workers are forked or spawned.

        The worker outlives a signal to the whole job, so that the step can be finished and saved. SIGTERM from the
        training process itself, which is how a loader ends a worker that is stuck, ends it still. Programs that the
        worker starts inherit the blocked signals. Under ``forkserver``, the default from Python 3.14 on, it is not
        enough: the server dies of the signal, and its workers follow it.
        """
        # Blocked, not handled: only a thread that waits for a signal is told who sent it.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=_end_when_terminated, name="reshard-signals", daemon=True).start()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.received is None:
            self.received = signal.Signals(number).name
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)


@contextmanager
def interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Lets signals that would end the process at once raise KeyboardInterrupt, so that it can clean up. Main thread."""
    previous = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _end_when_terminated() -> None:
    trainer = multiprocessing.parent_process()
    while True:
        asked = signal.sigwaitinfo(SIGNALS)
        if asked.si_signo == signal.SIGTERM and trainer is not None and asked.si_pid == trainer.pid:
            os._exit(0)
