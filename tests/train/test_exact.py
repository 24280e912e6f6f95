"""The exact mode: the same bits at every world size, or a refusal that names what cannot be exact."""

from __future__ import annotations

import hashlib
import logging
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab import FEATURES, Block, Net, Points, raw, wrap_fsdp1, wrap_fsdp2
from ranks import RankFailed, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import reshard
from reshard import BatchPlan, ElasticSampler, SlotStreams
from reshard.train.slot_sums import exact_reduction


class Tied(Net):
    """The output weight is the first block's norm, reshaped: one parameter, used twice in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(FEATURES, 5, bias=False)
        self.back = nn.Linear(FEATURES, 5, bias=False)
        self.back.weight = self.inp.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.back(x).sum(dim=1, keepdim=True)


class Recomputed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


class Partly(Net):
    """A frozen parameter in a block, and one at the root that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].up.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))


MODELS = {"net": Net, "tied": Tied, "recomputed": Recomputed, "partly": Partly}


def end_of_run(
    kind: str,
    slots: int,
    micro_batch: int,
    bf16: bool,
    exact: bool,
    mesh: tuple[int, ...] | None = None,
    steps: int = 3,
) -> str:
    """SHA-256 over losses, parameters and moments after a few steps with dropout and clipping."""
    torch.manual_seed(0)
    model = wrap_fsdp2(MODELS[kind](), mesh, bf16=bf16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2, weight_decay=0.1)
    if exact:
        reshard.exact(model, [optimizer])
    plan = BatchPlan(slots * micro_batch, micro_batch, dist.get_world_size())
    sampler = ElasticSampler(40, plan, dist.get_rank(), seed=3, last="wrap")
    streams = SlotStreams(11)
    loader = torch.utils.data.DataLoader(Points(40), batch_sampler=sampler)
    digest = hashlib.sha256()

    def loss(batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]).float(), batch[1])

    while streams.step < steps:
        for micro_batches in sampler.steps(loader):
            optimizer.zero_grad()
            result = reshard.accumulate(model, micro_batches, loss, plan, sampler=sampler, streams=streams)
            digest.update(repr((result.loss, reshard.clip_grad_norm_(model, 0.5))).encode())
            optimizer.step()
            if streams.step == steps:
                break
    for parameter in model.parameters():
        moments = [value for value in optimizer.state.get(parameter, {}).values() if isinstance(value, DTensor)]
        for tensor in (parameter, *moments):
            digest.update(raw(tensor.full_tensor()))
    return digest.hexdigest()


@cache
def outcome(
    world: int,
    kind: str,
    slots: int,
    micro_batch: int,
    bf16: bool = False,
    exact: bool = True,
    mesh: tuple[int, ...] | None = None,
) -> str:
    (only,) = set(run_ranks(world, end_of_run, kind, slots, micro_batch, bf16, exact, mesh))
    return only


@pytest.mark.parametrize(
    ("slots", "micro_batch", "bf16", "worlds"),
    [(12, 1, False, (1, 3, 5)), (7, 1, True, (1, 2, 6)), (7, 3, False, (1, 4))],
    ids=str,
)
def test_the_same_bits_at_every_world_size(slots: int, micro_batch: int, bf16: bool, worlds: tuple[int, ...]) -> None:
    assert len({outcome(world, "net", slots, micro_batch, bf16) for world in worlds}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("micro_batch", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("slots", [12, 7])
@pytest.mark.parametrize("kind", MODELS)
def test_world_size_grid(kind: str, slots: int, bf16: bool, micro_batch: int) -> None:
    assert len({outcome(world, kind, slots, micro_batch, bf16) for world in range(1, 7)}) == 1


@pytest.mark.parametrize("kind", ["tied", "recomputed", "partly"])
def test_odd_models_too(kind: str) -> None:
    assert len({outcome(world, kind, 7, 1) for world in (1, 2, 3)}) == 1


# (replicas, shards): HSDP, of which the last but one has replicas that idle in the last micro-step.
@pytest.mark.parametrize(
    ("mesh", "slots", "bf16"), [((2, 2), 12, False), ((3, 2), 7, True), ((2, 3), 7, False)], ids=str
)
def test_replicas_have_the_bits_of_one_rank(mesh: tuple[int, int], slots: int, bf16: bool) -> None:
    assert outcome(mesh[0] * mesh[1], "net", slots, 1, bf16, mesh=mesh) == outcome(1, "net", slots, 1, bf16)


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("slots", [12, 7])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mesh", [(1, 2), (2, 2), (3, 2), (2, 3)], ids=str)
def test_replicas_grid(mesh: tuple[int, int], kind: str, slots: int, bf16: bool) -> None:
    assert outcome(mesh[0] * mesh[1], kind, slots, 1, bf16, mesh=mesh) == outcome(1, kind, slots, 1, bf16)


def test_the_stock_reduction_has_other_bits() -> None:
    """Else the tests above would prove nothing."""
    assert outcome(1, "net", 12, 1, exact=False) != outcome(3, "net", 12, 1, exact=False)
    assert outcome(4, "net", 12, 1, exact=False) != outcome(4, "net", 12, 1, exact=False, mesh=(2, 2))


def exact_step(model: nn.Module, slots: list[torch.Tensor], compute: Any = None, plan: BatchPlan | None = None) -> Any:
    """One step on the given slots, dealt out by hand: (loss, {name: gradient})."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    plan = plan or BatchPlan(len(slots), 1, ranks)
    mine = [slots[min(first + rank, len(slots) - 1)] for first in range(0, len(slots), ranks)]
    result = reshard.accumulate(model, mine, compute or (lambda x: model(x).sum()), plan)
    gradients = {n: p.grad.full_tensor().clone() for n, p in model.named_parameters() if p.grad is not None}
    return result.loss, gradients


class Scale(nn.Module):
    """y = x * weight: the gradient of a slot is its x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def minus_zero() -> Any:
    model = fully_shard(Scale(4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    reshard.exact(model)
    _, gradients = exact_step(model, [torch.tensor([-0.0, 0.0, -0.0, 1.0]) for _ in range(3)])
    return raw(gradients["weight"])


def test_minus_zero_gradients_have_the_same_bits_on_one_rank_and_on_two() -> None:
    seen = {bits for world in (1, 2, 3) for bits in run_ranks(world, minus_zero)}
    assert seen == {raw(torch.tensor([0.0, 0.0, 0.0, 1.0]))}


def in_slot_order() -> Any:
    """Gradients whose sum shows the order of additions, against the sum written out."""
    model = fully_shard(Scale(2), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    reshard.exact(model)
    values = torch.tensor([1e8, 1.0, -1e8, 3.0, 1e-3, 7.0, -2.5])
    _, gradients = exact_step(model, [torch.stack([value, value]) for value in values])
    expected = torch.zeros(())
    for value in values:
        expected = expected + value * (1 / 7)
    return raw(gradients["weight"]) == raw(torch.stack([expected, expected]))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_order_of_sums_is_that_of_the_slots(world: int) -> None:
    assert run_ranks(world, in_slot_order) == [True] * world


class Experts(nn.Module):
    """Each input goes to the expert that its first element names, or to all where it names none."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(1, width) for width in widths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x[0] < 0:
            return torch.cat([expert(x) for expert in self.experts])
        return self.experts[int(x[0])](x)


def experts(choices: list[int], widths: tuple[int, ...], unused: bool = False) -> Any:
    torch.manual_seed(0)
    model = fully_shard(Experts(*widths), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    reshard.exact(model)
    if unused:
        model.set_reduce_scatter_unused_params(True)
    return exact_step(model, [torch.tensor([float(choice)]) for choice in choices])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("widths", [(3, 3), (2, 9)], ids=["alike", "unlike"])
def test_slots_that_use_different_parameters_are_an_error_on_every_rank(world: int, widths: tuple[int, ...]) -> None:
    """All ranks of a micro-step agree; the micro-steps do not. Parts of equal length would be added up unseen."""
    choices = [choice for choice in (0, 1) for _ in range(world)]
    with pytest.raises(RankFailed) as failure:
        run_ranks(world, experts, choices, widths)
    message = (
        "experts.0.bias, experts.0.weight, experts.1.bias and 1 more: parameters that only some slots of this step"
    )
    assert str(failure.value).count(message) == world


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("choices", [(-1, 1), (1, -1)], ids=str)
def test_a_slot_that_uses_fewer_parameters_than_another_is_an_error(world: int, choices: tuple[int, int]) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(world, experts, [choice for choice in choices for _ in range(world)], (3, 3))
    assert str(failure.value).count("experts.0.bias, experts.0.weight: parameters that only some slots") == world


def test_ranks_that_use_different_parameters_are_an_error_on_every_rank() -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, experts, [0, 1, 0, 1], (3, 3))
    assert str(failure.value).count("parameters that only some slots of this step used") == 2


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch cannot reduce unused parameters"
)
def test_with_unused_parameters_reduced_as_zeros_they_are_exact() -> None:
    seen = set()
    for world in (1, 2, 3):
        for loss, gradients in run_ranks(world, experts, [0, 1, 1, 0, 1], (3, 4), True):
            assert len(gradients) == 4
            seen.add((loss, *(raw(gradients[name]) for name in sorted(gradients))))
    assert len(seen) == 1


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Block(4, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(x))


def twice(inner: bool) -> Any:
    torch.manual_seed(0)
    model = Twice()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if inner:
        fully_shard(model.layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    reshard.exact(model)
    loss, gradients = exact_step(model, [torch.full((1, 4), float(value)) for value in range(1, 6)])
    return loss, *(raw(gradients[name]) for name in sorted(gradients))


@pytest.mark.parametrize("inner", [True, False])
def test_a_module_called_twice_in_a_pass_is_exact(inner: bool) -> None:
    assert len({outcome for world in (1, 2, 3) for outcome in run_ranks(world, twice, inner)}) == 1


def two_passes() -> None:
    model = fully_shard(Scale(4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    reshard.exact(model)

    def compute(x: torch.Tensor) -> torch.Tensor:
        model(x).sum().backward()
        return model(x).sum()

    exact_step(model, [torch.ones(4)] * 3, compute)


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_reduced_twice_in_a_micro_step_are_an_error(world: int) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(world, two_passes)
    message = (
        "weight: gradients that FSDP reduced more than once in one micro-step: exact mode cannot order their sum; let"
    )
    assert str(failure.value).count(message) == world


def backward_alone(after_a_step: bool) -> None:
    model = fully_shard(Scale(4), mesh=init_device_mesh("cpu", (2,)))
    reshard.exact(model)
    if after_a_step:
        exact_step(model, [torch.ones(4)] * 3)
    model(torch.ones(4)).sum().backward()


@pytest.mark.parametrize("after_a_step", [False, True])
def test_a_backward_outside_of_accumulate_is_an_error(after_a_step: bool) -> None:
    """Its gradients would be zeros, or added to another sum."""
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, backward_alone, after_a_step)
    assert str(failure.value).count("a backward outside of reshard.accumulate: exact mode does not know whose") == 2


def parts_of_a_model(case: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    if case == "two":
        model: nn.Module = nn.Sequential(fully_shard(Scale(4), mesh=mesh), fully_shard(Scale(4), mesh=mesh))
        reshard.exact(model[0])
        reshard.exact(model[1])
    elif case == "a block":
        model = wrap_fsdp2(Net(dropout=0.0))
        reshard.exact(model.blocks[0])
    elif case == "a block first":
        model = wrap_fsdp2(Net(dropout=0.0))
        reshard.exact(model.blocks[0])
        reshard.exact(model)
    elif case == "a head beside it":
        model = nn.Sequential(fully_shard(Scale(4), mesh=mesh), nn.Linear(4, 1))
        reshard.exact(model[0])
    else:
        model = wrap_fsdp2(Net(dropout=0.0))
        reshard.exact(model)
        model.set_requires_gradient_sync(False)
    width = 4 if case in ("two", "a head beside it") else FEATURES
    exact_step(model, [torch.ones(1, width)] * 3)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("two", "several models in exact mode within one"),
        ("a block", "the root, blocks.1, inp.weight and 8 more: exact mode was switched on for a part of the model"),
        (
            "a block first",
            "the root, blocks.1, inp.weight and 8 more: exact mode was switched on for a part of the model",
        ),
        ("a head beside it", "1.weight, 1.bias: exact mode was switched on for a part of the model"),
        ("no reduction", "gradients that exact mode did not see; call reshard.exact once the parameters are in place"),
    ],
)
def test_exact_mode_is_for_all_that_is_trained_or_refused(case: str, message: str) -> None:
    with pytest.raises(RankFailed) as failure:
        run_ranks(2, parts_of_a_model, case)
    assert str(failure.value).count(message) >= 2


class Around(nn.Module):
    """What torch.compile makes of a model: a module around it."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


def wrapped(around: bool) -> Any:
    torch.manual_seed(0)
    model = wrap_fsdp2(Net(dropout=0.0))
    reshard.exact(model)
    reduction = exact_reduction(model)
    reshard.exact(model)
    outer = Around(model) if around else model
    assert exact_reduction(outer) is reduction
    x = torch.randn(5, 1, FEATURES, generator=torch.Generator().manual_seed(1))
    loss, gradients = exact_step(outer, list(x))
    assert all(running.total is None for running in reduction.sums)
    return loss, reshard.clip_grad_norm_(outer, 0.1), [raw(gradient) for gradient in gradients.values()]


def test_a_module_around_an_exact_model_is_exact() -> None:
    (plain,) = run_ranks(1, wrapped, False)
    assert run_ranks(2, wrapped, True) == [plain, plain]


def one_rank_of_two() -> Any:
    """Two ranks that share nothing: a mesh axis of one rank, on which FSDP never calls the collective."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "other"))
    model = fully_shard(Scale(3), mesh=mesh["dp"])
    reshard.exact(model)
    mine = [torch.full((3,), float(value)) for value in range(1, 5)]
    result = reshard.accumulate(model, mine, lambda x: model(x).sum(), BatchPlan(4, 1, 1), dp_rank=0)
    return result.loss, model.weight.grad.full_tensor().tolist()


def test_a_mesh_of_one_rank_in_a_larger_job() -> None:
    assert run_ranks(2, one_rank_of_two) == [(7.5, [2.5, 2.5, 2.5])] * 2


def another_place(dp_rank: int, ranks: int) -> None:
    model = fully_shard(Scale(3), mesh=init_device_mesh("cpu", (2,)))
    reshard.exact(model)
    plan = BatchPlan(2, 1, ranks)
    micro_batches = [torch.ones(3)] * plan.accumulation
    reshard.accumulate(model, micro_batches, lambda x: model(x).sum(), plan, dp_rank=dp_rank)


def test_slots_dealt_to_other_ranks_than_the_meshs_are_an_error() -> None:
    with pytest.raises(
        RankFailed, match=r"not those that the model is sharded over: expected rank 0 of 2.*rank 0 of 1"
    ):
        run_ranks(2, another_place, 0, 1)
    with pytest.raises(RankFailed, match=r"expected rank 1 of 2, as on the model's mesh, found rank 0 of 2"):
        run_ranks(2, another_place, 0, 2)


def deterministic() -> Any:
    model = wrap_fsdp2(Net())
    before = torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(2)
    reshard.exact(model)
    return before, torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()


def test_deterministic_algorithms_and_the_number_of_threads_are_set() -> None:
    assert run_ranks(1, deterministic) == [(False, True, 1)]


def changed_since(threads: int, deterministic: bool, warn_only: bool = False) -> None:
    model = fully_shard(Scale(4), mesh=init_device_mesh("cpu", (1,)))
    reshard.exact(model, threads=2)
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    exact_step(model, [torch.ones(4)] * 2)


def test_what_exact_mode_set_for_the_process_is_to_stay() -> None:
    run_ranks(1, changed_since, 2, True)
    with pytest.raises(
        RankFailed, match=r"threads: the number of CPU threads was changed .*: expected 2, found 1; give"
    ):
        run_ranks(1, changed_since, 1, True)
    with pytest.raises(RankFailed, match=r"deterministic algorithms were switched off after reshard\.exact"):
        run_ranks(1, changed_since, 2, False)
    with pytest.raises(RankFailed, match=r"deterministic algorithms were switched off after reshard\.exact"):
        run_ranks(1, changed_since, 2, True, True)


def other_machines() -> None:
    if dist.get_rank() == 1:
        torch.backends.cpu.get_cpu_capability = lambda: "DEFAULT"
    reshard.exact(wrap_fsdp2(Net()))


def test_ranks_on_different_kinds_of_machines_are_refused() -> None:
    with pytest.raises(
        RankFailed, match=r"different kinds of machines: .*: expected one kind, found \S+ \S+, \S+ DEFAULT"
    ):
        run_ranks(2, other_machines)


def no_threads() -> None:
    reshard.exact(wrap_fsdp2(Net()), threads=0)


def test_no_threads_are_refused() -> None:
    with pytest.raises(RankFailed, match=r"threads: not a count: expected an int of at least 1, found 0"):
        run_ranks(1, no_threads)


OPTIMIZERS = {
    "Adadelta": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
}


def element_wise() -> dict[tuple[str, bool], str]:
    """SHA-256 of a model after a few steps of each optimizer; the gradients are a fixed function of the step."""
    found = {}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, options in OPTIMIZERS.items():
        for foreach in (True, False):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(37, 53), nn.Linear(53, 11))
            fully_shard(model, mesh=mesh)
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, foreach=foreach, **options)
            reshard.exact(model, [optimizer])
            for step in range(4):
                generator = torch.Generator().manual_seed(step)
                for parameter in model.parameters():
                    whole = torch.randn(parameter.shape, generator=generator)
                    parameter.grad = distribute_tensor(whole, mesh, parameter.placements)
                optimizer.step()
            bits = b"".join(raw(parameter.full_tensor()) for parameter in model.parameters())
            found[name, foreach] = hashlib.sha256(bits).hexdigest()
    return found


def test_the_optimizers_that_are_taken_are_element_wise_in_both_forms() -> None:
    (one,) = run_ranks(1, element_wise)
    for world in (2, 3):
        assert run_ranks(world, element_wise) == [one] * world
    assert len(set(one.values())) >= len(OPTIMIZERS)


class Rows(torch.optim.Optimizer):
    """Somebody's optimizer that scales each step by the norm of the whole gradient."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


class Signs(Rows):
    """Another, which takes each element alone."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


class Closed(Rows):
    """A third, which cannot be made from its defaults."""

    def __init__(self, params: Any, secret: int) -> None:
        super().__init__(params)


class Narrow(torch.optim.SGD):
    """A subclass of torch's own whose constructor takes less, and whose step does more."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr=lr)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.div_(parameter.grad.norm())
        return super().step(closure)


def unknown(kind: str) -> Any:
    model = wrap_fsdp2(Net())
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger("reshard").addHandler(handler)
    optimizer = (
        Closed(model.parameters(), 1)
        if kind == "Closed"
        else {"Rows": Rows, "Signs": Signs, "Narrow": Narrow}[kind](model.parameters())
    )
    before = torch.get_rng_state()
    reshard.exact(model, [optimizer])
    assert torch.equal(before, torch.get_rng_state())
    return told


def test_an_optimizer_that_is_not_torchs_is_tried_out() -> None:
    for kind in ("Rows", "Narrow"):
        with pytest.raises(RankFailed, match=f"{kind}: this optimizer mixes the elements of a parameter"):
            run_ranks(1, unknown, kind)
    for kind in ("Signs", "Closed"):
        (told,) = run_ranks(1, unknown, kind)
        assert told == [f"exact mode: {kind} is taken to be element-wise; if it is not, bits follow the world size"]


def muon() -> str:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(37, 53, bias=False), mesh=mesh)
    optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)
    whole = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(1))
    model.weight.grad = distribute_tensor(whole, mesh, model.weight.placements)
    optimizer.step()
    return hashlib.sha256(raw(model.weight.full_tensor())).hexdigest()


def test_an_optimizer_that_mixes_elements_is_refused_for_a_reason() -> None:
    assert run_ranks(1, muon)[0] != run_ranks(2, muon)[0]


def scaled(slots: list[float]) -> Any:
    """Two steps in fp16 with a scaler: the scale after each, whether it was skipped, and the parameters' bits."""
    torch.manual_seed(0)
    model = fully_shard(Scale(5), mesh=init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=HALF)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    reshard.exact(model, [optimizer])
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    plan = BatchPlan(len(slots), 1, dist.get_world_size())
    told = []
    for _ in range(2):
        optimizer.zero_grad()
        mine = [slots[min(first + dist.get_rank(), len(slots) - 1)] for first in range(0, len(slots), plan.ranks)]
        # The last element's gradient is the slot's value: it lies on the last rank alone.
        batches = [torch.tensor([1.0, 0.5, 0.25, 2.0, value]) for value in mine]
        reshard.accumulate(model, batches, lambda x: model(x).float().sum(), plan, scaler=scaler)
        scaler.unscale_(optimizer)
        norm = reshard.clip_grad_norm_(model, 0.5)
        before = raw(model.weight.full_tensor())
        scaler.step(optimizer)
        scaler.update()
        after = raw(model.weight.full_tensor())
        told.append((repr(norm), before == after, scaler.get_scale(), after))
    return told


HALF = MixedPrecisionPolicy(torch.float16, torch.float32)


@pytest.mark.parametrize("bad", [None, 60000.0, float("inf"), float("nan")], ids=str)
def test_a_scaler_decides_alike_on_all_ranks_and_at_every_world_size(bad: float | None) -> None:
    """A gradient that overflows, or is not a number, in one element of one slot."""
    slots = [0.5, 1.0, 0.125, 3.0, bad or 0.75, 0.25, 1.5]
    seen = [told for world in (1, 2, 3) for told in run_ranks(world, scaled, slots)]
    assert all(told == seen[0] for told in seen)
    skipped = [was_skipped for _, was_skipped, _, _ in seen[0]]
    assert skipped == [bad is not None] * 2
    assert [scale for _, _, scale, _ in seen[0]] == ([512.0, 256.0] if bad is not None else [2048.0, 4096.0])


class WithBatchNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].norm = nn.BatchNorm1d(5)


def two_meshes() -> nn.Module:
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    return fully_shard(model, mesh=halves["b"])


def refused(case: str) -> None:
    model: nn.Module = Net()
    optimizers: list[Any] = []
    if case == "fsdp1":
        model = wrap_fsdp1(model)
    elif case == "fsdp1 inside":
        model = nn.Sequential(wrap_fsdp1(model))
    elif case == "around":
        model = Around(wrap_fsdp2(model))
    elif case == "outside":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model, ignored_params={model.out.weight})
    elif case == "replicas alone":
        wrap_fsdp2(model, (2, 1))
    elif case == "tensor parallel":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"inp": ColwiseParallel(), "out": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif case == "meshes":
        model = two_meshes()
    elif case == "bf16":
        wrap_fsdp2(model.bfloat16())
    elif case == "batch norm":
        model = wrap_fsdp2(WithBatchNorm())
    elif case == "fused":
        wrap_fsdp2(model)
        optimizers = [torch.optim.AdamW(model.parameters(), fused=True)]
    elif case == "muon":
        model = fully_shard(nn.Linear(3, 4, bias=False))
        optimizers = [torch.optim.Muon(model.parameters())]
    elif case == "adafactor":
        wrap_fsdp2(model)
        optimizers = [torch.optim.Adafactor(model.parameters())]
    reshard.exact(model, optimizers)


REFUSALS = {
    "plain": (1, "needs the root given to fully_shard: found Net"),
    "around": (1, "needs the root given to fully_shard: found Around"),
    "fsdp1": (1, "needs FSDP2: FSDP1 has no hook for its reduce-scatter; use fully_shard"),
    "fsdp1 inside": (1, "needs FSDP2: FSDP1 has no hook"),
    "outside": (1, "out.weight: exact mode needs every trained parameter under fully_shard"),
    "replicas alone": (
        2,
        r"inp.weight: exact mode cannot order sums over replicas that are not .* found a mesh of 2 x 1;",
    ),
    "tensor parallel": (
        2,
        r"inp.weight: exact mode needs a mesh of shards, or of replicas and shards: "
        r"expected 1 mesh axis, or 2 \(HSDP\), found 2 \(\('dp', 'tp'\)\), ",
    ),
    "meshes": (4, "exact mode needs one mesh for all parameters: expected 1, found 2"),
    "bf16": (1, r"inp.weight: exact mode needs parameters in fp32: expected torch.float32, found torch.bfloat16; keep"),
    "batch norm": (1, r"blocks\.1\.norm: batch statistics depend on which samples share a rank: found BatchNorm1d"),
    "fused": (1, "AdamW: the fused CPU optimizers' bits follow the split of a tensor; use fused=False"),
    "muon": (1, "Muon: this optimizer mixes the elements of a parameter, in an order that follows the sharding; exact"),
    "adafactor": (1, "Adafactor: this optimizer mixes the elements of a parameter"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_be_exact_is_refused_by_name(case: str) -> None:
    world, message = REFUSALS[case]
    with pytest.raises(RankFailed, match=message):
        run_ranks(world, refused, case)


def low_reduce() -> None:
    model = fully_shard(Scale(4), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    reshard.exact(model)
    exact_step(model, [torch.ones(4)] * 4)


@pytest.mark.parametrize("world", [1, 2])
def test_a_reduction_in_bf16_is_refused(world: int) -> None:
    with pytest.raises(
        RankFailed,
        match=r"reduce_dtype: exact mode adds gradients in fp32: expected torch\.float32, found torch\.bfloat16; use",
    ):
        run_ranks(world, low_reduce)
