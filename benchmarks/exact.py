"""What exact mode costs a training step: time and memory beside the stock reduction, over world sizes, in one run:

    python benchmarks/exact.py --json exact.jsonl

Starts torchrun jobs (NCCL with a GPU a rank where there are enough, else gloo) in which two models of the same weights
are trained by the same loop in turns, one with `reshard.exact` and one with FSDP2's own reduce-scatter, each on as many
CPU threads. A turn is a few steps of forward, backward, clipping and AdamW on slots of the same global batch; the first
turn does not count. Memory is that of jobs in which one of them trains alone: the largest rank's resident memory at
most, on GPUs what is allocated there.
"""

from __future__ import annotations

import json
from typing import Any

from contest import Bench, say
from processes import ContenderFailed, run, script, torchrun
from record import Column, Goal, Line
from session import Section, measure, options, report, run_main

EXACT, STOCK = "exact", "stock"
WORLDS = (1, 2, 3, 4)
# As the script of the ranks takes them: little compute beside the communication, where exact mode would cost most.
STEP = {"layers": 4, "width": 512, "length": 64, "global_batch": 12, "micro_batch": 1}
MEMORY = {"layers": 2, "width": 1024, "length": 32, "global_batch": 8, "micro_batch": 1, "bf16": False}
COLUMNS = [
    Column("s / step", "seconds"),
    Column("CPU s / step", "cpu_s"),
    Column("samples / s", "samples_per_s"),
    Column("peak, MB", "peak_bytes", 1e-6),
    Column("unsharded unit, MB", "unit_bytes", 1e-6),
]


def measure_step(bench: Bench) -> None:
    """Section `step`: a job a world size and dtype, the two in turns."""
    for case, shape in (("fp32", {**STEP, "bf16": False}), ("bf16", {**STEP, "bf16": True})):
        for ranks in WORLDS:
            for line in _job(bench, "step", case, ranks, shape, bench.repeats, STOCK, EXACT):
                bench.record.add(**line)


def measure_memory(bench: Bench) -> None:
    """Section `memory`: each alone."""
    for ranks in WORLDS[1:]:
        for repeat in range(bench.repeats):
            lines = [line for name in (STOCK, EXACT) for line in _job(bench, "memory", "fp32", ranks, MEMORY, 1, name)]
            peaks = {line["contender"]: line["peak_bytes"] for line in lines}
            for line in lines:
                above = (line["peak_bytes"] - peaks.get(STOCK, 0)) / line["unit_bytes"]
                bench.record.add(**{**line, "repeat": repeat, "units_above": above})


def _job(
    bench: Bench, section: str, case: str, ranks: int, shape: dict[str, Any], repeats: int, *contenders: str
) -> list[Line]:
    place = {"section": section, "case": case, "where": f"{ranks} ranks" if ranks > 1 else "1 rank"}
    say(f"{section} {case} on {place['where']}: {', '.join(contenders)}")
    work = json.dumps({**shape, "repeats": repeats, "contenders": contenders})
    try:
        finished = run(torchrun(ranks, script("steps.py", work)))
    except ContenderFailed as failure:
        bench.record.add(**place, contender="the job", failed=str(failure))
        return []
    return [{**place, **line} for line in finished.report["lines"]]


SECTIONS: dict[str, Section] = {"step": measure_step, "memory": measure_memory}
GOALS = [
    Goal("step", "exact / stock: time of a step", (EXACT, "seconds"), (STOCK, "seconds"), True, 1.15, where="4 ranks"),
    *(
        Goal("step", "exact / stock: time of a step", (EXACT, "seconds"), (STOCK, "seconds"), True, None, where=where)
        for where in ("1 rank", "2 ranks", "3 ranks")
    ),
    Goal("memory", "exact above stock, in unsharded units", (EXACT, "units_above"), None, True, 1.0),
]


def main() -> int:
    """Measures; exit 0 whether goals are met or not, 1 if something could not be measured."""
    args = options(__doc__, SECTIONS, gigabytes=0.0).parse_args()
    return report(measure(args, SECTIONS, GOALS), COLUMNS)


if __name__ == "__main__":
    run_main(main)
