"""Progress in bytes on stderr, where a person watches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(total_bytes: int, label: str) -> Iterator[Callable[[int], None] | None]:
    """Gives a function to call with every count of bytes done; None where stderr is no terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=total_bytes, desc=label, unit="B", unit_scale=True, leave=False, file=sys.stderr) as bar:
        turn = threading.Lock()

        def advance(count: int) -> None:
            with turn:
                bar.update(count)

        yield advance
