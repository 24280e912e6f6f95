"""A sign of life from what takes long, so that nobody takes a slow file system for a run that hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from reshard.dcp.ranks import Ranks

INTERVAL_S = 60.0


@contextmanager
def heartbeat(ranks: Ranks, what: str) -> Iterator[None]:
    """Says once a minute that the block still runs. Rank 0 speaks; it does not wait for the others.

    Args:
        ranks: who takes part.
        what: that it is doing, as in "saving step 40".
    """
    if ranks.rank != 0:
        yield
        return
    began_s = time.monotonic()
    done = threading.Event()

    def beat() -> None:
        while not done.wait(INTERVAL_S):
            ranks.say(f"still {what}, after {time.monotonic() - began_s:.0f} s")

    thread = threading.Thread(target=beat, name="reshard-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
