"""A small exact run for the tests under SLURM: started by torchrun or by srun, any number of ranks.

    slurm_run.py FOLDER STEPS [interval=N] [bug=STEP] [first_bug=STEP] [poisoned=STEP]

While there is a file FOLDER/slow, a step takes as many seconds longer as it says, so that something can happen to the
run. It crashes in a step (`first_bug`: the first attempt only), and on start if there is a checkpoint of some step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import lab
import torch.distributed as dist

import reshard


def main(folder: Path, steps: int, options: dict[str, str]) -> None:
    dist.init_process_group("gloo")
    run = lab.build(lab.Setup(exact=True, global_batch=12, total_steps=steps))
    stop = reshard.StopSignal()
    checkpointer = reshard.Checkpointer(
        folder / "checkpoints", run.state, interval=int(options.get("interval", "1000")), stop=stop
    )
    bugs = [options.get("bug"), None if "SLURM_RESTART_COUNT" in os.environ else options.get("first_bug")]
    pause_s = float((folder / "slow").read_text()) if (folder / "slow").exists() else 0.0
    if (folder / "checkpoints" / f"step-{options.get('poisoned')}").exists():
        raise ValueError("this checkpoint is poisoned")
    checkpointer.resume()
    with reshard.TraceWriter(folder / "trace.jsonl") as trace:
        while run.state.step < steps:
            for micro_batches in run.sampler.steps(run.loader):
                rate = run.optimizer.param_groups[0]["lr"]
                result = run.one_step(micro_batches)
                trace.write(
                    reshard.TraceRow(
                        step=run.state.step + 1,
                        loss=result.loss,
                        lr=(rate,),
                        ranks=run.plan.ranks,
                        accumulation=run.plan.accumulation,
                        samples=run.sampler.samples,
                        attempt=checkpointer.attempt,
                    )
                )
                if str(run.state.step + 1) in bugs:
                    raise ValueError("a bug in the script")
                if checkpointer.step():
                    return
                until_s = time.monotonic() + pause_s
                while (folder / "slow").exists() and time.monotonic() < until_s:
                    time.sleep(0.05)
                if run.state.step >= steps:
                    break
    checkpointer.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), dict(word.split("=") for word in sys.argv[3:]))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.barrier()
    dist.destroy_process_group()
