"""Sections `reshard`, `memory` and `small`: bytes moved from N ranks to M, by reshard, by cp and by stock torch."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from functools import cache
from pathlib import Path

from contest import DESTINATION, Bench, Contender, folder_bytes, remove
from processes import RESHARD, Finished, run, script, torchrun
from record import Goal
from shapes import small_tensors, transformer, with_a_large_tensor

CASES = ((2, (8,)), (8, (2, 8)), (4, (3,)))
DEFAULT_BUDGET_BYTES = 256 << 20
LEAST_BUDGET_BYTES = 4 << 20
BESIDE_BUDGET_BYTES = 128 << 20
# What cp does not do, and reshard does: every file and folder is on the disk before it ends.
COPY = 'cp -r "$0" "$1" && find "$1" -exec sync {} +'

GOALS = [
    Goal("reshard", "reshard / cp and fsync", ("reshard", "seconds"), ("cp", "seconds"), True, 1.0),
    Goal("reshard", "one file / reshard", ("one file", "inside_s"), ("reshard", "seconds"), False, 3.0),
    Goal("reshard", "one file / reshard, with imports", ("one file", "seconds"), ("reshard", "seconds"), False, None),
    Goal("reshard", "torchrun / reshard", ("torchrun", "inside_s"), ("reshard", "seconds"), False, 3.0),
    Goal("reshard", "torchrun / reshard, with imports", ("torchrun", "seconds"), ("reshard", "seconds"), False, None),
    Goal("reshard", "memory / allowed", ("reshard", "peak_above_bytes"), ("reshard", "allowed_bytes"), True, 1.0),
    Goal("reshard", "bytes read / needed", ("reshard", "bytes_read"), ("reshard", "bytes_to_read"), True, 1.02),
    Goal("memory", "memory / allowed", ("reshard", "peak_above_bytes"), ("reshard", "allowed_bytes"), True, 1.0),
    Goal("memory", "memory / budget", ("reshard", "peak_above_bytes"), ("reshard", "budget_bytes"), True, None),
    Goal("small", "all / half of them", ("reshard", "seconds"), ("reshard, half of them", "seconds"), True, 2.3),
    Goal("small", "torchrun / reshard", ("torchrun", "inside_s"), ("reshard", "seconds"), False, 10.0),
    Goal("small", "torchrun / reshard, with imports", ("torchrun", "seconds"), ("reshard", "seconds"), False, None),
]


def measure_reshard(bench: Bench) -> None:
    """N ranks to M, on the disk and on tmpfs, against `cp -r` and against both ways of stock torch."""
    shapes = transformer(bench.gigabytes * 1e9)
    for old_ranks, worlds in CASES:
        with bench.checkpoint("disk", f"from-{old_ranks}", shapes, old_ranks) as written:
            for where, work in bench.places.items():
                with ExitStack() as stack:
                    source = work / written.name
                    if source != written:
                        stack.callback(remove, source)
                        shutil.copytree(written, source)
                    for new_ranks in worlds:
                        contenders = _all_contenders(bench, source, work / DESTINATION, new_ranks)
                        bench.contest("reshard", f"{old_ranks} -> {new_ranks}", where, contenders, warm=[source])


def _all_contenders(bench: Bench, source: Path, destination: Path, ranks: int) -> dict[str, Contender]:
    length = folder_bytes(source)
    contenders = {
        "reshard": _reshard(source, destination, ranks, DEFAULT_BUDGET_BYTES),
        "cp": Contender(["sh", "-c", COPY, source, destination], moved_bytes=length),
    }
    if bench.with_torch:
        through = script("stock.py", "through-one-file", source, destination)
        contenders["one file"] = Contender(through, {"note": "cannot target a number of ranks"}, length)
        contenders["torchrun"] = _torchrun(source, destination, ranks, length)
    return contenders


def _reshard(source: Path, destination: Path, ranks: int, budget_bytes: int) -> Contender:
    command = [*RESHARD, "offline", source, destination, "--world-size", ranks, "--json"]
    interpreter = _interpreter()
    fields = {
        "interpreter_s": interpreter.seconds,
        "interpreter_bytes": interpreter.report["peak_bytes"],
        "budget_bytes": budget_bytes,
        "allowed_bytes": budget_bytes + BESIDE_BUDGET_BYTES,
    }
    return Contender([*command, "--memory", f"{budget_bytes >> 10}K"], fields, folder_bytes(source))


@cache
def _interpreter() -> Finished:
    """What a process with the imports of `reshard offline` takes before it does anything."""
    return run(script("inside.py", "imports"))


def _torchrun(source: Path, destination: Path, ranks: int, length: int = 0) -> Contender:
    command = torchrun(ranks, script("stock.py", "load-save", source, destination))
    return Contender(command, {"ranks": ranks}, length)


def measure_memory(bench: Bench) -> None:
    """A checkpoint of ten times the budget, with tensors, and chunks of tensors, that are larger than the budget."""
    budget_bytes = max(LEAST_BUDGET_BYTES, round(bench.gigabytes * 1e8))
    work = bench.places["disk"]
    with bench.checkpoint("disk", "ten-budgets", with_a_large_tensor(budget_bytes), 2) as source:
        contender = _reshard(source, work / DESTINATION, 3, budget_bytes)
        bench.contest("memory", "2 -> 3", "disk", {"reshard": contender}, warm=[source])


def measure_small(bench: Bench) -> None:
    """10,000 tensors of 16 floats, each shared by eight ranks, and half as many."""
    count = bench.scaled(10_000)
    destination = bench.places["disk"] / DESTINATION
    with (
        bench.checkpoint("disk", "small", small_tensors(count), 8) as source,
        bench.checkpoint("disk", "half", small_tensors(count // 2), 8) as half,
    ):
        contenders = {
            "reshard": _reshard(source, destination, 3, DEFAULT_BUDGET_BYTES),
            "reshard, half of them": _reshard(half, destination, 3, DEFAULT_BUDGET_BYTES),
            "reshard, its phases": Contender(script("inside.py", "phases", source, destination, 3)),
        }
        if bench.with_torch:
            contenders["torchrun"] = _torchrun(source, destination, 3)
        bench.contest("small", f"8 -> 3, {count} tensors", "disk", contenders, warm=[source, half])
