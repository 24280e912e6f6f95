"""Trains a small language model with FSDP2, and survives being killed: on any number of ranks it goes on as before.

    bash scripts/launch.sh --ranks 4 scripts/train_fsdp.py --config scripts/configs/tiny.yaml train.steps=40

Copy it. What makes the run resumable is TrainState, Checkpointer, ElasticSampler, SlotStreams and accumulate; the rest
is ordinary PyTorch.
"""

import argparse
import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import TokenWindows, open_dataset
from model import Decoder, ModelConfig, next_token_loss, parameter_count, parameter_groups
from settings import Batch, Settings, read_settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from tqdm import tqdm

import reshard

log = logging.getLogger("train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="a YAML file, such as scripts/configs/tiny.yaml")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="changes to it, such as train.steps=40")
    arguments = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    try:
        job = prepare(arguments.config, arguments.changes)
    except (OSError, TypeError, ValueError, reshard.ReshardError, SystemExit) as error:
        # Every rank finds the same fault, so one tells it.
        raise SystemExit(f"error: {error}" if rank == 0 else 1) from None
    device = start_distributed()
    try:
        train(job, device)
        dist.barrier()
    except reshard.ReshardError as error:
        # One that all ranks share is told once; one that only this rank met would else be told by nobody.
        if dist.get_rank() == 0 or not error.is_shared:
            log.error("error: %s", error)
        raise SystemExit(error.exit_code) from None
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Job:
    """What follows from the settings alone, and fails before anything is started if it fails."""

    settings: Settings
    model: ModelConfig
    dataset: TokenWindows
    plan: reshard.BatchPlan


def prepare(config: str, changes: list[str]) -> Job:
    settings = read_settings(config, changes)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    return Job(settings, ModelConfig(**settings.model), open_dataset(settings.data), plan_batch(settings.batch, ranks))


def train(job: Job, device: torch.device) -> None:
    """The run, from wherever its newest checkpoint left it."""
    settings, dataset, plan = job.settings, job.dataset, job.plan
    stop = reshard.StopSignal()
    torch.manual_seed(settings.train.seed)
    model = build_model(job, device)
    optimizer = torch.optim.AdamW(
        parameter_groups(model, settings.optimizer.weight_decay),
        lr=settings.optimizer.lr,
        betas=(settings.optimizer.betas[0], settings.optimizer.betas[1]),
    )
    if settings.train.exact:
        reshard.exact(model, [optimizer])
    schedule = settings.schedule
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, WarmupCosine(schedule.warmup_steps, schedule.total_steps, schedule.final_lr_share)
    )
    scaler = torch.amp.GradScaler(device.type) if settings.train.precision == "fp16" else None

    sampler = reshard.ElasticSampler(
        len(dataset),
        plan,
        dist.get_rank(),
        seed=settings.train.seed,
        last="wrap",
        fingerprint=dataset.fingerprint,
    )
    workers = int(settings.data.get("workers", 0))
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=workers,
        persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
        worker_init_fn=reshard.StopSignal.ignore_in_worker,
        pin_memory=device.type == "cuda",
    )
    streams = reshard.SlotStreams(settings.train.seed)

    state = reshard.TrainState(model, optimizer, scheduler, scaler, sampler, plan, extra={"streams": streams})
    checkpointer = reshard.Checkpointer(
        settings.checkpoint.folder,
        state,
        interval=settings.checkpoint.interval,
        keep_latest_k=settings.checkpoint.keep_latest_k,
        keep_every=settings.checkpoint.keep_every,
        async_save=settings.checkpoint.async_save,
        stop=stop,
    )
    checkpointer.resume(resume_from(settings.checkpoint.resume))
    log.info("%s parameters, %s, %s", f"{parameter_count(model):,}", settings.train.precision, plan_line(plan))

    def compute_loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
        return next_token_loss(model(inputs), targets)

    if state.step >= settings.train.steps:
        log.info("already at step %d of %d: nothing left to train", state.step, settings.train.steps)
    model.train()
    bar = progress_bar(state.step, settings.train.steps)
    with reshard.TraceWriter(settings.trace) as trace, bar:
        while state.step < settings.train.steps:
            for micro_batches in sampler.steps(loader):
                began = time.monotonic()
                optimizer.zero_grad()
                result = reshard.accumulate(
                    model, micro_batches, compute_loss, plan, sampler=sampler, streams=streams, scaler=scaler
                )
                if scaler is not None:
                    scaler.unscale_(optimizer)
                norm = reshard.clip_grad_norm_(model, settings.train.clip_norm)
                rates = tuple(float(group["lr"]) for group in optimizer.param_groups)
                scale = step_optimizer(optimizer, scaler)
                scheduler.step()
                elapsed_s = time.monotonic() - began
                # Before the checkpoint: a step that is saved must not be missing from the trace.
                trace.write(
                    reshard.TraceRow(
                        step=state.step + 1,
                        loss=result.loss,
                        lr=rates,
                        grad_norm=norm,
                        scale=scale,
                        ranks=plan.ranks,
                        accumulation=plan.accumulation,
                        samples=sampler.samples,
                        tokens_per_s=result.samples * dataset.length / elapsed_s,
                        attempt=checkpointer.attempt,
                    )
                )
                bar.update()
                bar.set_postfix(loss=f"{result.loss:.4f}", lr=f"{rates[0]:.2e}", norm=f"{norm:.2f}", refresh=False)
                if checkpointer.step():
                    return
                if state.step >= settings.train.steps:
                    break
    checkpointer.save()
    checkpointer.wait()


def start_distributed() -> torch.device:
    """Joins the other ranks: NCCL with one GPU a rank where there are enough, else gloo on the CPU."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= ranks_here
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, device_id=device if on_gpu else None)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def build_model(job: Job, device: torch.device) -> Decoder:
    """The decoder, sharded block by block. Built whole first, so that the weights do not depend on the ranks."""
    settings = job.settings
    model = Decoder(job.model, settings.train.checkpoint_activations).to(device)
    mesh = make_mesh(settings.train.replicate, device)
    compute = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[settings.train.precision]
    # Gradients are added in fp32 whatever the compute dtype.
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for block in model.blocks:
        if settings.train.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def make_mesh(replicate: int, device: torch.device) -> DeviceMesh:
    ranks = dist.get_world_size()
    if ranks % replicate:
        raise SystemExit(f"train.replicate: {ranks} ranks do not divide into {replicate} replicas")
    if replicate == 1:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp_shard",))
    return init_device_mesh(device.type, (replicate, ranks // replicate), mesh_dim_names=("dp_replicate", "dp_shard"))


def plan_batch(batch: Batch, ranks: int) -> reshard.BatchPlan:
    if batch.micro_batch == "auto":
        plan = reshard.BatchPlan.choose(batch.global_batch, ranks, batch.max_micro_batch)
        log.info("micro-batch %d chosen; another one deals samples to other random streams", plan.micro_batch)
    else:
        plan = reshard.BatchPlan(batch.global_batch, int(batch.micro_batch), ranks)
    for line in plan.advice():
        (log.warning if plan.is_costly else log.info)(line)
    return plan


def plan_line(plan: reshard.BatchPlan) -> str:
    return (
        f"global batch {plan.global_batch} = {plan.slots} slots of {plan.micro_batch} on {plan.ranks} ranks, "
        f"accumulation {plan.accumulation}"
    )


def resume_from(choice: str | int) -> int | Path | None:
    if choice == "auto":
        return None
    return choice if isinstance(choice, int) else Path(choice)


def progress_bar(done: int, steps: int) -> Any:
    """On rank 0; a line now and then where nobody watches a terminal."""
    interval_s = 0.1 if sys.stderr.isatty() else 10.0
    return tqdm(total=steps, initial=done, unit="step", mininterval=interval_s, disable=dist.get_rank() != 0)


def step_optimizer(optimizer: torch.optim.Optimizer, scaler: Any) -> float | None:
    """One update; with a scaler, skipped where gradients overflowed. Returns the scale that was used."""
    if scaler is None:
        optimizer.step()
        return None
    scale = float(scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()
    return scale


class WarmupCosine:
    """Share of the peak learning rate: linear warm-up, then a cosine down to a final share.

    A class and not a function: LambdaLR keeps its attributes in the checkpoint.
    """

    def __init__(self, warmup_steps: int, total_steps: int, final_share: float) -> None:
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.final_share = final_share

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        return self.final_share + (1 - self.final_share) * (1 + math.cos(math.pi * min(1.0, progress))) / 2


if __name__ == "__main__":
    main()
