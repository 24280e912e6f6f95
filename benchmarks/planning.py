"""Sections `index` and `plan`: what has to be known before a byte moves, for more chunks than fit a disk here."""

from __future__ import annotations

from contest import Bench, Contender, remove
from processes import run, script
from record import Goal

LLAMA_LAYERS = 126

GOALS = [
    Goal("index", "open / unpickle, time", ("open", "inside_s"), ("pickle.load", "inside_s"), True, 3.0),
    Goal(
        "index", "open / unpickle, memory", ("open", "peak_above_bytes"), ("pickle.load", "peak_above_bytes"), True, 3.0
    ),
    Goal("plan", "seconds", ("4096 -> 2048", "inside_s"), None, True, None),
    Goal("plan", "time / that of 512 -> 256", ("4096 -> 2048", "inside_s"), ("512 -> 256", "inside_s"), True, None),
    Goal("plan", "chunks / those of 512", ("4096 -> 2048", "chunks"), ("512 -> 256", "chunks"), True, None),
    Goal("plan", "time of a chunk / at 512", ("4096 -> 2048", "s_per_chunk"), ("512 -> 256", "s_per_chunk"), True, 1.5),
]


def measure_index(bench: Bench) -> None:
    """Opening a million chunks, against stock torch's first step: unpickling them. Its imports do not count."""
    count = bench.scaled(1_000_000)
    folder = bench.places["disk"] / "metadata-only"
    try:
        run(script("inside.py", "write-metadata", folder, count))
        contenders = {
            "open": Contender(script("inside.py", "open", folder)),
            "pickle.load": Contender(script("stock.py", "unpickle", folder)),
        }
        bench.contest("index", f"{count} chunks", "disk", contenders, warm=[folder])
    finally:
        remove(folder)


def measure_plan(bench: Bench) -> None:
    """Llama 3.1 405B with AdamW, without its data. The pickle for `.metadata` is made for the smaller case only."""
    layers = bench.scaled(LLAMA_LAYERS)
    contenders = {
        "4096 -> 2048": Contender(script("inside.py", "plan", layers, 4096, 2048)),
        "512 -> 256": Contender(script("inside.py", "plan", layers, 512, 256, "metadata")),
    }
    bench.contest("plan", f"Llama 405B, {layers} layers", "disk", contenders)
