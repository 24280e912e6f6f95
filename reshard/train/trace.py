"""Writing the trace: one JSON line a step, appended over all attempts of a run."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TextIO

from reshard.dcp.ranks import all_ranks
from reshard.environment import Orders
from reshard.storage.durable import storage_errors
from reshard.verify.traces.trace import TraceRow, mend_trace


class TraceWriter:
    """Appends rows to a trace file. Rank 0 writes; other ranks may call everything and write nothing.

    ``RESHARD_TRACE``, where it is set, names another file than ``path`` (see :class:`reshard.environment.Orders`).

    What an attempt wrote before it was killed stays; lines of a later attempt supersede those past the step it
    resumed at (see :func:`reshard.verify.traces.trace.read_trace`).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(Orders.given().trace or path).expanduser().absolute()
        self._file: TextIO | None = None
        if all_ranks().rank == 0:
            with storage_errors("open the trace", self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                mend_trace(self.path)
                self._file = self.path.open("a", encoding="utf-8")

    def write(self, row: TraceRow) -> None:
        """Appends a row.

        Raises:
            StorageError: the file system refused.
        """
        if self._file is not None:
            with storage_errors("write the trace", self.path):
                self._file.write(row.to_json_line())
                # A killed run keeps every step it finished.
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with storage_errors("write the trace", self.path):
                self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
