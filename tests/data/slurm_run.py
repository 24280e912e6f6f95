"""A small exact run for the tests under SLURM: started by torchrun or by srun, any number of ranks.

    slurm_run.py FOLDER STEPS [interval=N] [bug=STEP] [poisoned=STEP]

While there is a file FOLDER/slow, a step takes longer, so that something can happen to the run.
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
                if run.state.step + 1 == int(options.get("bug", "-1")):
                    raise ValueError("a bug in the script")
                if checkpointer.step():
                    return
                if (folder / "slow").exists():
                    time.sleep(0.2)
                if run.state.step >= steps:
                    break
    checkpointer.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), dict(word.split("=") for word in sys.argv[3:]))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.barrier()
    dist.destroy_process_group()
