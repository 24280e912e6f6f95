"""The exact mode: the same bits at every world size, or a refusal that names what cannot have them.

Forward and backward of a micro-batch do not know the world size. What does is the order in which gradients are added,
which :mod:`reshard.train.slot_sums` makes that of the slots; the norm that clips them (:mod:`reshard.train.norm`); and
kernels that are free to choose: those without a deterministic form, and on the CPU the number of threads.

Needs FSDP2 on a mesh of shards, or of replicas and shards; parameters and gradient reduction in fp32 (compute may be
bf16 or fp16); optimizers that treat each element alone; the same kind of machine on all ranks.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from reshard.dcp.ranks import all_ranks
from reshard.environment import want_deterministic_cublas
from reshard.errors import UsageError
from reshard.train import fsdp1
from reshard.train.elementwise import refuse_mixing
from reshard.train.slot_sums import ExactReduction, exact_reduction

_BATCH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def exact(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), *, threads: int = 1) -> None:
    """Makes an FSDP2 model sum gradients in slot order. Call it on every rank, once the model is sharded and in place.

    ``accumulate`` and ``clip_grad_norm_`` do their part by themselves afterwards. Deterministic algorithms are
    switched on for the process, and the number of CPU threads is fixed, since some kernels' sums follow it. Checkpoints
    record that the run is exact and on what, and a resume says where that was otherwise.

    Args:
        model: the root module given to ``fully_shard``.
        optimizers: those that will step it, to be checked.
        threads: CPU threads, the same at every world size.

    Raises:
        UsageError: something here cannot be exact; it is named.
    """
    ranks = all_ranks()
    with ranks.together():
        if type(threads) is not int or threads < 1:
            raise UsageError("not a count", key="threads", expected="an int of at least 1", found=repr(threads))
        mesh = _refuse_inexact(model, optimizers)
        if (before := exact_reduction(model)) is not None:
            before.require_all_of(model)
    device = next(parameter.device for parameter in model.parameters())
    machine = machine_of(device)
    if len(machines := sorted(set(ranks.gather(machine)))) > 1:
        raise UsageError(
            "ranks on different kinds of machines: which of them runs a slot decides its bits",
            key="device",
            expected="one kind",
            found=", ".join(machines),
            hint="use nodes of one kind, or the stock reduction",
        )
    want_deterministic_cublas()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    if before is not None:
        before.threads = threads
        return
    reduction = ExactReduction(model, mesh, threads, machine)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            reduction.install(module)


def machine_of(device: torch.device) -> str:
    """What decides which kernels run on a device: the GPU's name, or the processor's family and vector instructions."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _refuse_inexact(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> DeviceMesh:
    """The mesh that all of the model is sharded over; an error for what cannot be exact."""
    if fsdp1.is_fsdp1(model):
        raise UsageError("exact mode needs FSDP2: FSDP1 has no hook for its reduce-scatter", hint="use fully_shard")
    if not isinstance(model, FSDPModule):
        raise UsageError(
            "exact mode needs the root given to fully_shard",
            found=type(model).__name__,
            hint="call fully_shard on the whole model too, after its blocks",
        )
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_STATISTICS) and module.training:
            raise UsageError(
                "batch statistics depend on which samples share a rank",
                key=name,
                found=type(module).__name__,
                hint="use LayerNorm, GroupNorm or the like, or put it in eval mode before the call",
            )
    meshes: dict[tuple[object, ...], DeviceMesh] = {}
    for name, parameter in model.named_parameters():
        _refuse_parameter(name, parameter)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            groups = tuple(tuple(dist.get_process_group_ranks(group)) for group in mesh.get_all_groups())
            meshes[mesh.shape, groups] = mesh
    if not meshes:
        raise UsageError(
            "exact mode needs a model with sharded parameters", found="none", hint="call fully_shard first"
        )
    if len(meshes) != 1:
        raise UsageError(
            "exact mode needs one mesh for all parameters",
            expected=1,
            found=len(meshes),
            hint="give every fully_shard the same mesh",
        )
    for optimizer in optimizers:
        refuse_mixing(optimizer)
    return next(iter(meshes.values()))


def _refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        if parameter.requires_grad:
            raise UsageError(
                "exact mode needs every trained parameter under fully_shard",
                key=name,
                hint="call fully_shard on the whole model too, and ignore no trained parameter",
            )
        return
    mesh = parameter.device_mesh
    *outer, _ = parameter.placements
    if mesh.ndim > 2 or not all(placement.is_replicate() for placement in outer):
        raise UsageError(
            "exact mode needs a mesh of shards, or of replicas and shards",
            key=name,
            expected="1 mesh axis, or 2 (HSDP)",
            found=f"{mesh.ndim} ({mesh.mesh_dim_names}), {', '.join(map(str, parameter.placements))}",
            hint="use the stock reduction with tensor or expert parallelism",
        )
    if mesh.ndim == 2 and mesh.size(1) == 1 < mesh.size(0):
        raise UsageError(
            "exact mode cannot order sums over replicas that are not sharded: FSDP reduces them in one all-reduce",
            key=name,
            expected="2 ranks or more along the last mesh axis",
            found=f"a mesh of {mesh.size(0)} x 1",
            hint="shard over all ranks, on a mesh with one axis",
        )
    if parameter.requires_grad and parameter.dtype != torch.float32:
        raise UsageError(
            "exact mode needs parameters in fp32",
            key=name,
            expected=torch.float32,
            found=parameter.dtype,
            hint="keep them in fp32 and compute in bf16 through MixedPrecisionPolicy",
        )
