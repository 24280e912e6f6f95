"""A run without torch for the tests of `reshard slurm wrap`: counts steps, saves folders, listens and tells.

plain_run.py FOLDER STEPS [step_s=S] [save_s=S] [interval=N] [bug=STEP] [load_bug] [deaf]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from reshard.environment import Orders
from reshard.storage.steps import committed_steps
from reshard.train.supervisor import Supervisor


def main(folder: Path, steps: int, options: dict[str, str]) -> None:
    supervisor = Supervisor(Orders.given(), folder, 1)
    found = committed_steps(folder)
    if found and "load_bug" in options:
        raise ValueError(f"step {found[-1].step} does not load")
    step = found[-1].step if found else 0
    supervisor.resumed(step)
    while step < steps:
        time.sleep(float(options.get("step_s", "0.05")))
        step += 1
        supervisor.stepped(step)
        if str(step) == options.get("bug"):
            raise ValueError("a bug")
        reason = supervisor.asks()
        if reason or step % int(options.get("interval", "1000")) == 0 or step == steps:
            began_s = time.monotonic()
            supervisor.saving()
            time.sleep(float(options.get("save_s", "0")))
            (folder / f"step-{step}").mkdir(parents=True)
            supervisor.saved(step, time.monotonic() - began_s)
        if reason:
            supervisor.stopped(step, reason)
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), dict((*word.split("="), "")[:2] for word in sys.argv[3:]))
