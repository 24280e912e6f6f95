"""Saving in the background: one save at a time, in a thread, from a copy of the state, over a group of its own."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from reshard.dcp.local_state import HostCopies, LocalState
from reshard.dcp.ranks import Ranks
from reshard.errors import ReshardError

log = logging.getLogger("reshard")


class Background:
    """The save that a group of ranks has under way, or the last one.

    Every method is to be called by all ranks, in the same order, between steps.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._apart = ranks.apart()
        self._copies = HostCopies()
        self._saving: Future[Any] | None = None

    @classmethod
    def of(cls, ranks: Ranks) -> Background:
        """That of some ranks: one for each, so that a second save waits for the first whoever starts it."""
        if ranks not in _of_ranks:
            _of_ranks[ranks] = cls(ranks)
        return _of_ranks[ranks]

    def copy(self, state: LocalState) -> LocalState:
        """A copy of a state, in memory that is used again: `finish` the save before, first."""
        return self._copies.copy(state)

    def start(self, save: Callable[[Ranks], Any]) -> Future[Any]:
        """Runs a save in a thread, which the interpreter waits for when it ends.

        Args:
            save: gets the ranks to agree over; the group of the step loop is not to be used.
        """
        # Opened here: a group is opened by all ranks in one order, and the step loop may open others.
        self._apart.open()
        saving: Future[Any] = Future()

        def run() -> None:
            try:
                saving.set_result(save(self._apart))
            except BaseException as fault:
                # For whoever asks next; if nobody does, the log has it.
                log.error("a save in the background failed: %s", fault)
                saving.set_exception(fault)

        self._saving = saving
        threading.Thread(target=run, name="reshard-save").start()
        return saving

    def finish(self) -> Any:
        """Waits for the save that is under way, and gives what it gave; None where there is none.

        Raises:
            ReshardError: it failed, here or on another rank. Told once.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        try:
            return saving.result()
        except ReshardError as fault:
            fault.details = (*fault.details, "of the save that was started before, in the background")
            raise


_of_ranks: weakref.WeakKeyDictionary[Ranks, Background] = weakref.WeakKeyDictionary()
