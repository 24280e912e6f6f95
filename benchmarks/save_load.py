"""How fast ranks save and load, by `reshard.dcp`, by stock torch and by other libraries, in one run:

    python benchmarks/save_load.py --tmpfs /dev/shm --chart save_load.png

Starts torchrun jobs (gloo; tensors on GPUs where there are some) in which every contender does the same with the same
state, in turns, each between two barriers; the first turn does not count. Prints one JSON line per measurement and per
ratio, then a table; numbers are medians over the repeats, ratios medians of the ratios within a turn. What is loaded
lies in the page cache, and is compared with what it should be, bit by bit, outside of the time; what is saved is
durable within it. `bytes_read` is what system calls read from files: of mapped files there is none. Libraries that are
not installed, or fail a trial with a tiny state, are left out, with the reason.
"""

from __future__ import annotations

from pathlib import Path

import online
from chart import draw
from record import Column
from session import Section, measure, options, report, run_main, sentence

SECTIONS: dict[str, Section] = {
    "load": online.measure_load,
    "save": online.measure_save,
    "small": online.measure_small,
    "replicated": online.measure_replicated,
    "async": online.measure_async,
}
COLUMNS = [
    Column("s", "seconds"),
    Column("GB/s", "gb_per_s"),
    Column("x stock", "to_stock"),
    Column("x raw", "to_raw"),
    Column("read / needed", "read_ratio"),
    Column("CPU s/GB", "cpu_s_per_gb"),
    Column("MB above state", "peak_above_bytes", 1e-6),
    Column("written, most / mean", "most_over_mean"),
]


def main() -> int:
    """Measures; exit 0 whether goals are met or not, 1 if something could not be measured."""
    parser = options(__doc__, SECTIONS, gigabytes=1.0)
    parser.add_argument("--chart", type=Path, metavar="FILE", help="a bar chart, as PNG; needs matplotlib")
    args = parser.parse_args()
    record = measure(args, SECTIONS, online.GOALS)
    status = report(record, COLUMNS)
    if args.chart and (reason := draw(record.lines, args.chart, sentence(record.lines[0]))):
        print(f"\n{reason}")
    return status


if __name__ == "__main__":
    run_main(main)
