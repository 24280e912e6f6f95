"""Measures parts of reshard that no command line shows, each in a process of its own.

inside.py imports                       what the interpreter costs with the imports of `reshard offline`, in memory
inside.py phases SRC DST RANKS          an offline rewrite, with the time of each step
inside.py write-metadata FOLDER CHUNKS  a `.metadata` of so many chunks, without data
inside.py open FOLDER                   opening a checkpoint
inside.py plan LAYERS FROM TO [metadata]
                                        planning Llama 3.1 405B, or some layers of it, from one world size to another
inside.py crc FOLDER                    zlib's CRC-32 of all files in one thread, as `python -m zipfile -t` does it

Prints one JSON object: `inside_s` is the time without the start of the interpreter and imports.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from memory import peak_bytes
from shapes import Shapes, llama_405b

import reshard.cli.main
import reshard.cli.progress
import reshard.rewrite.prepare as prepare
import reshard.rewrite.run as offline
from reshard.formats.dcp_metadata import FILE_NAME
from reshard.formats.dcp_metadata_writer import metadata_bytes
from reshard.formats.dcp_output import lay_out_dcp
from reshard.formats.opening import open_checkpoint
from reshard.geometry.mesh import Mesh, shard_rows
from reshard.index.index import ARCHIVE, Index
from reshard.plan import make_plan, sharded_layout
from reshard.storage.shared_work import SharedWork


def imports() -> dict[str, Any]:
    """Nothing but the imports above."""
    with reshard.cli.progress.byte_progress(0, ""):
        return {"peak_bytes": peak_bytes()}


class Stopwatch:
    """Seconds by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its time added to a name."""

        def call(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                self.seconds[f"{name}_s"] += time.perf_counter() - started

        return call


# The steps of a rewrite: name, and what is called for it.
PHASES: list[tuple[str, object, str]] = [
    ("open", prepare, "open_checkpoint"),
    ("open", prepare, "require_files"),
    ("plan", prepare, "select"),
    ("plan", prepare, "stored_whole"),
    ("plan", prepare, "sharded_layout"),
    ("plan", prepare, "make_plan"),
    ("lay_out", prepare, "lay_out_dcp"),
    ("metadata", prepare, "metadata_bytes"),
    ("write", offline, "write_segments"),
    ("finish", offline, "finish"),
    ("commit", SharedWork, "commit"),
]


def phases(source: str, destination: str, ranks: str) -> dict[str, Any]:
    """One rewrite. What is in no phase is `rest_s`."""
    watch = Stopwatch()
    for phase, owner, name in PHASES:
        setattr(owner, name, watch.timed(phase, getattr(owner, name)))
    started = time.perf_counter()
    offline.run(prepare.prepare(source, Mesh(int(ranks))), Path(destination))
    inside = time.perf_counter() - started
    return {"inside_s": inside, **watch.seconds, "rest_s": inside - sum(watch.seconds.values())}


def write_metadata(folder: str, chunks: str) -> dict[str, Any]:
    """Weights of 100 rows on 100 ranks."""
    shapes: Shapes = {f"model.layers.{n}.weight": (100, 64) for n in range(max(1, int(chunks) // 100))}
    index = simulated_index(shapes, 100)
    data = metadata_bytes(index, {}, {})
    Path(folder).mkdir()
    (Path(folder) / FILE_NAME).write_bytes(data)
    return {"bytes": len(data), "chunks": len(index.file)}


def open_(folder: str) -> dict[str, Any]:
    """The index of a checkpoint."""
    before = peak_bytes()
    started = time.perf_counter()
    with open_checkpoint(folder) as checkpoint:
        inside = time.perf_counter() - started
        return {"inside_s": inside, "peak_above_bytes": peak_bytes() - before, "chunks": len(checkpoint.index.file)}


def plan(layers: str, old_ranks: str, new_ranks: str, *also: str) -> dict[str, Any]:
    """What is done before the first byte moves; the pickle for `.metadata` only if asked for, and timed apart."""
    before = peak_bytes()
    source = simulated_index(llama_405b(int(layers)), int(old_ranks))
    of_source = peak_bytes()
    watch = Stopwatch()
    tensors = np.arange(len(source.names))
    whole = np.array([not shape for shape in source.shapes])
    widths = np.full(len(tensors), 4)
    layout = watch.timed("layout", sharded_layout)(source, tensors, whole, Mesh(int(new_ranks)), widths)
    copies = watch.timed("plan", make_plan)(source, layout)
    planned = peak_bytes()
    files = watch.timed("lay_out", lay_out_dcp)(source, layout, source.dtypes, {})
    laid_out = peak_bytes()
    found: dict[str, Any] = {"inside_s": sum(watch.seconds.values())}
    if also == ("metadata",):
        pickled = watch.timed("metadata", metadata_bytes)(files.index, {}, {})
        found |= {"metadata_bytes": len(pickled), "metadata_peak_bytes": peak_bytes() - before}
    return {
        **found,
        **watch.seconds,
        "peak_above_bytes": laid_out - before,
        "source_peak_bytes": of_source - before,
        "planned_peak_bytes": planned - before,
        "s_per_chunk": found["inside_s"] / len(source.file),
        "tensors": len(tensors),
        "chunks": len(source.file),
        "wanted": len(layout.tensor),
        "pieces": len(copies.source),
    }


def simulated_index(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> Index:
    """The index of a checkpoint that so many ranks would write: fp32, cut along dim 0; scalars on the first rank."""
    dims = max(1, *map(len, shapes.values()))
    padded = np.array([(*shape, *(1,) * (dims - len(shape))) for shape in shapes.values()], dtype=np.int64)
    tensor, shard, first_row, rows = shard_rows(padded[:, 0], ranks)
    sizes = padded[tensor]
    sizes[:, 0] = rows
    offsets = np.zeros_like(sizes)
    offsets[:, 0] = first_row
    # An archive of torch.save has some 1.3 kB around its elements.
    length_bytes = (sizes.prod(axis=1) * 4 + 1300 + 63) // 64 * 64
    order = np.argsort(shard, kind="stable")
    ends = np.cumsum(length_bytes[order])
    starts = ends - length_bytes[order]
    begins = starts[np.searchsorted(shard[order], np.arange(ranks))]
    start_bytes = np.empty_like(length_bytes)
    start_bytes[order] = starts - begins[shard[order]]
    return Index(
        folder=Path(),
        files=[f"__{rank}_0.distcp" for rank in range(ranks)],
        packing=ARCHIVE,
        names=list(shapes),
        dtypes=["float32"] * len(shapes),
        shapes=list(shapes.values()),
        first=np.searchsorted(tensor, np.arange(len(shapes) + 1)),
        offsets=offsets,
        sizes=sizes,
        file=shard.astype(np.int32),
        start_bytes=start_bytes,
        length_bytes=length_bytes,
    )


def crc(folder: str) -> dict[str, Any]:
    """Reads and sums, a buffer at a time."""
    buffer = memoryview(bytearray(1 << 20))
    started = time.perf_counter()
    for path in Path(folder).glob("*.distcp"):
        with path.open("rb", buffering=0) as file:
            value = 0
            while count := file.readinto(buffer):
                value = zlib.crc32(buffer[:count], value)
    return {"inside_s": time.perf_counter() - started}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "imports": imports,
    "phases": phases,
    "write-metadata": write_metadata,
    "open": open_,
    "plan": plan,
    "crc": crc,
}

if __name__ == "__main__":
    print(json.dumps(COMMANDS[sys.argv[1]](*sys.argv[2:])))
