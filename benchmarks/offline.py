"""How fast and how small the offline half of reshard is, beside cp and stock torch, in one run:

    python benchmarks/offline.py --tmpfs /dev/shm

Prints one JSON line per measurement and per ratio, then a table. Contenders take turns; every number is a median over
the repeats, every ratio the median of the ratios within a repeat, for machines are noisy. `seconds` is what the user
waits for a process, from its start to its end; `inside_s` leaves out interpreter and imports. What was read is in the
page cache, what was written is flushed before a process ends. With less than 2 GB the counts of the other sections
shrink in proportion: for a trial.
"""

from __future__ import annotations

import moving
import planning
import reading
from record import Column
from session import Section, measure, options, report, run_main

SECTIONS: dict[str, Section] = {
    "reshard": moving.measure_reshard,
    "memory": moving.measure_memory,
    "small": moving.measure_small,
    "index": planning.measure_index,
    "plan": planning.measure_plan,
    "check": reading.measure_check,
}
GOALS = [*moving.GOALS, *planning.GOALS, *reading.GOALS]
COLUMNS = [
    Column("wall s", "seconds"),
    Column("inside s", "inside_s"),
    Column("GB/s", "gb_per_s"),
    Column("peak MB", "peak_bytes", 1e-6),
]


def main() -> int:
    """Measures; exit 0 whether goals are met or not, 1 if something could not be measured."""
    parser = options(__doc__, SECTIONS, gigabytes=2.0)
    parser.add_argument("--no-torch", action="store_true", help="leave out stock torch, which takes most of the time")
    args = parser.parse_args()
    return report(measure(args, SECTIONS, GOALS, with_torch=not args.no_torch), COLUMNS)


if __name__ == "__main__":
    run_main(main)
