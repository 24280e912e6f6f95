"""A loss trace as JSON of another trainer.

Either JSON lines, an object a record, as our own traces are but with other columns; or one JSON value for the whole
file: a list of such objects, or an object that has one under `log_history`, which is the `trainer_state.json` of the
Hugging Face Trainer. Objects within a record are not looked into.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from reshard.errors import UsageError
from reshard.verify.traces.table import Columns, Record, Table

LOG = "log_history"


def open_json_lines(path: str | os.PathLike[str]) -> Table:
    """A file of JSON lines as a table; it is read once for the names of the columns, and again for the rows.

    Raises:
        UsageError: a line that is whole is not a JSON object.
    """
    names = dict.fromkeys(name for _, record in _line_records(path) for name in record)
    return Table(os.fspath(path), tuple(names), lambda _: _line_records(path))


def open_json_value(path: str | os.PathLike[str]) -> Table:
    """A file that is one JSON value as a table.

    Raises:
        UsageError: it is not JSON, or none of the values that the module's text describes.
    """
    try:
        value = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise UsageError("not JSON", path=path, hint="copy it anew from where it is whole") from error
    records = value.get(LOG) if isinstance(value, dict) else value
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise UsageError(
            "not a trace",
            path=path,
            expected=f"a list of JSON objects, or an object that has one under {LOG}",
            found=f"a JSON {type(value).__name__}",
            hint="name a file of JSON lines, CSV or TensorBoard events",
        )
    names = dict.fromkeys(name for record in records for name in record)
    return Table(os.fspath(path), tuple(names), partial(_listed_records, os.fspath(path), records))


def _listed_records(path: str, records: Sequence[dict[str, object]], _: Columns) -> Iterator[Record]:
    for index, record in enumerate(records):
        yield f"{path}: record {index}", record


def _line_records(path: str | os.PathLike[str]) -> Iterator[Record]:
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{os.fspath(path)}:{number}"
            try:
                record = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return  # torn by a kill
                raise UsageError("not a line of JSON", path=place, hint="remove or mend the line") from error
            if not isinstance(record, dict):
                raise UsageError(
                    "not a JSON object", path=place, found=type(record).__name__, hint="remove or mend the line"
                )
            yield place, record
