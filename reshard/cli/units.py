"""Quantities as people read them: decimal units, so GB is 1e9 bytes, as disks and networks count them."""

from __future__ import annotations

from collections.abc import Sequence


def bytes_text(count: int) -> str:
    """``1.23 GB``; below 1000 the exact number of bytes."""
    return f"{count} B" if count < 1000 else _scaled(count, ("kB", "MB", "GB", "TB", "PB", "EB"))


def count_text(count: int) -> str:
    """``1.23 B`` for 1 234 567 890 parameters, as models are named; below 1000 the exact number."""
    return str(count) if count < 1000 else _scaled(count, ("k", "M", "B", "T"))


def plural(count: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def some(names: Sequence[str], most: int = 5) -> str:
    """The first few names, and how many more."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "  ") -> list[str]:
    """Lines with aligned columns; the columns in ``right`` are aligned to the right."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(_padded(cell, widths[at], at in right) for at, cell in enumerate(row))).rstrip()
        for row in rows
    ]


def _padded(cell: str, width: int, right: bool) -> str:
    return cell.rjust(width) if right else cell.ljust(width)


def _scaled(count: int, units: Sequence[str]) -> str:
    number = count / 1000
    for unit in units[:-1]:
        # Below, not at 1000: the next unit takes what would be rounded up to it.
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.4g} {units[-1]}"
