"""A small exact run with everything that a resume can lose, and one fault put into it right after each resume.

    python faulty_run.py [FAULT]

Single process; what `reshard prove` asks for in the environment is honoured by the library itself.
"""

import itertools
import logging
import math
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import reshard
from reshard.environment import Orders

LR, WARMUP, STEPS = 2e-2, 4, 40


class Schedule:
    def __call__(self, step):
        return min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / STEPS)))


class Data(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(96, 8, generator=generator)
        self.y = torch.tanh(self.x @ torch.randn(8, 8, generator=generator))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def moments(optimizer):
    return [local(entry[name]) for entry in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]


@torch.no_grad()
def spoil(fault, model, optimizer, scheduler, scaler, sampler, streams):
    """What a resume that loses a piece of state leaves behind."""
    embedding, hidden, head = (local(model[at].weight) for at in (0, 2, 5))
    if fault == "moments":
        for moment in moments(optimizer):
            moment.zero_()
    elif fault == "step counters":
        for entry in optimizer.state.values():
            entry["step"].zero_()
    elif fault == "learning rate":
        optimizer.param_groups[0]["lr"] = LR
    elif fault == "warm-up again":
        scheduler.last_epoch = 0
        optimizer.param_groups[0]["lr"] = LR * scheduler.lr_lambdas[0](0)
    elif fault == "schedule twice as fast":
        scheduler.last_epoch *= 2
        optimizer.param_groups[0]["lr"] = LR * scheduler.lr_lambdas[0](scheduler.last_epoch)
    elif fault == "data position":
        sampler.load_state_dict({**sampler.state_dict(), "samples": 0, "epoch": 0, "offset": 0})
    elif fault == "rows permuted":
        hidden.copy_(hidden[torch.arange(len(hidden)).roll(1)])
    elif fault == "weights swapped":
        kept = embedding.clone()
        embedding.copy_(hidden), hidden.copy_(kept)
    elif fault == "head overwritten":
        head.copy_(embedding)
    elif fault == "bf16 rounding":
        for parameter in model.parameters():
            local(parameter).copy_(local(parameter).bfloat16())
    elif fault == "random streams":
        streams.seed += 1
    elif fault == "scaler":
        scaler.load_state_dict({**scaler.state_dict(), "scale": 256.0, "_growth_tracker": 0})
    elif fault not in ("", "half the batch"):
        sys.exit(f"error: no such fault: {fault}")


def main(fault):
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 8)]
    model = fully_shard(nn.Sequential(*layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    reshard.exact(model, [optimizer])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, Schedule())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=6)
    data, plan, streams = Data(), reshard.BatchPlan(12, 2, 1), reshard.SlotStreams(3)
    sampler = reshard.ElasticSampler(len(data), plan, seed=4)
    state = reshard.TrainState(model, optimizer, scheduler, scaler, sampler, plan, extra={"streams": streams})
    checkpointer = reshard.Checkpointer("unused", state, interval=5)
    if checkpointer.resume() is not None:
        if fault == "half the batch":
            kept = sampler.state_dict()
            plan = reshard.BatchPlan(6, 2, 1)
            state.plan = plan
            sampler.plan = plan
            sampler.load_state_dict(kept)
        spoil(fault, model, optimizer, scheduler, scaler, sampler, streams)
    loader = torch.utils.data.DataLoader(data, batch_sampler=sampler)
    with reshard.TraceWriter("unused") as trace:
        for _ in itertools.count():
            for micro_batches in sampler.steps(loader):
                optimizer.zero_grad()
                result = reshard.accumulate(
                    model,
                    micro_batches,
                    lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
                    plan,
                    sampler=sampler,
                    streams=streams,
                    scaler=scaler,
                )
                scaler.unscale_(optimizer)
                norm = reshard.clip_grad_norm_(model, 0.5)
                rate, scale = optimizer.param_groups[0]["lr"], scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                row = reshard.TraceRow(
                    state.step + 1, result.loss, (rate,), norm, scale, 1, plan.accumulation, sampler.samples
                )
                trace.write(row)
                if checkpointer.step():
                    return


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert Orders.given().steps, "start it by reshard prove"
    main(sys.argv[1] if len(sys.argv) > 1 else "")
    dist.destroy_process_group()
