"""How fast and how small `reshard convert` is, beside torch's own way to the same content, in one run:

    python benchmarks/convert.py --folder /tmp

Files of eight ranks with the DTensors of model and optimizer become one DCP checkpoint, for four ranks or, by torch's
way, for any. Before anything is measured, both results are compared by stock torch. Lines, table and ratios are those
of `offline.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

from contest import DESTINATION, Bench, Contender, folder_bytes, remove, say
from processes import RESHARD, run, script
from record import Column, Goal
from session import Section, measure, options, report, run_main
from shapes import transformer

RANKS, NEW_RANKS = 8, 4
GOALS = [
    Goal("ranks", "torch / reshard, with imports", ("torch", "seconds"), ("reshard", "seconds"), False, 3.0),
    Goal("ranks", "torch / reshard", ("torch", "inside_s"), ("reshard", "seconds"), False, None),
    Goal("ranks", "memory, torch / reshard", ("torch", "peak_bytes"), ("reshard", "peak_bytes"), False, None),
    Goal("ranks", "bytes read / needed", ("reshard", "bytes_read"), ("reshard", "bytes_to_read"), True, 1.02),
]
COLUMNS = [
    Column("wall s", "seconds"),
    Column("inside s", "inside_s"),
    Column("GB/s", "gb_per_s"),
    Column("peak MB", "peak_bytes", 1e-6),
]


def measure_ranks(bench: Bench) -> None:
    """Eight ranks' files to one checkpoint."""
    work = bench.places["disk"]
    source, specification = work / "ranks", work / "ranks.json"
    say("writing the files of ranks")
    specification.write_text(json.dumps(transformer(bench.gigabytes * 1e9)))
    try:
        run(script("rank_files.py", "write", specification, RANKS, source))
        _require_equal(source, work)
        length = folder_bytes(source)
        contenders = {
            "reshard": Contender(_convert(source, work / DESTINATION), moved_bytes=length),
            "torch": Contender(script("rank_files.py", "merge", source, work / DESTINATION), moved_bytes=length),
        }
        bench.contest("ranks", f"{RANKS} files -> DCP", "disk", contenders, warm=[source])
    finally:
        remove(source)
        specification.unlink(missing_ok=True)


def _convert(source: Path, destination: Path) -> list[object]:
    return [*RESHARD, "convert", source, destination, "--world-size", NEW_RANKS, "--json"]


def _require_equal(source: Path, work: Path) -> None:
    say("comparing what comes of them")
    try:
        run(_convert(source, work / "ours"))
        run(script("rank_files.py", "merge", source, work / "torchs"))
        run(script("rank_files.py", "compare", work / "ours", work / "torchs"))
    finally:
        remove(work / "ours")
        remove(work / "torchs")


SECTIONS: dict[str, Section] = {"ranks": measure_ranks}


def main() -> int:
    """Measures; exit 0 whether goals are met or not, 1 if something could not be measured."""
    args = options(__doc__, SECTIONS, gigabytes=1.0).parse_args()
    return report(measure(args, SECTIONS, GOALS), COLUMNS)


if __name__ == "__main__":
    run_main(main)
