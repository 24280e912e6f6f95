"""Reading and writing traces: bits survive, and only the lines that count are read."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.verify.traces.trace import TraceRow, mend_trace, read_trace

floats = st.floats(allow_nan=True, allow_infinity=True)


def row(step: int, attempt: str = "A") -> TraceRow:
    return TraceRow(step, 1.0 / step, (3e-4, 3e-5), 0.5, None, 4, 2, step * 64, 1e5, attempt)


def write(path: Path, *parts: TraceRow | str) -> Path:
    path.write_text("".join(part if isinstance(part, str) else part.to_json_line() for part in parts))
    return path


@given(floats, st.lists(floats, max_size=3), st.none() | floats)
def test_floats_keep_their_bits(loss: float, lr: list[float], scale: float | None) -> None:
    before = TraceRow(1, loss, tuple(lr), scale, scale, 4, 2, 64, scale, "a")
    after = TraceRow.from_json(json.loads(before.to_json_line()))

    def bits(value: float | None) -> bytes:
        # The payload of a NaN is not kept, so all of them count as one.
        return b"" if value is None else b"nan" if math.isnan(value) else struct.pack("<d", value)

    assert bits(after.loss) == bits(before.loss)
    assert list(map(bits, after.lr)) == list(map(bits, before.lr))
    assert bits(after.scale) == bits(before.scale)


def test_a_row_is_one_line() -> None:
    line = TraceRow(7, math.nan, (1e-3,), attempt="a\nb").to_json_line()
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert '"loss": NaN' in line


def test_lines_in_order_are_read_as_they_are(tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 6)]
    assert read_trace(write(tmp_path / "t", *rows)) == rows
    assert read_trace(write(tmp_path / "empty")) == []


def test_a_later_attempt_supersedes_what_it_ran_again(tmp_path: Path) -> None:
    killed = [row(step, "A") for step in range(1, 58)]
    resumed = [row(step, "B") for step in range(51, 61)]
    assert read_trace(write(tmp_path / "t", *killed, *resumed)) == [*killed[:50], *resumed]


def test_steps_beyond_a_second_kill_are_stale(tmp_path: Path) -> None:
    killed = [row(step, "A") for step in range(1, 58)]
    killed_again = [row(step, "B") for step in range(51, 54)]
    assert read_trace(write(tmp_path / "t", *killed, *killed_again)) == [*killed[:50], *killed_again]


def test_an_attempt_from_an_earlier_checkpoint_supersedes_two(tmp_path: Path) -> None:
    lines = [row(1, "A"), row(2, "A"), row(3, "A"), row(3, "B"), row(4, "B"), row(2, "C")]
    assert read_trace(write(tmp_path / "t", *lines)) == [row(1, "A"), row(2, "C")]


@given(st.lists(st.integers(1, 12), max_size=30))
def test_the_steps_ascend_and_end_with_the_last_line(
    tmp_path_factory: pytest.TempPathFactory, steps: list[int]
) -> None:
    path = write(tmp_path_factory.mktemp("trace") / "t", *map(row, steps))
    found = [each.step for each in read_trace(path)]
    assert found == sorted(set(found))
    assert found[-1:] == steps[-1:]


@pytest.mark.parametrize("cut", range(1, len(row(2).to_json_line()) - 1))
def test_a_line_torn_by_a_kill_is_ignored_and_mended(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "t", row(1), row(2).to_json_line()[:cut])
    assert read_trace(path) == [row(1)]
    mend_trace(path)
    with path.open("a") as file:
        file.write(row(2, "B").to_json_line())
    assert read_trace(path) == [row(1), row(2, "B")]


def test_a_last_line_that_lacks_only_its_newline_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "t", row(1), row(2).to_json_line().rstrip())
    assert read_trace(path) == [row(1), row(2)]
    mend_trace(path)
    assert path.read_text().endswith("}\n")
    assert read_trace(path) == [row(1), row(2)]


def test_mending_leaves_a_sound_trace_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "t", row(1), row(2))
    before = path.read_bytes()
    mend_trace(path)
    assert path.read_bytes() == before
    mend_trace(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_mending_finds_the_start_of_a_long_torn_line(tmp_path: Path) -> None:
    path = write(tmp_path / "t", row(1), '{"step": 2, "note": "' + "x" * 10_000)
    mend_trace(path)
    assert read_trace(path) == [row(1)]


def test_a_torn_line_may_be_cut_inside_a_character(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(row(1).to_json_line().encode() + '{"attempt": "é'.encode()[:-1])
    assert read_trace(path) == [row(1)]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"step": 2, "lo\n', "not a line of JSON"),
        ("[" * 100_000 + "\n", "not a line of JSON"),
        ("[2, 0.5]\n", "not a JSON object"),
        ('{"loss": 0.5}\n', "step: every line of a trace needs this column"),
        ('{"step": 2}\n', "loss: every line of a trace needs this column"),
        ('{"step": 2.5, "loss": 1}\n', "step: wrong type"),
        ('{"step": 2, "loss": "low"}\n', "loss: wrong type"),
        ('{"step": 2, "loss": true}\n', "loss: wrong type"),
        ('{"step": 2, "loss": 1, "lr": [null]}\n', "lr: wrong type"),
        ('{"step": 2, "loss": 1' + "0" * 400 + "}\n", "loss: wrong type"),
    ],
)
def test_a_malformed_line_is_named_with_its_number(tmp_path: Path, line: str, what: str) -> None:
    path = write(tmp_path / "t", row(1), line, row(3))
    with pytest.raises(UsageError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: {what}")


def test_a_trace_of_another_trainer(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t", '{"step": 1, "loss": 2, "lr": 0.1, "perplexity": 9}\n', "\n", '{"step":2,"loss":1.5}\n'
    )
    assert read_trace(path) == [TraceRow(1, 2.0, (0.1,)), TraceRow(2, 1.5)]
    assert read_trace(path)[1].ranks is None


def test_a_missing_file_is_a_usage_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match="cannot read the trace") as caught:
            read_trace(path)
        assert caught.value.exit_code == 2
