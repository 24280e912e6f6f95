"""Sections `load`, `save`, `small`, `replicated` and `async`: what ranks of a job do with checkpoints, in that job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from contest import Bench, remove, say
from jobs import COPY, RAW, STOCK, Job, measure_job, run_job
from processes import ContenderFailed
from record import Goal, Record
from shapes import Shapes, small_tensors, transformer

OURS, READER, WRITER = "ours", "RangeReader", "RangeWriter"
ALONE = ["torch.save", "safetensors"]
# Which formats they have on which world sizes is tried out.
GUESTS = ["torch_checkpointing", "bytecheckpoint", "torchsnapshot"]
TRIAL_PATIENCE_S = 90.0


def _against(section: str, other: str, ours: str, bound: float | None, **only: str) -> Goal:
    return Goal(section, f"{other} / {ours}", (other, "seconds"), (ours, "seconds"), False, bound, **only)


def _read(section: str, contender: str, bound: float | None, **only: str) -> Goal:
    text = f"{contender}: bytes read / needed"
    return Goal(section, text, (contender, "bytes_read"), (contender, "bytes"), True, bound, **only)


def _spread(contender: str, bound: float | None) -> Goal:
    return Goal("replicated", f"{contender}: written, most / mean", (contender, "most_over_mean"), None, True, bound)


GOALS = [
    _against("load", STOCK, OURS, 5.0, case="2 -> 8"),
    _against("load", STOCK, OURS, 2.5, case="8 -> 2"),
    _against("load", STOCK, OURS, 2.5, case="4 -> 4"),
    _against("load", STOCK, READER, 3.0, case="2 -> 8"),
    _against("load", STOCK, READER, None, case="8 -> 2"),
    _against("load", STOCK, READER, None, case="4 -> 4"),
    _read("load", OURS, 1.02),
    _read("load", READER, 1.02),
    _read("load", STOCK, None),
    _against("save", STOCK, OURS, None, where="disk"),
    _against("save", RAW, OURS, 0.9, where="disk"),
    _against("save", STOCK, OURS, 1.5, where="tmpfs"),
    _against("save", RAW, OURS, None, where="tmpfs"),
    _against("small", STOCK, OURS, 5.0, case="load"),
    _against("small", STOCK, OURS, 3.0, case="first save"),
    _against("small", STOCK, OURS, 5.0, case="second save"),
    _read("replicated", OURS, 1.02, case="load"),
    _read("replicated", STOCK, None, case="load"),
    _spread(OURS, 1.05),
    _spread(STOCK, None),
    Goal("async", f"{OURS} / {COPY}", (OURS, "seconds"), (COPY, "seconds"), True, 1.3),
    Goal("async", f"{STOCK} / {COPY}", (STOCK, "seconds"), (COPY, "seconds"), True, None),
]


def measure_load(bench: Bench) -> None:
    """From N ranks to M; files of other libraries as well as of DCP, each written by its own."""
    shapes = transformer(bench.gigabytes * 1e9)
    for old, new in ((2, 8), (8, 2), (4, 4)):
        case = f"{old} -> {new}"
        others = guests(bench.record, bench.places["disk"], case, "load" if old == new else "reshard")
        if old == new:
            others = [*ALONE, *others]
        with _written(bench, shapes, old, [STOCK, *others]) as source:
            contenders = [OURS, STOCK, READER, *others, RAW]
            job = Job("load", [case], shapes, [new], contenders, str(source), bench.repeats)
            measure_job(bench, "load", "disk", job)


def measure_save(bench: Bench) -> None:
    """On four ranks, into a folder that was not there before, durably."""
    shapes = transformer(bench.gigabytes * 1e9)
    for where, place in bench.places.items():
        others = guests(bench.record, bench.places["disk"], "save", "load")
        contenders = [OURS, STOCK, "stock, 4 threads", WRITER, *ALONE, *others, RAW]
        job = Job("save", ["4 ranks"], shapes, [4], contenders, str(place / "saves"), bench.repeats)
        measure_job(bench, "save", where, job)


def measure_small(bench: Bench) -> None:
    """10,000 tensors of 16 floats on four ranks."""
    shapes = small_tensors(max(1, round(10_000 * min(1.0, bench.gigabytes))))
    with _written(bench, shapes, 4, [STOCK, *ALONE]) as source:
        contenders = [OURS, STOCK, READER, *ALONE]
        measure_job(bench, "small", "disk", Job("load", ["load"], shapes, [4], contenders, str(source), bench.repeats))
    contenders = [OURS, STOCK, "stock, cached plan", WRITER, *ALONE]
    cases = ["first save", "second save"]
    folder = bench.places["disk"] / "saves"
    job = Job("save", cases, shapes, [4], contenders, str(folder), bench.repeats, new_layout=True)
    measure_job(bench, "small", "disk", job)


def measure_replicated(bench: Bench) -> None:
    """HSDP on 2 x 2 ranks of one node: every shard is on two of them."""
    shapes, mesh = transformer(bench.gigabytes * 1e9), [2, 2]
    with _written(bench, shapes, 2, [STOCK]) as source:
        job = Job("load", ["load"], shapes, mesh, [OURS, STOCK, READER, RAW], str(source), bench.repeats)
        measure_job(bench, "replicated", "disk", job)
    folder = str(bench.places["disk"] / "saves")
    job = Job("save", ["save"], shapes, mesh, [OURS, STOCK, WRITER, RAW], folder, bench.repeats)
    measure_job(bench, "replicated", "disk", job)


def measure_async(bench: Bench) -> None:
    """How long the step loop is held up by a save in the background, from the second one on."""
    shapes = transformer(bench.gigabytes * 1e9)
    others = [
        name for name in guests(bench.record, bench.places["disk"], "async", "load") if name == "torch_checkpointing"
    ]
    folder = str(bench.places["disk"] / "saves")
    job = Job("async", ["4 ranks"], shapes, [4], [OURS, STOCK, *others, COPY], folder, bench.repeats)
    measure_job(bench, "async", "disk", job)


@contextmanager
def _written(bench: Bench, shapes: Shapes, ranks: int, writers: Sequence[str]) -> Iterator[Path]:
    """A folder with a checkpoint in the format of each writer; removed afterwards."""
    folder = bench.places["disk"] / "sources"
    folder.mkdir()
    say(f"writing with {ranks} ranks: {', '.join(writers)}")
    try:
        run_job(Job("write", [], shapes, [ranks], list(writers), str(folder)))
        yield folder
    finally:
        remove(folder)


def guests(record: Record, folder: Path, case: str, ability: str) -> list[str]:
    """Contenders from the registry that can do something here; why others cannot is put on record."""
    able = []
    for name in GUESTS:
        if reason := _inabilities(folder, name).get(ability):
            place = {"section": "guests", "case": case, "where": "disk"}
            record.add(**place, contender=name, left_out=reason)
        else:
            able.append(name)
    return able


@cache
def _inabilities(folder: Path, name: str) -> Mapping[str, str]:
    """What a library cannot do here, and why: ``load`` what as many ranks saved, ``reshard`` what fewer saved."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return dict.fromkeys(("load", "reshard"), "not installed")
    say(f"trying {name} {found}")
    source = folder / "trial"
    source.mkdir()
    reasons = {}
    try:
        shapes = transformer(1e5, layers=1)
        run_job(Job("write", [], shapes, [2], [name], str(source)), TRIAL_PATIENCE_S)
        for ability, ranks in (("reshard", 4), ("load", 2)):
            lines = _trial(Job("load", ["trial"], shapes, [ranks], [name], str(source), 1))
            if faults := [line["failed"] for line in lines if "failed" in line]:
                reasons[ability] = f"{name} {found}: {faults[0]}"
            else:
                break
    except ContenderFailed as failure:
        reasons = dict.fromkeys(("load", "reshard"), f"{name} {found}: {failure}")
    finally:
        remove(source)
    return reasons


def _trial(job: Job) -> list[dict[str, str]]:
    try:
        return run_job(job, TRIAL_PATIENCE_S)
    except ContenderFailed as failure:
        return [{"failed": str(failure)}]
