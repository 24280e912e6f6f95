"""Loss traces of other trainers: columns, CSV, JSON and TensorBoard files, held against the rows they came from."""

from __future__ import annotations

import csv
import json
import math
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import UsageError
from reshard.verify.traces.columns import choose_columns
from reshard.verify.traces.reading import read_run, read_runs
from reshard.verify.traces.trace import TraceRow, read_trace

ROOT = Path(__file__).parents[2]


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def chosen(*names: str, **wanted: str) -> dict[str, tuple[str, ...]]:
    return choose_columns(names, wanted, "t")


def fault(path: Path, columns: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        read_run(path, columns)
    assert caught.value.hint
    return str(caught.value)


@pytest.mark.parametrize(
    ("names", "step", "loss"),
    [
        (["loss", "step", "train/loss", "global_step"], "step", "loss"),
        (["Step", "brisk-sun-7 - train/loss", "brisk-sun-7 - train/loss__MIN"], "Step", "brisk-sun-7 - train/loss"),
        (["Step", "a - b - Loss", "a - b - Loss__MAX"], "Step", "a - b - Loss"),
        (["_step", "train/global_step", "train/loss", "eval/loss"], "train/global_step", "train/loss"),
        (["Step", "run - _step", "run - _step__MIN", "run - loss"], "Step", "run - loss"),
        (["iteration", "lm loss", "lm loss validation", "lm loss vs samples"], "iteration", "lm loss"),
        (["step", "loss", "train_loss", "eval_loss"], "step", "loss"),
        (["step", "train/loss", "train/train_loss", "eval/loss"], "step", "train/loss"),
        (["epoch", "step", "train_loss_step", "train_loss_epoch", "val_loss"], "step", "train_loss_step"),
    ],
)
def test_the_step_and_the_loss_are_told_by_their_names(names: list[str], step: str, loss: str) -> None:
    for order in (names, names[::-1]):
        found = chosen(*order)
        assert (found["step"], found["loss"]) == ((step,), (loss,))


def test_other_columns_are_told_by_their_names() -> None:
    names = ["train/learning_rate", "Grad Norm", "loss-scale", "world_size", "consumed-samples", "tokens/sec", "epoch"]
    found = chosen("step", "loss", *names)
    assert [found[field][0] for field in ("lr", "grad_norm", "scale", "ranks", "samples", "tokens_per_s")] == names[:-1]
    assert found.keys().isdisjoint({"accumulation", "attempt"})


@pytest.mark.parametrize(
    "groups",
    [
        ["lr-AdamW"],
        ["lr-AdamW/pg1", "lr-AdamW/pg2", "lr-AdamW/pg10"],
        ["run - lr-Adam", "run - lr-Adam-1"],
        ["lr/group_0", "lr/group_1"],
        ["train/lr_0", "train/lr_1"],
    ],
)
def test_groups_may_have_a_learning_rate_each_in_the_order_of_their_numbers(groups: list[str]) -> None:
    noise = ["lr-decay", "lr-AdamW/pg1-momentum", "lr-AdamW-weight_decay"]
    assert chosen("step", "loss", *groups[::-1], *noise)["lr"] == tuple(groups)


@pytest.mark.parametrize(
    ("names", "field"),
    [
        (["step", "train_loss", "training loss"], "loss"),
        (["step", "run-1 - loss", "run-2 - loss"], "loss"),
        (["step", "loss", "loss"], "loss"),
        (["global_step", "train/global_step", "loss"], "step"),
        (["step", "loss", "learning_rate", "train/lr"], "lr"),
        (["step", "loss", "run-1 - lr-AdamW", "run-2 - lr-AdamW"], "lr"),
        (["step", "loss", "gradient_norm", "train/grad_norm"], "grad_norm"),
    ],
)
def test_columns_that_fit_equally_are_an_error_and_not_a_guess(names: list[str], field: str) -> None:
    with pytest.raises(UsageError, match=f"t: several columns may be the {field}: found '") as caught:
        chosen(*names)
    assert f"--column {field}=NAME" in str(caught.value)
    assert all(repr(name) in caught.value.details[0] for name in names)


@pytest.mark.parametrize(
    "loss", ["eval_loss", "eval/loss", "val_loss", "valid - loss", "Eval - train/loss", "run - loss__MIN", "test_loss"]
)
def test_another_loss_is_not_taken_unless_it_is_named(loss: str) -> None:
    with pytest.raises(UsageError, match="t: no column is known to be the loss; name it with --column loss=NAME"):
        chosen("step", loss)
    assert chosen("step", loss, loss=loss)["loss"] == (loss,)


def test_a_column_that_is_named_wins() -> None:
    assert chosen("step", "loss", "ema", loss="ema")["loss"] == ("ema",)
    with pytest.raises(UsageError, match="no column is known to be the step"):
        chosen("epoch", "loss")
    with pytest.raises(UsageError, match="several columns may be the loss"):
        chosen("step", "ema", "ema", loss="ema")
    with pytest.raises(UsageError, match="and 12 more"):
        chosen(*(f"layer{n}/norm" for n in range(112)))


def test_an_export_of_weights_and_biases(tmp_path: Path) -> None:
    text = (
        '"Step","brisk-sun-7 - train/loss","brisk-sun-7 - train/loss__MIN","brisk-sun-7 - train/loss__MAX"\n'
        '"1","2.5","2.5","2.5"\n'
        '"2","","",""\n'
        '"3","NaN","NaN","NaN"\n'
        '"4","0.1","0.1","0.1"'
    )
    rows = read_run(write(tmp_path / "wandb_export.csv", text))
    assert [row.step for row in rows] == [1, 3, 4]
    assert [rows[0].loss, rows[2].loss] == [2.5, 0.1] and math.isnan(rows[1].loss)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_the_dialects_of_csv(tmp_path: Path, separator: str, end: str, mark: str) -> None:
    lines = [
        ["step", "loss", "lr", '"a, b; ""c"""', "samples", "grad_norm", "attempt"],
        ["1", "2.5", "1e-3", '"1, 2; 3"', "64.0", " .5", "é"],
        ["2", "-Infinity", "", '"two', 'lines"', "9007199254740993", "", ""],
    ]
    rows = [separator.join(lines[0]), separator.join(lines[1])]
    # The last record has a line break within quotes.
    rows.append(separator.join(lines[2][:3]) + separator + '"two\nlines"' + separator + separator.join(lines[2][5:]))
    path = write(tmp_path / "t", mark + end.join(["", *rows, "", ""]))
    assert read_run(path) == [
        TraceRow(1, 2.5, (1e-3,), grad_norm=0.5, samples=64, attempt="é"),
        TraceRow(2, -math.inf, samples=9007199254740993),
    ]


@pytest.mark.parametrize(
    ("text", "step"),
    [("step;loss, nats;loss\n1;2;3\n", 1), ("step\tloss;a\tloss\n1\t2\t3\n", 1), ('step,"a;b\tc",loss\n1,2,3\n', 1)],
)
def test_the_separator_is_told_by_the_header(tmp_path: Path, text: str, step: int) -> None:
    assert read_run(write(tmp_path / "t", text)) == [TraceRow(step, 3.0)]


@pytest.mark.parametrize("cut", range(1, len('"3","0.5","0.01"')))
def test_a_row_of_csv_torn_by_a_kill_is_ignored(tmp_path: Path, cut: int) -> None:
    row = '"3","0.5","0.01"'
    path = write(tmp_path / "t", '"step","loss","lr"\n"2","1.5","0.02"\n' + row[:cut])
    found = read_run(path)
    # Cut after the separator, the last cell is there and empty; only such a row has all of its fields.
    assert found[:1] == [TraceRow(2, 1.5, (0.02,))]
    assert found[1:] == ([TraceRow(3, 0.5)] if row[:cut].endswith('5",') else [])


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("2,0.5,1\n", "{}:3: a row that does not fit the header: expected 2 fields, found 3"),
        ("2\n", "{}:3: a row that does not fit the header: expected 2 fields, found 1"),
        (",0.5\n", "{}:3: step: a row with a loss needs its step"),
        ("2,low\n", "{}:3: loss: wrong type: expected a number, found 'low'"),
        ('2,"0,5"\n', "{}:3: loss: wrong type: expected a number, found '0,5'"),
        ("2,1_0\n", "{}:3: loss: wrong type: expected a number, found '1_0'"),
        ("2.5,1\n", "{}:3: step: wrong type: expected a whole number, found '2.5'"),
        ("inf,1\n", "{}:3: step: wrong type: expected a whole number, found 'inf'"),
        ('"2"x,1\n', "{}:3: not a row of CSV"),
        ('2,"1\n', "{}:3: not a row of CSV: unexpected end of data"),
    ],
)
def test_a_malformed_row_of_csv_is_named_with_its_number(tmp_path: Path, line: str, what: str) -> None:
    rest = "" if '"1\n' in line else "3,0.5\n"
    path = write(tmp_path / "t", "step,loss\n1,2.5\n" + line + rest)
    assert fault(path).startswith(what.format(path))


def test_an_open_quote_far_above_the_end_is_not_a_torn_row(tmp_path: Path) -> None:
    path = write(tmp_path / "t", 'step,loss\n1,2.5\n2,"1.5\n3,0.5\n4,0.')
    assert fault(path).startswith(f"{path}:3: not a row of CSV")


def test_a_later_row_supersedes_and_records_of_a_step_are_one_row(tmp_path: Path) -> None:
    text = "step,lr-SGD,train_loss,val_loss\n1,.1,,\n1,,4,\n2,.2,,\n2,,3,\n3,,2,\n,,,9\n2,.5,,\n2,,1,\n2,,,7\n"
    assert read_run(write(tmp_path / "t", text)) == [TraceRow(1, 4.0, (0.1,)), TraceRow(2, 1.0, (0.5,))]


def test_a_table_without_rows_and_a_file_without_anything(tmp_path: Path) -> None:
    assert read_run(write(tmp_path / "t", "step,loss\n")) == []
    assert read_run(write(tmp_path / "t", "")) == []
    assert read_run(write(tmp_path / "t", "\ufeff\n \n"), {"loss": "x"}) == []
    assert read_run(write(tmp_path / "t", '{"st')) == []


def test_what_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"PK\x03\x04\0\0 data \xff")
    assert "not a trace: expected JSON lines, CSV or TensorBoard events, found binary data" in fault(path)
    path.write_bytes("step,loss,größe\n".encode("latin-1"))
    assert fault(path) == f"{path}: not text in UTF-8; save it as UTF-8"
    assert fault(write(path, "1,2.5\n2,1.5\n")).startswith(f"{path}: no column is known to be the step")
    assert fault(tmp_path / "missing").startswith(f"{tmp_path / 'missing'}: cannot read the trace")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "events.out.tfevents.1.h").touch()
    found = fault(tmp_path)
    assert found.startswith(f"{tmp_path}: cannot read the trace: a folder without TensorBoard event files")
    assert f"{tmp_path / 'below'} has some" in found


def ours(count: int = 3) -> list[TraceRow]:
    return [TraceRow(s, 1 / s, (3e-4, 3e-5), 0.5, None, 4, 2, s * 64, 1e5, "A") for s in range(1, count + 1)]


def test_our_own_trace_is_read_as_strictly_as_before(tmp_path: Path) -> None:
    lines = "".join(row.to_json_line() for row in ours())
    path = write(tmp_path / "t", lines)
    assert read_run(path) == read_trace(path) == ours()
    write(path, lines + '{"step": 4}\n')
    assert fault(path).startswith(f"{path}:4: loss: every line of a trace needs this column")
    write(path, lines + '{"step": "4", "loss": 1}\n')
    with pytest.raises(UsageError, match=":4: step: wrong type"):
        read_run(path)
    assert fault(write(path, '{"step": 4, \n')).startswith(f"{path}:1: not a line of JSON")


def test_json_lines_with_other_columns(tmp_path: Path) -> None:
    records = [
        {"_step": 0, "eval/loss": 9.0, "train/global_step": 0},
        {"_step": 1, "train/loss": 2, "train/global_step": 10.0, "train/learning_rate": [0.1, 0.01], "note": {"a": 1}},
        {"_step": 2, "eval/loss": 8.0, "train/global_step": 10},
        {"_step": 3, "train/loss": "NaN", "train/global_step": 20, "train/grad_norm": None},
    ]
    path = write(tmp_path / "t", "".join(json.dumps(record) + "\n" for record in records) + '{"train/loss": 3, "tr')
    first, second = read_run(path)
    assert first == TraceRow(10, 2.0, (0.1, 0.01))
    assert second.step == 20 and math.isnan(second.loss)
    assert [row.step for row in read_run(path, {"step": "_step"})] == [1, 3]
    assert [row.loss for row in read_run(path, {"loss": "eval/loss"})] == [9.0, 8.0]


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("[2, 0.5]\n", "{}:2: not a JSON object"),
        ('{"step": 2, "lo\n', "{}:2: not a line of JSON"),
        ('{"train_loss": 0.5}\n', "{}:2: step: a row with a loss needs its step"),
        ('{"step": 2, "train_loss": true}\n', "{}:2: train_loss: wrong type: expected a number, found True"),
        ('{"step": 2, "train_loss": 1' + "0" * 400 + "}\n", "{}:2: train_loss: wrong type: expected a number"),
        ('{"step": 2, "train_loss": 1, "lr": [null]}\n', "{}:2: lr: wrong type: expected a number, found None"),
        ('{"step": 2, "train_loss": 1, "samples": 0.5}\n', "{}:2: samples: wrong type: expected a whole number"),
    ],
)
def test_a_malformed_line_of_json_is_named_with_its_number(tmp_path: Path, line: str, what: str) -> None:
    path = write(tmp_path / "t", '{"step": 1, "train_loss": 2}\n' + line + '{"step": 3, "train_loss": 1}\n')
    assert fault(path).startswith(what.format(path))


@pytest.mark.parametrize("indent", [None, 2])
def test_the_state_of_a_hugging_face_trainer(tmp_path: Path, indent: int | None) -> None:
    log = [
        {"epoch": 0.1, "grad_norm": 0.7, "learning_rate": 1e-4, "loss": 2.5, "step": 10},
        {"epoch": 0.1, "eval_loss": 3.5, "step": 10},
        {"epoch": 0.2, "grad_norm": 0.6, "learning_rate": 9e-5, "loss": 2.25, "step": 20},
        {"epoch": 0.2, "train_loss": 2.375, "train_runtime": 3.0, "step": 20},
    ]
    state = {"best_metric": None, "global_step": 20, "log_history": log}
    rows = [TraceRow(10, 2.5, (1e-4,), 0.7), TraceRow(20, 2.25, (9e-5,), 0.6)]
    assert read_run(write(tmp_path / "trainer_state.json", json.dumps(state, indent=indent))) == rows
    assert read_run(write(tmp_path / "log.json", json.dumps(log, indent=indent))) == rows


def test_json_that_is_not_a_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    assert "expected a list of JSON objects" in fault(write(path, '{\n"a": 1\n}'))
    assert "expected a list of JSON objects" in fault(write(path, "[1, 2]"))
    assert fault(write(path, '{\n"log_history": [')).startswith(f"{path}: not JSON")
    log = [{"step": 1, "loss": 1}, {"step": 2, "loss": []}]
    assert fault(write(path, json.dumps(log))).startswith(f"{path}: record 1: loss: wrong type")


def test_a_column_is_taken_in_the_traces_that_have_it(tmp_path: Path) -> None:
    own = write(tmp_path / "own", "".join(row.to_json_line() for row in ours(1)))
    table = write(tmp_path / "table", "Step,score\n1,0.25\n")
    assert read_runs([own, table], {"loss": "score"}) == [ours(1), [TraceRow(1, 0.25)]]
    assert read_runs([own, own], {"loss": "grad_norm"})[0][0].loss == 0.5
    with pytest.raises(UsageError, match="lost: not a field of a trace: expected one of step, loss, lr,"):
        read_run(table, {"lost": "score"})
    with pytest.raises(UsageError, match="loss=points: no such column") as caught:
        read_runs([own, table], {"loss": "points"})
    assert len(caught.value.details) == 2 and caught.value.details[1].endswith("its columns are 'Step', 'score'")
    assert fault(own, {"loss": "points"}).startswith(f"{own}: loss=points: no such column")
    assert "'Step', 'score'" in fault(table, {"lr": "points"})


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    lines = "".join(row.to_json_line() for row in ours())
    code = "import sys; from reshard.verify.traces.reading import read_run; print(len(read_run('/dev/stdin')))"
    result = subprocess.run([sys.executable, "-c", code], input=lines, capture_output=True, text=True, cwd=ROOT)
    assert (result.stdout, result.stderr) == ("3\n", "")


numbers = st.floats(allow_nan=False)
some_rows = st.lists(
    st.builds(
        TraceRow,
        step=st.integers(0, 40),
        loss=numbers,
        lr=st.tuples(numbers, numbers) | st.just(()),
        grad_norm=st.none() | numbers,
        ranks=st.none() | st.integers(1, 2**60),
        samples=st.none() | st.integers(0, 2**60),
        attempt=st.none() | st.sampled_from(["a", "b, c", 'd"e', "f;\tg"]),
    ),
    min_size=1,
    max_size=20,
)


@given(some_rows, st.sampled_from(",;\t"))
def test_json_lines_and_csv_read_to_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[TraceRow], separator: str
) -> None:
    folder = tmp_path_factory.mktemp("both")
    lines = write(folder / "lines", "".join(row.to_json_line() for row in rows))
    with (folder / "csv").open("w", newline="") as file:
        writer = csv.writer(file, delimiter=separator)
        writer.writerow(
            ["lr-A/pg1", "lr-A/pg2", "loss", "global_step", "grad norm", "world_size", "samples", "attempt"]
        )
        for row in rows:
            rates = row.lr or ("", "")
            writer.writerow([*rates, row.loss, row.step, row.grad_norm, row.ranks, row.samples, row.attempt])
    assert read_run(folder / "csv") == read_run(lines) == read_trace(lines)


# Pieces that files of the kinds above are made of, put together in any way.
PIECES = [b"step", b"loss", b'"', b",", b";", b"\t", b"\n", b"\r\n", b"1", b".5", b"nan", b"{", b"}", b"[", b"]", b": "]
PIECES += [
    b'{"step": 1, "train_loss": 2}',
    b"\xef\xbb\xbf",
    b"\xff",
    b"\0",
    b"log_history",
    b"step,loss\n",
    b" - ",
    b"__MIN",
]


@given(st.lists(st.sampled_from(PIECES), max_size=25))
def test_any_file_is_rows_or_a_usage_error(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("any") / "t"
    path.write_bytes(b"".join(pieces))
    try:
        steps = [row.step for row in read_run(path)]
    except UsageError as error:
        assert error.path is not None and str(error).startswith(str(path))
    else:
        assert steps == sorted(set(steps))


def attempt(
    folder: Path, losses: Mapping[int, float], *, tag: str = "train/loss", begun_s: float = 1.0, **writing: bool
) -> Path:
    """An event file as torch writes it, with the loss, a learning rate and a histogram at every step."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    import torch
    from torch.utils.tensorboard import SummaryWriter

    before = set(folder.glob("*"))
    with SummaryWriter(str(folder), filename_suffix=f".{len(before)}") as writer:
        for step, loss in losses.items():
            writer.add_scalar("train/lr", loss / 8, step, **writing)
            writer.add_scalar(tag, loss, step, walltime=begun_s, **writing)
            writer.add_histogram("weights", torch.ones(3), step)
            writer.add_text("note", "some", step)
            # Counted in samples, so it is of no step.
            writer.add_scalar(f"{tag} vs samples", loss, step * 64, **writing)
    (path,) = set(folder.glob("*")) - before
    return path


def losses(first: int, last: int, scale: float = 1.0) -> dict[int, float]:
    return {step: scale / step for step in range(first, last + 1)}


def single(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def rows_of(losses: Mapping[int, float]) -> list[TraceRow]:
    return [TraceRow(step, single(loss), (single(loss / 8),)) for step, loss in losses.items()]


@pytest.mark.parametrize("is_new", [False, True])
def test_event_files_that_torch_writes(tmp_path: Path, is_new: bool) -> None:
    written = losses(1, 30)
    path = attempt(tmp_path, written, new_style=is_new)
    assert read_run(tmp_path) == read_run(path) == rows_of(written)
    moved = path.rename(tmp_path / "some.log")
    assert read_run(moved) == rows_of(written)


def test_a_scalar_of_more_bits_keeps_them(tmp_path: Path) -> None:
    path = attempt(tmp_path, losses(1, 3), new_style=True, double_precision=True)
    assert [row.loss for row in read_run(path)] == [1.0, 1 / 2, 1 / 3]


def test_the_attempts_of_a_run_supersede_each_other_in_the_order_they_began(tmp_path: Path) -> None:
    runs = [losses(1, 9), losses(6, 8, 2.0), losses(7, 12, 3.0)]
    files = [attempt(tmp_path, run) for run in runs]
    (tmp_path / "events.out.tfevents.0.host").touch()
    for position, path in enumerate(files):
        path.rename(tmp_path / f"{9 - position}.tfevents.{path.name}")
    kept = {**losses(1, 5), 6: 2 / 6, **losses(7, 12, 3.0)}
    assert read_run(tmp_path) == rows_of(kept)


def test_a_value_of_an_earlier_attempt_is_not_taken_for_a_later_one(tmp_path: Path) -> None:
    attempt(tmp_path, losses(1, 4))
    events(tmp_path / "x.tfevents.2", [(3, {"train/loss": 5.0}), (4, {"train/loss": 6.0})], begun_s=4e9)
    assert read_run(tmp_path) == [*rows_of(losses(1, 2)), TraceRow(3, 5.0), TraceRow(4, 6.0)]


def events(path: Path, scalars: Sequence[tuple[int, Mapping[str, float]]], begun_s: float = 1.0) -> Path:
    """An event file through the writer of the tensorboard package, scalars as TensorFlow 2 stores them."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.record_writer import RecordWriter

    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=begun_s, file_version="brain.Event:2").SerializeToString())
        for step, values in scalars:
            summary = Summary()
            for tag, value in values.items():
                tensor = TensorProto(dtype="DT_FLOAT", tensor_content=struct.pack("<f", value))
                summary.value.add(tag=tag, tensor=tensor).metadata.plugin_data.plugin_name = "scalars"
            hparams = summary.value.add(tag="_hparams_/experiment", tensor=TensorProto(dtype="DT_FLOAT", float_val=[0]))
            hparams.metadata.plugin_data.plugin_name = "hparams"
            writer.write(Event(wall_time=begun_s, step=step, summary=summary).SerializeToString())
    return path


def test_event_files_as_tensorflow_writes_them(tmp_path: Path) -> None:
    # All losses first, then all rates: values belong together by their steps.
    scalars = [(step, {"loss": 1 / step}) for step in range(1, 5)]
    scalars += [(step, {"lr-SGD/pg1": 0.5, "lr-SGD/pg2": 0.25, "ranks": 4.0, "step": 7.0}) for step in range(2, 5)]
    found = read_run(events(tmp_path / "t", scalars))
    assert found[0] == TraceRow(1, 1.0)
    assert found[1:] == [TraceRow(step, single(1 / step), (0.5, 0.25), ranks=4) for step in range(2, 5)]


def test_every_step_is_read_where_tensorboard_would_keep_a_sample(tmp_path: Path) -> None:
    path = events(tmp_path / "t", [(step, {"loss": 1.0}) for step in range(10_500)])
    assert [row.step for row in read_run(path)] == list(range(10_500))


def test_a_file_that_goes_back_withdraws_its_own_steps(tmp_path: Path) -> None:
    scalars = [(1, {"loss": 4.0}), (2, {"loss": 3.0}), (3, {"loss": math.nan}), (2, {"loss": 2.0})]
    assert read_run(events(tmp_path / "t", scalars)) == [TraceRow(1, 4.0), TraceRow(2, 2.0)]


def test_a_tag_is_named_and_tags_are_listed(tmp_path: Path) -> None:
    path = events(tmp_path / "t", [(1, {"score": 2.0, "half": 0.5})])
    assert read_run(path, {"loss": "score"}) == [TraceRow(1, 2.0)]
    assert "its columns are 'step', 'score', 'half'" in fault(path)
    assert fault(path, {"loss": "score", "ranks": "half"}).startswith(f"{path}: step 1: half: wrong type")
    assert read_run(events(path, [])) == []


def test_an_event_file_torn_by_a_kill_is_read_to_its_last_whole_record(tmp_path: Path) -> None:
    data = events(tmp_path / "t", [(1, {"loss": 4.0}), (2, {"loss": 3.0})]).read_bytes()
    path = tmp_path / "torn"
    counts = []
    for size_bytes in range(12, len(data) + 1):
        path.write_bytes(data[:size_bytes])
        counts.append(len(read_run(path)))
    assert counts == sorted(counts) and set(counts) == {0, 1, 2} and counts.count(2) == 1


def test_damage_within_an_event_file_is_an_error(tmp_path: Path) -> None:
    whole = events(tmp_path / "events.out.tfevents.1", [(1, {"loss": 4.0}), (2, {"loss": 3.0})])
    data = whole.read_bytes()
    for offset in range(len(data)):
        whole.write_bytes(data[:offset] + bytes([data[offset] ^ 0x10]) + data[offset + 1 :])
        assert "does not match its checksum; copy the file anew" in fault(tmp_path)


def test_records_that_are_not_events_are_an_error(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.summary.writer.record_writer import RecordWriter

    path = tmp_path / "t"
    with path.open("wb") as file:
        RecordWriter(file).write(b"\xff\xff\xff")
    assert fault(path).startswith(f"{path}: byte 0: a record that is not a TensorBoard event")


BLOCKED = """
import sys
for name in {blocked}:
    sys.modules[name] = None
from reshard.cli.main import main
code = main(["compare-traces", *sys.argv[1:]])
assert not {unwanted} & {{name for name, module in sys.modules.items() if module is not None}}
sys.exit(code)
"""


def compare_without(blocked: str, unwanted: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    code = BLOCKED.format(blocked=blocked, unwanted=unwanted)
    return subprocess.run([sys.executable, "-c", code, *map(str, paths)], capture_output=True, text=True, cwd=ROOT)


def test_event_files_without_the_package_are_a_usage_error(tmp_path: Path) -> None:
    # The head of a record of 24 bytes, as every event file begins with; no package writes it here.
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(bytes.fromhex("1800000000000000a37f4b22") + bytes(28))
    result = compare_without("['tensorboard']", "set()", tmp_path, path)
    assert result.returncode == 2
    assert "reading TensorBoard event files needs tensorboard; pip install 'reshard[tensorboard]'" in result.stderr
    table = write(tmp_path / "t.csv", "step,loss\n1,2\n")
    assert compare_without("['tensorboard']", "set()", table, table).returncode == 0


def test_event_files_are_read_quietly_and_without_torch(tmp_path: Path) -> None:
    path = events(tmp_path / "events.out.tfevents.1", [(1, {"loss": 4.0})])
    result = compare_without("['torch', 'tensorflow']", "{'numpy'}", tmp_path, path)
    assert (result.returncode, result.stderr) == (0, "")
