"""One step: the slots of a global batch, one after the other, on whatever ranks there are.

The gradient is that of the mean loss over the global batch, at every world size: each slot's loss is weighted by its
share of the step's samples (or of its tokens), and a rank without a slot in the last micro-step runs along for the
collectives with weight zero.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from reshard.batch.plan import BatchPlan
from reshard.dcp.ranks import all_ranks
from reshard.errors import UsageError
from reshard.train.sampler import ElasticSampler
from reshard.train.slot_sums import ExactReduction, exact_reduction
from reshard.train.streams import SlotStreams

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class StepResult:
    """What a step did, the same on every rank.

    Attributes:
        loss: the mean over the step's samples (or tokens), added in slot order, so with the same bits at every
            world size where the slots' losses have them.
        samples: trained on in this step.
        tokens: as ``weigh`` counted them; None without it.
    """

    loss: float
    samples: int
    tokens: int | None


def accumulate(
    model: torch.nn.Module,
    micro_batches: Sequence[Batch],
    compute_loss: Callable[[Batch], torch.Tensor],
    plan: BatchPlan,
    *,
    sampler: ElasticSampler | None = None,
    dp_rank: int | None = None,
    streams: SlotStreams | None = None,
    scaler: torch.amp.GradScaler | None = None,
    weigh: Callable[[Batch], int] | None = None,
) -> StepResult:
    """Runs forward and backward of all slots of a step; the gradients are then ready to be clipped and applied.

    Call it on every rank, between ``zero_grad`` and ``optimizer.step``. The stock reduction must be the default one,
    a mean over the data-parallel ranks (FSDP1, FSDP2, DDP); a model in exact mode is summed in slot order. Sampler and
    streams move at the very end: a step that was not finished leaves no trace in a checkpoint. Every micro-step reduces
    its gradients, so that no rank holds unsharded ones longer than FSDP itself does.

    Args:
        model: whose parameters get the gradients, wrapped as it is trained.
        micro_batches: this rank's, one a micro-step, as ``ElasticSampler.steps`` gives them.
        compute_loss: micro-batch -> scalar mean over its samples (over its tokens where ``weigh`` is given).
        plan: how the global batch is dealt out.
        sampler: tells how many samples a last, incomplete step has, and is advanced at the end.
        dp_rank: this rank's data-parallel coordinate; by default the sampler's, else the global rank.
        streams: random streams by slot; advanced at the end.
        scaler: scales the loss (fp16).
        weigh: micro-batch -> number of tokens its loss is a mean over. With it the result is the mean over all tokens
            of the step; without, over its samples. Of 0 tokens it may be any loss with finite gradients.

    Raises:
        UsageError: the number of micro-batches is not the plan's, plan, sampler, ranks and model do not fit together,
            all weights are zero, or in exact mode slots used different parameters.
    """
    step = _Step(plan, sampler, dp_rank)
    reduction = exact_reduction(model)
    if reduction is not None:
        reduction.require_all_of(model)
        reduction.require_place(step.dp_rank, plan.ranks)
        reduction.require_as_promised()
    elif plan.ranks > 1:
        _require_reduced(model)
    if len(micro_batches) != step.micro_steps:
        raise UsageError(
            "not one micro-batch for each micro-step",
            rank=step.dp_rank,
            expected=step.micro_steps,
            found=len(micro_batches),
            hint="take them from ElasticSampler.steps(loader)",
        )
    tokens = None
    if weigh is not None:
        tokens = step.by_slot(step.gather([float(weigh(batch)) for batch in micro_batches]))
    weights = _weights(step, tokens)
    # A stock reduction divides by the ranks; the weights already are shares of the whole.
    factor = 1.0 if reduction is not None else float(plan.ranks)
    losses = []
    with _summed(reduction):
        for micro_step, batch in enumerate(micro_batches):
            if reduction is not None:
                reduction.micro_step(step.active_ranks(micro_step))
            slot = step.slot(micro_step)
            # A rank without a slot repeats the last one, as its samples do.
            with _stream(streams, step.active_slots - 1 if slot is None else slot, reduction):
                loss = compute_loss(batch)
                weighted = loss * (factor * weights[slot] if slot is not None else 0.0)
                (weighted if scaler is None else scaler.scale(weighted)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
    mean = _mean_loss(step, weights, losses, reduction)
    if streams is not None:
        streams.advance()
    if sampler is not None:
        sampler.advance()
    return StepResult(mean, step.samples, None if tokens is None else int(sum(tokens)))


class _Step:
    """Where this rank stands in one step."""

    def __init__(self, plan: BatchPlan, sampler: ElasticSampler | None, dp_rank: int | None) -> None:
        self.plan = plan
        self.samples = plan.global_batch if sampler is None else sampler.next_samples
        if sampler is not None and sampler.plan != plan:
            raise UsageError(
                "the sampler deals its samples by another plan",
                expected=plan,
                found=sampler.plan,
                hint="give sampler and accumulate the same plan",
            )
        if dp_rank is None:
            dp_rank = all_ranks().rank if sampler is None else sampler.dp_rank
        elif sampler is not None and dp_rank != sampler.dp_rank:
            raise UsageError("not the sampler's rank", key="dp_rank", expected=sampler.dp_rank, found=dp_rank)
        if all_ranks().size % plan.ranks or not 0 <= dp_rank < plan.ranks:
            raise UsageError(
                "the batch plan does not fit the job",
                key="dp_rank",
                expected=f"0..{plan.ranks - 1}, on {plan.ranks} data-parallel ranks or a multiple",
                found=f"{dp_rank} on {all_ranks().size} ranks",
                hint="tensor- and pipeline-parallel peers share a dp_rank, and the plan does not count them",
            )
        self.dp_rank = dp_rank
        self.active_slots = plan.active_slots(self.samples)
        self.micro_steps = plan.micro_steps(self.samples)

    def slot(self, micro_step: int) -> int | None:
        return self.plan.slot(micro_step, self.dp_rank, self.samples)

    def active_ranks(self, micro_step: int) -> int:
        return min(self.plan.ranks, self.active_slots - micro_step * self.plan.ranks)

    def gather(self, mine: Sequence[float]) -> list[list[float]]:
        """Each data-parallel rank's numbers, in the order of its micro-steps. Collective."""
        # Tensor- and pipeline-parallel peers report the same slots.
        by_rank = {int(row[0]): row[1:] for row in all_ranks().gather_numbers([float(self.dp_rank), *mine])}
        if len(by_rank) < self.plan.ranks:
            raise UsageError(
                "slots that no rank has run: several ranks share a data-parallel rank, and others are missing",
                key="dp_rank",
                expected=f"all of 0..{self.plan.ranks - 1}",
                found=", ".join(map(str, sorted(by_rank))),
            )
        return [by_rank[rank] for rank in range(self.plan.ranks)]

    def by_slot(self, rows: list[list[float]]) -> list[float]:
        return [rows[slot % self.plan.ranks][slot // self.plan.ranks] for slot in range(self.active_slots)]


def _weights(step: _Step, tokens: list[float] | None) -> list[float]:
    shares = (
        tokens
        if tokens is not None
        else [float(step.plan.slot_samples(slot, step.samples)) for slot in range(step.active_slots)]
    )
    total = math.fsum(shares)
    if not total > 0:
        raise UsageError(
            "no tokens to train on in this step",
            key="weigh",
            found=total,
            hint="leave samples without a token to predict out of the data set",
        )
    return [share / total for share in shares]


def _mean_loss(
    step: _Step, weights: list[float], losses: list[torch.Tensor], reduction: ExactReduction | None
) -> float:
    numbers: list[float] = torch.stack([_plain(loss) for loss in losses]).tolist()
    rows = step.gather([*numbers, -1.0 if reduction is None else reduction.pattern()])
    if reduction is not None and (min(row[-1] for row in rows) < 0 or len({row[-1] for row in rows}) > 1):
        raise reduction.explain()
    # The mean over no tokens is NaN in torch, and counts for nothing.
    return math.fsum(weight * loss for weight, loss in zip(weights, step.by_slot(rows), strict=True) if weight)


def _plain(loss: torch.Tensor) -> torch.Tensor:
    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss
    return whole.double().reshape(())


def _require_reduced(model: torch.nn.Module) -> None:
    wrappers = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)
    if not any(isinstance(module, wrappers) for module in model.modules()):
        raise UsageError(
            "nothing adds up this model's gradients over the ranks",
            found=type(model).__name__,
            hint="give it the model as fully_shard, FullyShardedDataParallel or DistributedDataParallel made it",
        )


@contextlib.contextmanager
def _stream(streams: SlotStreams | None, slot: int, reduction: ExactReduction | None) -> Iterator[None]:
    """The slot's random stream; without streams, exact mode watches that no random number is drawn."""
    if streams is not None:
        with streams.slot(slot):
            yield
        return
    if reduction is None:
        yield
        return
    before = _random_states()
    yield
    if not all(map(torch.equal, before, _random_states())):
        raise UsageError(
            "random numbers were drawn from a rank's own stream, so that the bits follow the world size",
            key="streams",
            expected="a stream for each slot in exact mode",
            found="dropout, or another random operation, without one",
            hint="pass streams=SlotStreams(seed) to accumulate, and keep it in TrainState",
        )


def _random_states() -> list[torch.Tensor]:
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_available() else []
    return [torch.get_rng_state(), *on_gpu]


@contextlib.contextmanager
def _summed(reduction: ExactReduction | None) -> Iterator[None]:
    if reduction is None:
        yield
        return
    reduction.start()
    yield
    reduction.finish()
