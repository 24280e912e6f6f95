"""Section `check`: what is only read, `check --deep`, `diff` and `inspect`, beside cat and a plain CRC-32."""

from __future__ import annotations

from contest import Bench, Contender, folder_bytes, remove
from processes import RESHARD, run, script
from record import Goal
from shapes import transformer

GOALS = [
    Goal("check", "inspect, seconds", ("inspect", "seconds"), None, True, 0.5),
    Goal("check", "check --deep / cat", ("check --deep", "seconds"), ("cat", "seconds"), True, None),
    Goal("check", "check --deep / CRC in one thread", ("check --deep", "seconds"), ("crc", "inside_s"), True, None),
    Goal("check", "diff / cat of one side", ("diff", "seconds"), ("cat", "seconds"), True, None),
]


def measure_check(bench: Bench) -> None:
    """The checkpoint of eight ranks, and what became of it on two. GB/s are of one checkpoint, also for `diff`."""
    with bench.checkpoint("disk", "from-8", transformer(bench.gigabytes * 1e9), 8) as source:
        other = source.with_name("to-2")
        try:
            run([*RESHARD, "offline", source, other, "--world-size", 2])
            length = folder_bytes(source)
            contenders = {
                "cat": Contender(["sh", "-c", 'cat "$0"/* > /dev/null', source], moved_bytes=length),
                "crc": Contender(script("inside.py", "crc", source), moved_bytes=length),
                "check --deep": Contender([*RESHARD, "check", "--deep", source], moved_bytes=length),
                "diff": Contender([*RESHARD, "diff", source, other], moved_bytes=length),
                "inspect": Contender([*RESHARD, "inspect", source]),
            }
            bench.contest("check", "written by 8", "disk", contenders, warm=[source, other])
        finally:
            remove(other)
