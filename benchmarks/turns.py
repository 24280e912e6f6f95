"""What the ranks of a job do, under torchrun: the contenders' turns, each between two barriers, each checked.

    torchrun --nproc-per-node=N turns.py JOB      a file that `jobs.Job.read` takes

Loads find zeros, and their files in the page cache; saves find no folder, and nothing left to flush.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contest import DESTINATION, files_of, folder_bytes, read_all, remove
from guests import GUESTS
from jobs import Job
from known_state import KnownState
from libraries import LIBRARIES, Library
from meter import Used, metered, most_over_mean
from shapes import state_bytes
from torch.distributed.device_mesh import init_device_mesh

ALL = {**LIBRARIES, **GUESTS}
# A rank that fails alone leaves the others waiting, for so long.
_PATIENCE = datetime.timedelta(minutes=5)


class Turns:
    """The turns of a job, on this rank."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._folder = Path(job.folder)
        self._rank = dist.get_rank()
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            torch.cuda.set_device(self._rank % torch.cuda.device_count())
        axes = tuple(f"axis {number}" for number in range(len(job.mesh)))
        self._mesh = init_device_mesh(device, tuple(job.mesh), mesh_dim_names=axes)
        self._state = KnownState(job.shapes, self._mesh)
        self._out_of_order: set[str] = set()

    def run(self) -> None:
        """All of them, each time another contender first."""
        if self._job.action == "write":
            for name in self._job.contenders:
                library = ALL[name]
                assert library.save is not None
                library.save(library.adapt(self._state.tensors), self._folder / library.format)
            return
        for repeat in range(-1, self._job.repeats):
            if self._job.new_layout:
                self._state = KnownState(self._job.shapes, self._mesh, f"layout {repeat}.")
            turn = max(0, repeat) % len(self._job.contenders)
            for name in self._job.contenders[turn:] + self._job.contenders[:turn]:
                for case in self._job.cases:
                    if name not in self._out_of_order:
                        self._turn(repeat, name, case)

    def _turn(self, repeat: int, name: str, case: str) -> None:
        """One contender's; one that fails on any rank, or does wrong, gets no further turn."""
        library = ALL[name]
        folder = self._folder / (library.format if self._job.action == "load" else DESTINATION)
        state = library.adapt(self._state.tensors)
        self._prepare(folder)
        used, fault = None, None
        try:
            used = self._measured(library, state, folder)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        # Those whose save goes on in the background wait for the others' here.
        dist.barrier()
        fault = fault or self._fault(library, folder)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (used, fault))
        faults = [f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(told) if theirs]
        line: dict[str, Any] = {"case": case, "contender": name}
        if faults:
            self._out_of_order.add(name)
            line["failed"] = "; ".join(faults[:4])
        else:
            line |= {"repeat": repeat, **_of_all([theirs for theirs, _ in told], self._job.action == "async")}
            # The others must not look: the next turn may remove it already.
            is_written = self._rank == 0 and self._job.action != "load"
            if is_written and (ratio := most_over_mean(folder, len(told))):
                line["most_over_mean"] = ratio
        if self._rank == 0 and (faults or repeat >= 0):
            with Path(self._job.results).open("a") as results:
                results.write(json.dumps(line) + "\n")

    def _prepare(self, folder: Path) -> None:
        if self._job.action == "load":
            self._state.forget()
            if self._rank == 0:
                read_all(folder)
        elif self._rank == 0:
            remove(folder)
            folder.parent.mkdir(exist_ok=True)
            os.sync()

    def _measured(self, library: Library, state: Any, folder: Path) -> Used:
        if self._job.action == "load":
            assert library.load is not None
            return metered(partial(library.load, state, folder))
        if self._job.action == "save":
            assert library.save is not None
            settle = partial(_fsync, folder) if not library.is_durable else _nothing
            return metered(partial(library.save, state, folder), settle)
        assert library.start_saving is not None
        return metered(partial(library.start_saving, state, folder), afterwards=lambda wait: wait())

    def _fault(self, library: Library, folder: Path) -> str | None:
        """What is wrong with what was loaded or saved."""
        if library.is_raw:
            return None
        if self._job.action == "load":
            wrong = self._state.wrong()
            return f"wrong content: {', '.join(wrong[:3])}" if wrong else None
        found, expected = folder_bytes(folder), state_bytes(self._job.shapes)
        return f"wrote {found} bytes only, not {expected}" if found < expected else None


def _nothing() -> None:
    pass


def _fsync(folder: Path) -> None:
    """Each rank some of the files that are there."""
    for path in files_of(folder)[dist.get_rank() :: dist.get_world_size()]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _of_all(used: list[Used], is_async: bool) -> dict[str, float]:
    """What the ranks used together; of a save in the background the time that the slowest was held up."""
    return {
        "seconds": max(rank.seconds if is_async else rank.together_s for rank in used),
        "cpu_s": sum(rank.cpu_s for rank in used),
        "bytes_read": sum(rank.bytes_read for rank in used),
        "peak_above_bytes": max(rank.peak_above_bytes for rank in used),
    }


def main() -> None:
    """Takes part as one rank."""
    job = Job.read(sys.argv[1])
    dist.init_process_group("gloo", timeout=_PATIENCE)
    Turns(job).run()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
