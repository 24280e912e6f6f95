"""A trace while it is being written: the steps that were added since the last look."""

from __future__ import annotations

import json
from pathlib import Path

from reshard.storage.durable import storage_errors
from reshard.verify.traces.trace import mend_trace


class TraceFollower:
    """The steps that one start of a run appends to a trace, as far as they are on the disk.

    Attributes:
        first: the first step that was added; None while there is none.
        last: the last one.
    """

    def __init__(self, path: Path) -> None:
        # What a killed start left torn would else be taken for the beginning of a line of this one.
        mend_trace(path)
        self.first: int | None = None
        self.last: int | None = None
        self._path = path
        self._read_bytes = path.stat().st_size if path.exists() else 0

    def look(self) -> bool:
        """Reads on; whether there was anything new."""
        with storage_errors("read the trace", self._path):
            if not self._path.exists():
                return False
            if self._path.stat().st_size < self._read_bytes:
                # Begun anew, which the comparison will tell.
                self._read_bytes = 0
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                added = file.read()
        # The last line may still be without its end.
        whole = added[: added.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        steps = [step for line in whole.splitlines() if (step := _step(line)) is not None]
        if not steps:
            return False
        self.first = steps[0] if self.first is None else self.first
        self.last = steps[-1]
        return True


def _step(line: bytes) -> int | None:
    """None for a line that is none of a trace, which reading all of it will tell."""
    try:
        step = json.loads(line.decode()).get("step")
    except (ValueError, AttributeError, RecursionError):
        return None
    return step if type(step) is int else None
