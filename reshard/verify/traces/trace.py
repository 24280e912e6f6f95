"""The loss trace of a run: JSON lines, one an optimizer step, written by every attempt into the same file.

    {"step": 51, "loss": 2.71828, "lr": [0.0003], "grad_norm": 0.91, "scale": null, "ranks": 6, "accumulation": 6,
     "samples": 13056, "tokens_per_s": 41200.0, "attempt": "a1b2"}                            (all on one line)

Only `step` and `loss` are required, and further columns are ignored, so that the traces of other trainers can be read.
Floats are written in the shortest form that reads back to the same bits. A loss that is not finite is written as
Python's `json` does, as `NaN`, `Infinity` or `-Infinity`: strict JSON has no such numbers, and a loss that diverged is
not a loss that is missing.

An attempt that resumes at step S appends S+1, S+2 ... after whatever the killed attempt had written. A line
therefore withdraws every earlier line of its own step or a later one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from reshard.errors import StorageError, UsageError

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True)
class TraceRow:
    """One optimizer step. None (for `lr`, no entry) means that the trace does not say.

    Args:
        step: optimizer steps taken, this one included.
        loss: mean loss over the global batch.
        lr: learning rate of each parameter group in this step.
        grad_norm: norm of the gradient before clipping.
        scale: loss scale of mixed precision.
        ranks: data-parallel ranks.
        accumulation: micro-steps per rank.
        samples: samples trained on so far, over all attempts.
        tokens_per_s: throughput over all ranks.
        attempt: name of the attempt that wrote the line.
    """

    step: int
    loss: float
    lr: tuple[float, ...] = ()
    grad_norm: float | None = None
    scale: float | None = None
    ranks: int | None = None
    accumulation: int | None = None
    samples: int | None = None
    tokens_per_s: float | None = None
    attempt: str | None = None

    def to_json_line(self) -> str:
        """The row as one line, newline included: written in one call, a crash leaves a torn last line at worst."""
        return json.dumps(asdict(self)) + "\n"

    @classmethod
    def from_json(cls, fields: Mapping[str, object]) -> TraceRow:
        """A row from a parsed line.

        Raises:
            UsageError: no step, no loss, or a value of the wrong type; its key names the column.
        """
        attempt = fields.get("attempt")
        return cls(
            step=_required(_whole(fields, "step"), "step"),
            loss=_required(_real(fields, "loss"), "loss"),
            lr=_rates(fields),
            grad_norm=_real(fields, "grad_norm"),
            scale=_real(fields, "scale"),
            ranks=_whole(fields, "ranks"),
            accumulation=_whole(fields, "accumulation"),
            samples=_whole(fields, "samples"),
            tokens_per_s=_real(fields, "tokens_per_s"),
            attempt=None if attempt is None else str(attempt),
        )


def read_trace(path: str | os.PathLike[str]) -> list[TraceRow]:
    """The steps that count in a trace, ascending, each once.

    Superseded lines are left out (see the module's text), and so is a last line that was torn by a kill.

    Raises:
        UsageError: the file cannot be read, or a line that is whole is not a row.
    """
    return _read(path)[0]


def read_superseded(path: str | os.PathLike[str], resume_step: int) -> list[TraceRow]:
    """The steps past a resume as the attempt before had them, ascending: what its lines said until they were withdrawn.

    Of several attempts that resumed there, the last that was withdrawn.

    Raises:
        UsageError: as `read_trace`.
    """
    return _read(path)[1].get(resume_step + 1, [])


def _read(path: str | os.PathLike[str]) -> tuple[list[TraceRow], dict[int, list[TraceRow]]]:
    """The rows that count, and those that were withdrawn, by the step at which that was done."""
    rows: list[TraceRow] = []
    withdrawn: dict[int, list[TraceRow]] = {}
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip() or _is_torn(line):
                    continue
                row = _parse(line, f"{os.fspath(path)}:{number}")
                kept = len(rows)
                while kept and rows[kept - 1].step >= row.step:
                    kept -= 1
                if rows[kept:]:
                    withdrawn[row.step] = rows[kept:]
                    del rows[kept:]
                rows.append(row)
    except OSError as error:
        raise UsageError(f"cannot read the trace: {error.strerror}", path=path, hint="check the path") from error
    return rows, withdrawn


def mend_trace(path: str | os.PathLike[str]) -> None:
    """Make a trace safe to append to, whatever a killed attempt left at its end; a missing file is left missing.

    A torn last line is cut off, and a whole one without its newline gets it. Otherwise the next attempt's first line
    would be glued to it, and the trace be unreadable from there on.

    Raises:
        StorageError: the file cannot be read or written.
    """
    try:
        with Path(path).open("r+b") as file:
            tail = _unterminated_tail(file)
            if tail and _is_torn(tail):
                file.seek(-len(tail), os.SEEK_END)
                file.truncate()
            elif tail:
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(
            f"cannot mend the trace: {error.strerror}", path=path, hint="check its permissions"
        ) from error


def _unterminated_tail(file: BinaryIO, block_bytes: int = 4096) -> bytes:
    """What follows the last newline, read from the end: a trace may have millions of lines."""
    begin = file.seek(0, os.SEEK_END)
    tail = b""
    while begin > 0 and b"\n" not in tail:
        step_bytes = min(block_bytes, begin)
        begin -= step_bytes
        file.seek(begin)
        tail = file.read(step_bytes) + tail
    return tail.rpartition(b"\n")[2]


def _is_torn(line: bytes) -> bool:
    """Whether a kill cut this line short. A row is an object, no proper prefix of which is JSON."""
    if line.endswith(b"\n"):
        return False
    try:
        json.loads(line.decode())
    except (ValueError, RecursionError):
        return True
    return False


def _parse(line: bytes, place: str) -> TraceRow:
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError("not a line of JSON", path=place, hint="remove or mend the line") from error
    if not isinstance(fields, dict):
        raise UsageError("not a JSON object", path=place, found=type(fields).__name__, hint="remove or mend the line")
    try:
        return TraceRow.from_json(fields)
    except UsageError as error:
        error.path = place
        raise


def _required(value: _Number | None, column: str) -> _Number:
    if value is None:
        raise UsageError("every line of a trace needs this column", key=column, hint="add it, or remove the line")
    return value


def _whole(fields: Mapping[str, object], column: str) -> int | None:
    value = fields.get(column)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(column, "a whole number", value)
    return value


def _real(fields: Mapping[str, object], column: str) -> float | None:
    value = fields.get(column)
    return None if value is None else _float(value, column)


def _rates(fields: Mapping[str, object]) -> tuple[float, ...]:
    value = fields.get("lr")
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(_float(rate, "lr") for rate in value)
    # Trainers with one parameter group often log the bare number.
    return (_float(value, "lr"),)


def _float(value: object, column: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong_type(column, "a number", value)
    try:
        return float(value)
    except OverflowError:
        raise _wrong_type(column, "a number within the range of a float", value) from None


def _wrong_type(column: str, expected: str, value: object) -> UsageError:
    return UsageError("wrong type", key=column, expected=expected, found=repr(value)[:80])
