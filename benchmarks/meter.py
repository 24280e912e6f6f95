"""What an operation costs a rank: time between two barriers, CPU, bytes read from files, memory beside the state."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from contest import files_of
from memory import forget_peak, peak_bytes, resident_bytes

_DCP_FILE = re.compile(r"__([0-9]+)_[0-9]+\.distcp")


class Used(NamedTuple):
    """By one rank.

    Attributes:
        seconds: from a barrier to the end of the operation.
        together_s: from a barrier to one after it: until all ranks are done.
        cpu_s: of all threads.
        bytes_read: by system calls that read files; what is mapped is not seen, what comes from sockets not counted.
        peak_above_bytes: resident memory at most, above what there was before.
    """

    seconds: float
    together_s: float
    cpu_s: float
    bytes_read: int
    peak_above_bytes: int


def metered(
    operation: Callable[[], Any],
    settle: Callable[[], None] = lambda: None,
    afterwards: Callable[[Any], None] = lambda _: None,
) -> Used:
    """Runs an operation. Collective.

    Args:
        settle: what is to be done once all ranks have ended it; counts as well.
        afterwards: gets its result; counts for memory only.

    Raises:
        Exception: that of the operation, once all ranks are done.
    """
    forget_peak()
    before_bytes, before_read = resident_bytes(), _bytes_read()
    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    result, fault = None, None
    try:
        result = operation()
    except Exception as error:
        fault = error
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    ended = time.perf_counter()
    dist.barrier()
    settle()
    dist.barrier()
    together, cpu_s, read = time.perf_counter(), time.process_time() - cpu, _bytes_read() - before_read
    if fault is not None:
        raise fault
    afterwards(result)
    return Used(ended - started, together - started, cpu_s, read, max(0, peak_bytes() - before_bytes))


def most_over_mean(folder: Path, ranks: int) -> float | None:
    """Of the bytes that each rank wrote of a DCP checkpoint, the most over the mean; None for files of other kinds."""
    by_rank = [0] * ranks
    for path in files_of(folder):
        if match := _DCP_FILE.fullmatch(path.name):
            by_rank[int(match[1])] += path.stat().st_size
    return max(by_rank) * ranks / sum(by_rank) if any(by_rank) else None


def _bytes_read() -> int:
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar: "))
