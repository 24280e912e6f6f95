"""Runs a function on several ranks: real processes with gloo, forked from one server that has torch imported."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_context = multiprocessing.get_context("forkserver")
# Imported once in the server: a rank then starts in milliseconds.
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.testing._internal.distributed.fake_pg",
        "torch.utils.data",
        "reshard.train.checkpointer",
        "reshard.train.accumulate",
    ]
)

TIMEOUT_S = 120.0


class RankFailed(AssertionError):
    """At least one rank raised; the message holds each traceback."""


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
    """Calls ``function(*args)`` on ``world`` ranks at once and returns their results in rank order.

    ``function`` must be importable (module level), arguments and results picklable. A rank that dies without a
    result gives ``None`` when it was killed by a signal on purpose (SIGKILL), else the call fails.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes = [
            _context.Process(target=_run_rank, args=(rank, world, folder, function, args), name=f"rank-{rank}")
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        hung = _join(processes, timeout_s)
        outcomes = [_outcome(process, Path(folder) / f"result-{rank}") for rank, process in enumerate(processes)]
        outcomes = [(None, "hung, and was killed") if rank in hung else told for rank, told in enumerate(outcomes)]
    failures = [f"rank {rank}:\n{text}" for rank, (_, text) in enumerate(outcomes) if text]
    if failures:
        raise RankFailed("\n".join(failures))
    return [result for result, _ in outcomes]


def _join(processes: list[BaseProcess], timeout_s: float) -> set[int]:
    """Waits for all; the numbers of those that did not end."""
    deadline = time.monotonic() + timeout_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        # A rank that is gone leaves the others waiting in a collective for ever.
        if any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + 10.0)
        for process in processes:
            process.join(0.02)
    hung = {rank for rank, process in enumerate(processes) if process.is_alive()}
    for rank in hung:
        processes[rank].kill()
        processes[rank].join()
    return hung


def _outcome(process: BaseProcess, path: Path) -> tuple[Any, str | None]:
    if path.exists():
        return pickle.loads(path.read_bytes())
    if process.exitcode == -9:
        return None, None
    return None, f"no result, exit code {process.exitcode}"


def _run_rank(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    try:
        outcome = (function(*args), None)
    except BaseException:
        outcome = (None, traceback.format_exc())
    part = Path(folder) / f"part-{rank}"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(Path(folder) / f"result-{rank}")
    if outcome[1] is not None:
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
