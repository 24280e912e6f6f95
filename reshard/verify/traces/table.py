"""A table of another trainer as rows of a trace, whatever kind of file it came from.

Trainers write more than one kind of record into a table: a step, a validation, a learning rate by itself. So records
without a loss are left out, and records of the same step that follow each other and say different things are one row.
As in our own traces, a row withdraws every earlier row of its own step or a later one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import UsageError
from reshard.verify.traces.trace import TraceRow

Record = tuple[str, Mapping[str, object]]
"""Where a record is, for errors, and its cells by column. None and blank text mean that a cell says nothing."""

Columns = Mapping[str, Sequence[str]]
"""By field of a `TraceRow`, the columns that hold it."""

_Cells = dict[str, tuple[str, object]]

_NUMBER = re.compile(
    r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf|infinity|nan)", re.ASCII | re.IGNORECASE
)
_DIGITS = re.compile(r"[+-]?[0-9]{1,20}", re.ASCII)


@dataclass(frozen=True)
class Table:
    """A table before its columns are understood.

    Args:
        path: the file or folder.
        names: its columns; none where it is empty.
        records: reads the cells of the given columns, in the order in which they were written.
        is_ours: whether this is a trace as we write it, which is read strictly while no column is named.
    """

    path: str
    names: tuple[str, ...]
    records: Callable[[Columns], Iterator[Record]]
    is_ours: bool = False


def rows_of(table: Table, columns: Columns) -> list[TraceRow]:
    """The steps that count, ascending, each once.

    Args:
        table: the table.
        columns: from `choose_columns`; the step and the loss are among them.

    Raises:
        UsageError: a row has a loss and no step, or a value that its field cannot have.
    """
    (step_name,) = columns["step"]
    wanted = [name for names in columns.values() for name in names]
    rows: list[TraceRow] = []
    cells: _Cells = {}
    for place, record in table.records(columns):
        said = {name: (place, record[name]) for name in wanted if not _is_blank(record.get(name))}
        if not said.keys() - {step_name}:
            continue
        if _continues(cells, said, step_name):
            cells.update(said)
        else:
            _append(rows, cells, columns)
            cells = said
    _append(rows, cells, columns)
    return rows


def _is_blank(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _continues(cells: _Cells, said: _Cells, step_name: str) -> bool:
    if step_name not in cells or step_name not in said or cells[step_name][1] != said[step_name][1]:
        return False
    return cells.keys() & said.keys() == {step_name}


def _append(rows: list[TraceRow], cells: _Cells, columns: Columns) -> None:
    if columns["loss"][0] not in cells:
        return
    row = _row(cells, columns)
    while rows and rows[-1].step >= row.step:
        rows.pop()
    rows.append(row)


def _row(cells: _Cells, columns: Columns) -> TraceRow:
    step_name, loss_name = columns["step"][0], columns["loss"][0]
    if step_name not in cells:
        raise UsageError("a row with a loss needs its step", path=cells[loss_name][0], key=step_name, hint=_MEND)
    # Any, for the types of the values follow from the names of the fields.
    values: dict[str, Any] = {}
    for field, names in columns.items():
        said = [(name, *cells[name]) for name in names if name in cells]
        if field == "lr":
            values[field] = tuple(rate for each in said for rate in _rates(*each))
        elif said:
            values[field] = _READERS.get(field, _real)(*said[0])
    return TraceRow(**values)


_MEND = "mend or remove the row, or choose another column with --column FIELD=NAME"


def _real(name: str, place: str, value: object) -> float:
    try:
        if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
            return float(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    except OverflowError:
        pass
    raise _wrong_type(name, place, "a number", value)


def _whole(name: str, place: str, value: object) -> int:
    # Digits are read as they are: a float holds whole numbers exactly only up to 2**53.
    if isinstance(value, str) and _DIGITS.fullmatch(value.strip()):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = _real(name, place, value)
    if not number.is_integer():
        raise _wrong_type(name, place, "a whole number", value)
    return int(number)


def _rates(name: str, place: str, value: object) -> tuple[float, ...]:
    rates = value if isinstance(value, list) else [value]
    return tuple(_real(name, place, rate) for rate in rates)


def _text(name: str, place: str, value: object) -> str:
    return value if isinstance(value, str) else str(value)


_READERS: Mapping[str, Callable[[str, str, object], object]] = {
    **dict.fromkeys(("step", "ranks", "accumulation", "samples"), _whole),
    "attempt": _text,
}


def _wrong_type(name: str, place: str, expected: str, value: object) -> UsageError:
    return UsageError("wrong type", path=place, key=name, expected=expected, found=repr(value)[:80], hint=_MEND)
