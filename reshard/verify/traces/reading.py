"""The loss trace of any trainer. The kind of a file is told by what is in it, and not by its name:

| what is there | read as |
|---|---|
| a folder | the TensorBoard event files directly in it |
| a record with a sound checksum | a TensorBoard event file |
| `{`, and a first line with every column that we write | our own trace, strictly (`trace.py`) |
| `{`, and a first line that is an object or torn | JSON lines of another trainer |
| `{` alone on its line, or an object with `log_history` | the state of a Hugging Face Trainer |
| `[` | a JSON list of records |
| other text | CSV |

A file without anything in it is a trace without rows.
"""

from __future__ import annotations

import json
import os
import stat
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from reshard.errors import UsageError
from reshard.verify.traces.columns import FIELDS, check_fields, choose_columns, list_columns
from reshard.verify.traces.csv_table import open_csv
from reshard.verify.traces.json_table import LOG, open_json_lines, open_json_value
from reshard.verify.traces.table import Table, rows_of
from reshard.verify.traces.tensorboard import event_files, is_event_file, open_event_files
from reshard.verify.traces.trace import TraceRow, read_superseded, read_trace


def read_run(path: str | os.PathLike[str], columns: Mapping[str, str] | None = None) -> list[TraceRow]:
    """The steps that count in one trace, ascending, each once.

    Args:
        path: a file of any kind above, or a folder of event files.
        columns: from field of a `TraceRow` to column, where a table's own names do not say.

    Raises:
        UsageError: the trace cannot be read, its columns cannot be told, or it does not have one of `columns`.
    """
    return read_runs([path], columns)[0]


def read_runs(
    paths: Sequence[str | os.PathLike[str]], columns: Mapping[str, str] | None = None
) -> list[list[TraceRow]]:
    """Likewise for several traces of any kinds: each of `columns` is taken in those that have it, one at least."""
    wanted = dict(columns or {})
    check_fields(wanted)
    # Tables are opened first, which is cheap for CSV: a wrong column is told before anything is read in full.
    tables = []
    for path in paths:
        with _readable(path):
            tables.append(_open(path, wanted))
    _check_columns(tables, wanted)
    runs = []
    for path, table in zip(paths, tables, strict=True):
        with _readable(path):
            runs.append(_rows(path, table, wanted))
    return runs


def read_attempt_before(path: str | os.PathLike[str], resume_step: int) -> list[TraceRow]:
    """The steps past a resume as the attempt before had them, of a trace of ours; none of another trainer's.

    Raises:
        UsageError: the trace cannot be read.
    """
    with _readable(path):
        is_ours = Path(path).is_file() and _open(path, {}).is_ours
    return read_superseded(path, resume_step) if is_ours else []


def _rows(path: str | os.PathLike[str], table: Table, wanted: Mapping[str, str]) -> list[TraceRow]:
    fitting = {field: name for field, name in wanted.items() if name in table.names}
    if table.is_ours and not fitting:
        return read_trace(path)
    if not table.names:
        return []
    return rows_of(table, choose_columns(table.names, fitting, table.path))


def _check_columns(tables: Sequence[Table], wanted: Mapping[str, str]) -> None:
    # A trace without anything in it lacks no column.
    filled = [table for table in tables if table.names]
    for field, name in wanted.items():
        if filled and not any(name in table.names for table in filled):
            raise UsageError(
                "no such column",
                path=filled[0].path if len(filled) == 1 else None,
                key=f"{field}={name}",
                hint="name one of those there are",
                details=[f"{table.path}: {list_columns(table.names)}" for table in filled],
            )


def _open(path: str | os.PathLike[str], wanted: Mapping[str, str]) -> Table:
    mode = Path(path).stat().st_mode
    if stat.S_ISDIR(mode):
        return _open_folder(path)
    if not stat.S_ISREG(mode):
        # A pipe can be read once, so nothing can be told of it before.
        return _ours(path)
    with Path(path).open("rb") as file:
        head = file.read(4096)
        if is_event_file(head):
            return open_event_files(path, [path])
        if b"\0" in head:
            # Told before a line is looked for, which in a large file of weights may be long in coming.
            raise UsageError(
                "not a trace",
                path=path,
                expected="JSON lines, CSV or TensorBoard events",
                found="binary data",
                hint="check the path",
            )
        file.seek(0)
        first = next((line for line in file if line.removeprefix(BOM_UTF8).strip()), b"")
    text = first.removeprefix(BOM_UTF8).strip()
    if not text:
        return Table(os.fspath(path), (), lambda _: iter(()))
    if text.startswith(b"["):
        return open_json_value(path)
    if text.startswith(b"{"):
        return _open_objects(path, text, wanted)
    return open_csv(path)


def _open_objects(path: str | os.PathLike[str], first: bytes, wanted: Mapping[str, str]) -> Table:
    if first == b"{":
        return open_json_value(path)
    try:
        record = json.loads(first.decode())
    except (ValueError, RecursionError):
        # Torn, and nothing before it, or not JSON, which the strict reader tells.
        return _ours(path)
    if isinstance(record.get(LOG), list):
        return open_json_value(path)
    if not record.keys() >= set(FIELDS):
        return open_json_lines(path)
    # Reading all names takes as long as reading the trace, and they matter only where one is asked for.
    return replace(open_json_lines(path), is_ours=True) if wanted else _ours(path)


def _ours(path: str | os.PathLike[str]) -> Table:
    return Table(os.fspath(path), (), lambda _: iter(()), is_ours=True)


def _open_folder(path: str | os.PathLike[str]) -> Table:
    files = event_files(path)
    if not files:
        below = sorted({str(file.parent) for file in Path(path).glob("*/*tfevents*") if file.is_file()})
        raise UsageError(
            "cannot read the trace: a folder without TensorBoard event files",
            path=path,
            hint="name a file, or a folder that has events.out.tfevents files in it",
            details=[f"{folder} has some" for folder in below],
        )
    return open_event_files(path, files)


@contextmanager
def _readable(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot read the trace: {error.strerror}", path=path, hint="check the path") from error
