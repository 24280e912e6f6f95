"""A loss trace as CSV: a header with the names of the columns, then a row a step.

    "Step","brisk-sun-7 - train/loss","brisk-sun-7 - train/loss__MIN","brisk-sun-7 - train/loss__MAX"
    "1","2.71828","2.71828","2.71828"

The separator is a tab where the header has one outside of quotes, else a semicolon, else a comma. Fields may be in
double quotes, lines may end in CR LF, and the text is UTF-8 with or without a byte order mark. An empty cell means that
the row does not say. Every row has as many fields as the header. The one exception is a last row without a newline,
which a kill has cut short: it is left out, where that shows. A cut within the last cell does not show.
"""

from __future__ import annotations

import codecs
import csv
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from reshard.errors import UsageError
from reshard.verify.traces.table import Columns, Record, Table


def open_csv(path: str | os.PathLike[str]) -> Table:
    """A file of CSV as a table; rows are read later, and never held.

    Raises:
        UsageError: the header cannot be read.
    """
    separator = _separator(path)
    _, header = next(_lines(path, separator), (0, []))
    names = tuple(name.strip() for name in header)
    return Table(os.fspath(path), names, partial(_records, path, separator, names))


def _records(
    path: str | os.PathLike[str], separator: str, names: tuple[str, ...], columns: Columns
) -> Iterator[Record]:
    indices = {name: names.index(name) for each in columns.values() for name in each}
    lines = _lines(path, separator)
    next(lines)
    is_unterminated = _is_unterminated(path)
    held: tuple[int, list[str]] | None = None
    for line in lines:
        # One row is held back: only the last one may be torn.
        if held is not None:
            yield _record(path, names, indices, *held)
        held = line
    if held is not None and not (is_unterminated and len(held[1]) < len(names)):
        yield _record(path, names, indices, *held)


def _record(
    path: str | os.PathLike[str], names: tuple[str, ...], indices: dict[str, int], number: int, cells: list[str]
) -> Record:
    place = f"{os.fspath(path)}:{number}"
    if len(cells) != len(names):
        raise UsageError(
            "a row that does not fit the header",
            path=place,
            expected=f"{len(names)} fields",
            found=len(cells),
            hint="mend or remove the row",
        )
    return place, {name: cells[index] for name, index in indices.items()}


def _lines(path: str | os.PathLike[str], separator: str) -> Iterator[tuple[int, list[str]]]:
    """Every line that is not blank, with its number in the file; a last one that ends within quotes is left out."""
    with Path(path).open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=separator, strict=True)
        while True:
            begin = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except UnicodeDecodeError as error:
                raise UsageError("not text in UTF-8", path=path, hint="save it as UTF-8") from error
            except csv.Error as error:
                # Only of one line: a quote that was opened far above would take all lines since along.
                is_last_line = str(error) == "unexpected end of data" and begin == reader.line_num
                if is_last_line and begin > 1 and _is_unterminated(path):
                    return
                raise UsageError(
                    f"not a row of CSV: {error}", path=f"{os.fspath(path)}:{begin}", hint="mend or remove the row"
                ) from error
            if any(cell.strip() for cell in cells) or len(cells) > 1:
                yield begin, cells


def _separator(path: str | os.PathLike[str]) -> str:
    """By the header, outside of quotes: names of columns have commas more often than semicolons, and tabs never."""
    with Path(path).open("rb") as file:
        header = next((line for line in file if line.removeprefix(codecs.BOM_UTF8).strip()), b"")
    # Every other piece is within quotes; a quote doubled within quotes changes nothing in that.
    outside = b"".join(header.split(b'"')[::2])
    return "\t" if b"\t" in outside else ";" if b";" in outside else ","


def _is_unterminated(path: str | os.PathLike[str]) -> bool:
    with Path(path).open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) not in (b"\n", b"\r")
