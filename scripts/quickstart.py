"""Trains the tiny config twice, once killed and resumed on other numbers of ranks, and compares every step.

Run it through ``bash scripts/quickstart.sh``, which sets up the environment.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from reshard.errors import UsageError
from reshard.verify.traces.compare import compare_traces, format_table
from reshard.verify.traces.plot import plot_traces
from reshard.verify.traces.trace import read_trace

SCRIPTS = Path(__file__).parent
CONFIG = SCRIPTS / "configs" / "tiny.yaml"
STEPS = 60
LEGS = "4:25,2:43,3"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/quickstart"), help="emptied, then written to")
    parser.add_argument(
        "--legs",
        default=LEGS,
        help=f"RANKS:STEP,...,RANKS: the ranks of each start, and when they die (default {LEGS})",
    )
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to the tiny config")
    arguments = parser.parse_args()
    folder, changes = arguments.folder, arguments.changes
    legs = [read_leg(leg) for leg in arguments.legs.split(",")]
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    straight, broken = folder / "straight", folder / "broken"

    say(f"\n1. {STEPS} steps on {legs[0][0]} ranks without a break")
    train(straight, legs[0][0], changes)
    say(f"\n2. The same run, on {', then '.join(describe(leg) for leg in legs)}")
    for ranks, kill_after in legs:
        train(broken, ranks, changes, kill_after)

    say("\n3. The two runs, step by step\n")
    comparison = compare_traces(read_trace(straight / "trace.jsonl"), read_trace(broken / "trace.jsonl"))
    print(format_table(comparison))
    try:
        plot_traces(comparison, folder / "loss.png")
        print(f"\nboth curves: {folder / 'loss.png'}")
    except UsageError as error:
        print(f"\nno plot: {error}")
    print(f"{time.monotonic() - began:.0f} s in all")
    return 0 if comparison.agrees else 1


def read_leg(text: str) -> tuple[int, int | None]:
    ranks, _, step = text.partition(":")
    return int(ranks), int(step) if step else None


def describe(leg: tuple[int, int | None]) -> str:
    ranks, kill_after = leg
    return f"{ranks} ranks " + (f"killed after step {kill_after}" if kill_after is not None else "to the end")


def train(folder: Path, ranks: int, changes: list[str], kill_after: int | None = None) -> None:
    """One start of the training script; with ``kill_after``, its ranks are killed once the trace has that step."""
    folder.mkdir(parents=True, exist_ok=True)
    trace = folder / "trace.jsonl"
    command = [
        *("bash", str(SCRIPTS / "launch.sh"), "--ranks", str(ranks)),
        *(str(SCRIPTS / "train_fsdp.py"), "--config", str(CONFIG)),
        *(f"steps={STEPS}", f"checkpoint.folder={folder / 'checkpoints'}", f"trace={trace}", *changes),
    ]
    with (folder / "log.txt").open("a") as log:
        start = log.tell()
        launcher = subprocess.Popen(command, stdout=log, stderr=log)
        if kill_after is not None:
            killed = kill_when(launcher, trace, kill_after)
        status = launcher.wait()
    for line in (folder / "log.txt").read_text()[start:].splitlines():
        if line.startswith(("resumed at", "no checkpoint", "passed over", "error")):
            say(f"   {ranks} ranks: {line}")
    if kill_after is not None:
        if not killed:
            raise SystemExit(f"the run on {ranks} ranks ended before step {kill_after} could be waited for")
        say(f"   {ranks} ranks: kill -9 after step {read_trace(trace)[-1].step}")
    elif status != 0:
        say((folder / "log.txt").read_text()[-3000:])
        raise SystemExit(f"training on {ranks} ranks failed with status {status}; its log is {folder / 'log.txt'}")


def kill_when(launcher: subprocess.Popen[bytes], trace: Path, step: int) -> bool:
    """Waits for a step, then sends SIGKILL to every rank at once. Returns whether it came to that."""
    while launcher.poll() is None:
        if trace.exists() and (rows := read_trace(trace)) and rows[-1].step >= step:
            for torchrun in children(launcher.pid):
                for rank in children(torchrun):
                    os.kill(rank, signal.SIGKILL)
            return True
        time.sleep(0.05)
    return False


def children(parent: int) -> list[int]:
    """Process ids of the direct children (Linux). The launcher's is torchrun, torchrun's are the ranks."""
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def say(message: str) -> None:
    print(message, flush=True)


if __name__ == "__main__":
    sys.exit(main())
