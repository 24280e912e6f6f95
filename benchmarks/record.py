"""What was measured, as lines of JSON, and what that says: ratios within a repeat, goals met and missed, a table."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

Line = dict[str, Any]
Value = tuple[str, str]
"""A contender and a field of its lines."""


class Record:
    """Collects lines, and writes each as it comes.

    A line of a measurement has ``section``, ``case``, ``where``, ``contender``, ``repeat`` and ``seconds``, or instead
    of these last ``failed``, or ``left_out``: why it took no part.
    """

    def __init__(self, out: TextIO) -> None:
        self.lines: list[Line] = []
        self._out = out

    def add(self, **fields: Any) -> None:
        """Adds a line; floats are cut to what can be told apart."""
        rounded = {name: float(f"{v:.5g}") if isinstance(v, float) else v for name, v in fields.items()}
        self.lines.append(rounded)
        self._out.write(json.dumps(rounded) + "\n")
        self._out.flush()


@dataclass(frozen=True)
class Goal:
    """A bound on the ratio of two values of a section, or on one value.

    Attributes:
        at_most: the ratio may not be above ``bound``; else not below.
        bound: None where the issue asks for the number only.
        case, where: the only ones that the goal is about; by default all.
    """

    section: str
    text: str
    over: Value
    under: Value | None
    at_most: bool
    bound: float | None
    case: str | None = None
    where: str | None = None

    def found(self, lines: Sequence[Line]) -> Iterator[Line]:
        """For each case and place, the median over the repeats."""
        groups: dict[tuple[str, str], dict[int, dict[Value, float]]] = {}
        for line in lines:
            if "repeat" not in line or not self._is_about(line):
                continue
            for contender, field in (self.over, self.under or self.over):
                if line["contender"] == contender and field in line:
                    repeats = groups.setdefault((line["case"], line["where"]), {})
                    repeats.setdefault(line["repeat"], {})[contender, field] = line[field]
        for (case, where), repeats in groups.items():
            needed = (self.over,) if self.under is None else (self.over, self.under)
            ratios = [
                values[self.over] / (1 if self.under is None else values[self.under])
                for values in repeats.values()
                if all(value in values for value in needed)
            ]
            if ratios:
                yield self._line(case, where, ratios)

    def _is_about(self, line: Line) -> bool:
        wanted = (self.section, self.case or line["case"], self.where or line["where"])
        return wanted == (line["section"], line["case"], line["where"])

    def _line(self, case: str, where: str, ratios: list[float]) -> Line:
        median = statistics.median(ratios)
        fields: Line = {"section": self.section, "case": case, "where": where, "ratio": self.text}
        fields |= {"each": [float(f"{ratio:.4g}") for ratio in ratios], "median": median}
        if self.bound is None:
            return fields
        met = median <= self.bound if self.at_most else median >= self.bound
        return {**fields, "bound": f"{'<=' if self.at_most else '>='} {self.bound:g}", "met": met}


class Column(NamedTuple):
    """A column of the table: its title, the field that it shows, and what that is multiplied by."""

    title: str
    field: str
    factor: float = 1.0


def medians(lines: Sequence[Line], columns: Sequence[Column]) -> Iterator[list[str]]:
    """Rows: what was measured, and the medians of what was found."""
    yield ["section", "case", "where", "contender", *(column.title for column in columns)]
    for names, group in by_contender(lines).items():
        if failures := [line["failed"] for line in group if "failed" in line]:
            yield [*names, f"failed: {failures[0][:60]}", *[""] * (len(columns) - 1)]
        elif any("repeat" in line for line in group):
            found = ((median_of(group, column.field), column.factor) for column in columns)
            yield [*names, *("" if value is None else _number(value * factor) for value, factor in found)]


def by_contender(lines: Sequence[Line]) -> dict[tuple[str, ...], list[Line]]:
    """Section, case, place and contender -> the lines of all repeats."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        if "contender" in line:
            groups.setdefault(tuple(line[name] for name in ("section", "case", "where", "contender")), []).append(line)
    return groups


def verdicts(lines: Sequence[Line]) -> Iterator[list[str]]:
    """Rows: each ratio, with its bound and whether it was met."""
    yield ["section", "case", "where", "ratio", "found", "bound", ""]
    for line in lines:
        if "ratio" in line:
            verdict = "" if "met" not in line else "met" if line["met"] else "MISSED"
            names = [line[name] for name in ("section", "case", "where", "ratio")]
            yield [*names, _number(line["median"]), line.get("bound", ""), verdict]


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def median_of(group: Sequence[Line], field: str) -> float | None:
    """Of the lines that have the field."""
    values = [line[field] for line in group if field in line]
    return statistics.median(values) if values else None


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"
