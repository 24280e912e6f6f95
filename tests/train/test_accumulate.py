"""A step's gradients and loss: those of one plain model on the whole global batch, at every world size."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab import FEATURES, Net, Points, raw, wrap_fsdp1, wrap_fsdp2
from ranks import RankFailed, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

import reshard
from reshard import BatchPlan, ElasticSampler, SlotStreams
from reshard.errors import UsageError

GLOBAL_BATCH, MICRO_BATCH = 14, 2


def whole_step(skip: int, last: str = "keep", samples: int = 40) -> list[int]:
    """The samples of a step, from a sampler on one rank that has done ``skip`` steps."""
    sampler = ElasticSampler(samples, BatchPlan(GLOBAL_BATCH, MICRO_BATCH, 1), seed=3, last=last)
    for _ in range(skip):
        sampler.advance()
    count = BatchPlan(GLOBAL_BATCH, MICRO_BATCH, 1).micro_steps(sampler.next_samples)
    rows = iter(sampler)
    return [int(index) for _ in range(count) for index in next(rows)]


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def plain_reference(skip: int, tokens: bool = False, dtype: torch.dtype = torch.float64) -> Any:
    """One unsharded model, one backward over the whole batch: (loss, {name: gradient})."""
    torch.manual_seed(0)
    model = Net(dropout=0.0).to(dtype)
    points = Points(40)
    indices = whole_step(skip)
    x, y = points.x[indices].to(dtype), points.y[indices].to(dtype)
    squares = (model(x) - y).square().mean(dim=1)
    counts = token_counts(indices)
    loss = (squares * counts).sum() / counts.sum() if tokens else squares.mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def token_counts(indices: list[int]) -> torch.Tensor:
    return torch.tensor([1 + index % 9 for index in indices], dtype=torch.float64)


class Counted(Points):
    """Points that know their index, for a loss over differing numbers of tokens."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index], int(index)


def one_step(wrap: str, skip: int = 0, tokens: bool = False, exact: bool = False) -> Any:
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    if wrap == "fsdp2":
        wrap_fsdp2(model)
    elif wrap == "hsdp":
        wrap_fsdp2(model, (2, dist.get_world_size() // 2))
    elif wrap.startswith("fsdp1"):
        model = wrap_fsdp1(model, use_orig_params=wrap == "fsdp1")
    elif wrap == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if exact:
        reshard.exact(model)
    plan = BatchPlan(GLOBAL_BATCH, MICRO_BATCH, dist.get_world_size())
    sampler = ElasticSampler(40, plan, dist.get_rank(), seed=3)
    for _ in range(skip):
        sampler.advance()
    before = sampler.samples
    loader = torch.utils.data.DataLoader(Counted(40), batch_sampler=sampler)

    def token_loss(batch: Any) -> torch.Tensor:
        counts = token_counts(batch[2].tolist()).float()
        return ((model(batch[0]) - batch[1]).square().mean(dim=1) * counts).sum() / counts.sum()

    result = reshard.accumulate(
        model,
        next(sampler.steps(loader)),
        token_loss if tokens else lambda batch: mse(model, batch),
        plan,
        sampler=sampler,
        weigh=(lambda batch: int(token_counts(batch[2].tolist()).sum())) if tokens else None,
    )
    assert sampler.samples - before == result.samples
    return result.loss, full_gradients(model), result.samples, result.tokens


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FullyShardedDataParallel):
        # The gradients as FSDP1's parameters: summon, then read.
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return {name(n): p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    gradients = {name(n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in gradients.items()}


def name(fqn: str) -> str:
    return fqn.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


@functools.cache
def reference(skip: int, tokens: bool) -> Any:
    return plain_reference(skip, tokens)


# 14 samples are 7 slots: idle places at every world size above 1. The third step has 12 samples, 6 slots.
CASES = [
    (1, "plain", 0, False),
    (1, "fsdp2", 2, True),
    (2, "ddp", 0, False),
    (3, "fsdp2", 0, False),
    (4, "fsdp2", 2, True),
    (2, "fsdp1", 2, False),
    (4, "hsdp", 0, True),
]
GRID = [
    (world, wrap, skip, tokens)
    for world in (1, 2, 3, 4)
    for wrap in ("fsdp2", "fsdp1", "ddp")
    for skip in (0, 2)
    for tokens in (False, True)
]


def assert_like_the_whole_batch(world: int, wrap: str, skip: int, tokens: bool) -> None:
    expected_loss, expected = reference(skip, tokens)
    for loss, gradients, samples, counted in run_ranks(world, one_step, wrap, skip, tokens):
        assert samples == (12 if skip == 2 else 14)
        assert counted == (int(token_counts(whole_step(skip)).sum()) if tokens else None)
        assert abs(loss - expected_loss) < 1e-6
        assert gradients.keys() == expected.keys()
        for fqn, gradient in gradients.items():
            torch.testing.assert_close(gradient.double(), expected[fqn], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("world", "wrap", "skip", "tokens"), CASES)
def test_gradient_and_loss_are_those_of_the_whole_batch(world: int, wrap: str, skip: int, tokens: bool) -> None:
    assert_like_the_whole_batch(world, wrap, skip, tokens)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "wrap", "skip", "tokens"), GRID)
def test_gradient_grid(world: int, wrap: str, skip: int, tokens: bool) -> None:
    assert_like_the_whole_batch(world, wrap, skip, tokens)


@pytest.mark.parametrize("tokens", [False, True])
def test_exact_mode_has_the_same_bits_at_every_world_size(tokens: bool) -> None:
    expected_loss, expected = reference(2, tokens)
    bits = set()
    for world in (1, 3, 4):
        for loss, gradients, _, _ in run_ranks(world, one_step, "fsdp2", 2, tokens, True):
            bits.add((loss, *((fqn, raw(gradients[fqn])) for fqn in sorted(gradients))))
            assert abs(loss - expected_loss) < 1e-6
            for fqn, gradient in gradients.items():
                torch.testing.assert_close(gradient.double(), expected[fqn], atol=1e-6, rtol=1e-5)
    assert len(bits) == 1


def unequal_lengths(micro_batches: list[torch.Tensor], weigh: bool) -> tuple[float, float, float]:
    """A model with one weight, w = 1; the loss of a token of value t is w * t: (loss, gradient, stock gradient)."""
    weight = nn.Linear(1, 1, bias=False)
    nn.init.ones_(weight.weight)
    plan = BatchPlan(len(micro_batches), 1, 1)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return weight(batch).mean()

    result = reshard.accumulate(weight, micro_batches, loss, plan, weigh=len if weigh else None)
    gradient = weight.weight.grad.item()
    stock = torch.stack([batch.mean() for batch in micro_batches]).mean().item()
    return result.loss, gradient, stock


def test_unequal_token_counts_give_the_mean_over_all_tokens() -> None:
    """B66: one token of 10, and nine of 0..8: their mean is 46 / 10, the mean of means is (10 + 4) / 2."""
    batches = [torch.tensor([[10.0]]), torch.arange(9.0).reshape(9, 1)]
    loss, gradient, stock = unequal_lengths(batches, weigh=True)
    assert stock == 7.0
    assert loss == pytest.approx(4.6, abs=1e-6)
    assert gradient == pytest.approx(4.6, abs=1e-6)
    loss, gradient, _ = unequal_lengths(batches, weigh=False)
    assert (loss, gradient) == (7.0, 7.0)


def test_a_slot_without_tokens_counts_for_nothing() -> None:
    """torch's mean over no targets is NaN, with zero gradients."""
    model = nn.Linear(3, 4)
    targets = [torch.tensor([1, -100]), torch.tensor([-100, -100]), torch.tensor([2, 3])]
    x = torch.randn(3, 2, 3, generator=torch.Generator().manual_seed(1))
    result = reshard.accumulate(
        model,
        list(zip(x, targets, strict=True)),
        lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        BatchPlan(6, 2, 1),
        weigh=lambda batch: int((batch[1] >= 0).sum()),
    )
    gradient = model.weight.grad.clone()
    model.zero_grad()
    whole = nn.functional.cross_entropy(model(x.reshape(6, 3)), torch.cat(targets))
    whole.backward()
    assert result.loss == pytest.approx(whole.item(), abs=1e-6)
    assert result.tokens == 3
    torch.testing.assert_close(gradient, model.weight.grad)


def test_no_tokens_at_all_is_an_error() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"weigh: no tokens to train on in this step: found 0\.0"):
        reshard.accumulate(model, [torch.ones(1, 1)], lambda x: model(x).mean(), BatchPlan(1, 1, 1), weigh=lambda _: 0)


def not_finite(wrap: str, exact: bool) -> Any:
    """Three slots on two ranks; the last slot, which the idle rank repeats, is NaN: (loss, all gradients NaN)."""
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    model = wrap_fsdp2(model) if wrap == "fsdp2" else wrap_fsdp1(model)
    if exact:
        reshard.exact(model)
    x = torch.randn(3, 1, FEATURES, generator=torch.Generator().manual_seed(1))
    x[2, 0, 0] = float("nan")
    rank = dist.get_rank()
    mine = [x[rank], x[2]]
    result = reshard.accumulate(model, mine, lambda batch: model(batch).square().mean(), BatchPlan(3, 1, 2))
    norm = reshard.clip_grad_norm_(model, 1.0)
    return result.loss, norm


@pytest.mark.parametrize(("wrap", "exact"), [("fsdp2", False), ("fsdp2", True), ("fsdp1", False)])
def test_a_nan_reaches_every_rank_alike(wrap: str, exact: bool) -> None:
    for loss, norm in run_ranks(2, not_finite, wrap, exact):
        assert loss != loss and norm != norm


def idle_alone_is_nan() -> Any:
    """Exact mode: the idle rank's own pass may go wrong in any way; its part is not added."""
    torch.manual_seed(0)
    model = wrap_fsdp2(Net(dropout=0.0))
    reshard.exact(model)
    x = torch.randn(3, 1, FEATURES, generator=torch.Generator().manual_seed(1))
    mine = [x[0], x[2]] if dist.get_rank() == 0 else [x[1], x[2] * float("nan")]
    result = reshard.accumulate(model, mine, lambda batch: model(batch).square().mean(), BatchPlan(3, 1, 2))
    return result.loss, reshard.clip_grad_norm_(model, 1.0)


def test_in_exact_mode_an_idle_rank_leaves_no_trace() -> None:
    (loss, norm), other = run_ranks(2, idle_alone_is_nan)
    assert (loss, norm) == other
    assert loss == loss and norm == norm


def test_the_wrong_number_of_micro_batches_is_an_error() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=r"rank 0: not one micro-batch for each micro-step: expected 4, found 3; take"):
        reshard.accumulate(model, [torch.ones(1, 1)] * 3, lambda x: model(x).mean(), BatchPlan(4, 1, 1))


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (BatchPlan(4, 1, 2), {}, r"does not fit the job: expected 0\.\.1, on 2 .*found 0 on 1 ranks; tensor-"),
        (BatchPlan(4, 1, 1), {"dp_rank": 1}, r"does not fit the job: expected 0\.\.0.*found 1 on 1 ranks"),
        (BatchPlan(4, 2, 1), {"sampler": ElasticSampler(8, BatchPlan(4, 1, 1))}, "deals its samples by another plan"),
        (
            BatchPlan(4, 1, 1),
            {"sampler": ElasticSampler(8, BatchPlan(4, 1, 1)), "dp_rank": 1},
            "not the sampler's rank",
        ),
    ],
    ids=["world", "rank", "plan", "sampler"],
)
def test_a_plan_that_does_not_fit_is_an_error(plan: BatchPlan, options: dict[str, Any], message: str) -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match=message):
        reshard.accumulate(model, [torch.ones(1, 1)] * 4, lambda x: model(x).mean(), plan, **options)


def unreduced() -> None:
    model = nn.Linear(1, 1)
    reshard.accumulate(model, [torch.ones(1, 1)], lambda x: model(x).mean(), BatchPlan(2, 1, 2))


def test_a_plain_model_on_several_ranks_is_an_error_not_silence() -> None:
    with pytest.raises(RankFailed, match="nothing adds up this model's gradients over the ranks: found Linear; give"):
        run_ranks(2, unreduced)


def all_rank_zero() -> None:
    model = wrap_fsdp2(Net(dropout=0.0))
    x = torch.ones(1, FEATURES)
    reshard.accumulate(model, [x], lambda x: model(x).mean(), BatchPlan(2, 1, 2), dp_rank=0)


def test_slots_that_nobody_runs_are_an_error() -> None:
    with pytest.raises(RankFailed, match=r"slots that no rank has run.*expected all of 0\.\.1, found 0"):
        run_ranks(2, all_rank_zero)


def tensor_parallel() -> Any:
    """2 x 2: the peers along ``tp`` share slots; both pairs together are the whole batch."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))
    unsharded = copy.deepcopy(model).double()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    dp_rank = mesh["dp"].get_local_rank()
    plan = BatchPlan(10, 2, 2)
    sampler = ElasticSampler(40, plan, dp_rank, seed=3)
    loader = torch.utils.data.DataLoader(Points(40), batch_sampler=sampler)
    indices = [int(i) for i in reshard.train.order.EpochOrder(40, 3, 0)[torch.arange(10).numpy()]]
    result = reshard.accumulate(
        model, next(sampler.steps(loader)), lambda batch: mse(model, batch), plan, sampler=sampler
    )
    points = Points(40)
    whole = nn.functional.mse_loss(unsharded(points.x[indices].double()), points.y[indices].double())
    whole.backward()
    for ours, theirs in zip(model.parameters(), unsharded.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor().double(), theirs.grad, atol=1e-6, rtol=1e-5)
    return result.loss, whole.item()


def test_tensor_parallel_peers_share_slots() -> None:
    outcomes = run_ranks(4, tensor_parallel)
    assert len(set(outcomes)) == 1
    loss, whole = outcomes[0]
    assert abs(loss - whole) < 1e-6


def scaled_step(scaler: torch.amp.GradScaler | None) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 2, FEATURES, generator=torch.Generator().manual_seed(1))
    plan = BatchPlan(8, 2, 1)
    result = reshard.accumulate(model, list(x), lambda batch: model(batch).square().mean(), plan, scaler=scaler)
    gradients = [p.grad.clone() for p in model.parameters()]
    if scaler is not None:
        scaler.step(optimizer)
        scaler.update()
    return result.loss, gradients


def test_a_gradient_scaler_scales_gradients_and_not_the_reported_loss() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    loss, plain = scaled_step(None)
    scaled_loss, scaled = scaled_step(scaler)
    assert scaler.get_scale() == 2048.0
    assert scaled_loss == loss
    for a, b in zip(plain, scaled, strict=True):
        # A power of two changes no bit but the exponent's.
        assert torch.equal(a * 1024, b)


class Killed(Exception):
    pass


@pytest.mark.parametrize("exact", [False, True])
def test_a_step_killed_half_way_is_restarted_as_a_whole(exact: bool) -> None:
    """B67."""
    for interrupted, unbroken in run_ranks(2, killed_half_way, exact):
        assert interrupted == unbroken


def killed_half_way(exact: bool) -> Any:
    return [_until_done(exact, kill=kill) for kill in (True, False)]


def _until_done(exact: bool, kill: bool) -> Any:
    torch.manual_seed(0)
    model = wrap_fsdp2(Net(dropout=0.3))
    if exact:
        reshard.exact(model)
    plan = BatchPlan(8, 1, 2)
    sampler, streams = ElasticSampler(40, plan, dist.get_rank(), seed=3), SlotStreams(5)
    loader = torch.utils.data.DataLoader(Points(40), batch_sampler=sampler)
    calls = 0

    def loss(batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if kill and calls == 3:
            raise Killed
        return mse(model, batch)

    def step(compute: Callable[[Any], torch.Tensor]) -> float:
        model.zero_grad()
        micro_batches = next(sampler.steps(loader))
        return reshard.accumulate(model, micro_batches, compute, plan, sampler=sampler, streams=streams).loss

    random_state = torch.get_rng_state()
    if kill:
        with pytest.raises(Killed):
            step(loss)
        assert (sampler.samples, sampler.offset, streams.step) == (0, 0, 0)
        assert torch.equal(torch.get_rng_state(), random_state)
    value = step(loss)
    assert (sampler.samples, streams.step) == (8, 1)
    return value, [raw(g) for g in full_gradients(model).values()]
