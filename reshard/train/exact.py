"""Gradients with the same bits at every world size.

Forward and backward of a micro-batch do not know the world size; the order in which gradients are added does. Here it
is the order of the slots: FSDP2 takes a collective of ours for its reduce-scatter, which exchanges the same bytes
(all-to-all) and then lets each rank add the parts it received, in rank order, onto the running sum of its shard. Slot
v runs in micro-step v // ranks on rank v % ranks, so rank order within a micro-step, micro-step after micro-step, *is*
slot order. On one rank FSDP never calls the collective; its own accumulation has that order already.

Every sum starts at +0.0, so that a slot whose part is missing leaves no trace: x + 0.0 is x for every x but -0.0, and a
sum that started at +0.0 is never -0.0.

FSDP lays the gradients of a module end to end, those that there are. So each slot must use the same parameters, once;
FSDP's own hooks on them tell which it reduced, and a step in which that differs is refused on all ranks together.

Needs FSDP2 on a one-dimensional mesh, parameters and gradient reduction in fp32 (compute may be bf16).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

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

log = logging.getLogger("reshard")
_reductions: weakref.WeakKeyDictionary[nn.Module, ExactReduction] = weakref.WeakKeyDictionary()

_ELEMENTWISE = {
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "SGD",
}  # fmt: skip
_MIXING = {"Adafactor", "LBFGS", "Muon"}
_BATCH_STATISTICS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def exact(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), *, threads: int = 1) -> None:
    """Makes an FSDP2 model sum gradients in slot order. Call it on every rank, once the model is sharded and in place.

    ``accumulate`` and ``clip_grad_norm_`` do their part by themselves afterwards. Deterministic algorithms are
    switched on for the process, and on the CPU the number of threads is fixed, since some kernels' sums follow it.

    Args:
        model: the root module given to ``fully_shard``.
        optimizers: those that will step it, to be checked.
        threads: CPU threads, the same at every world size.

    Raises:
        UsageError: something here cannot be exact; it is named.
    """
    mesh = _refuse_inexact(model, optimizers)
    want_deterministic_cublas()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    if model in _reductions:
        return
    reduction = ExactReduction(model, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(_SlotOrderedSum(reduction))  # type: ignore[arg-type]
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            _reductions[module] = reduction


def exact_reduction(model: nn.Module) -> ExactReduction | None:
    """What :func:`exact` made of this model, or of the one inside it (``torch.compile`` wraps one); else None."""
    return next((_reductions[module] for module in model.modules() if module in _reductions), None)


class ExactReduction:
    """The running sums of one step, shared by the model's FSDP modules. ``accumulate`` drives it.

    Attributes:
        ranks: of the mesh, so as many as share a sum.
        active_ranks: how many of them have a slot in this micro-step.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = weakref.ref(model)
        self.ranks = mesh.size()
        self._rank = dist.get_rank(mesh.get_group())
        self.active_ranks = 0
        self.sums: list[_SlotOrderedSum] = []
        self._reduced: list[list[str]] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name))  # type: ignore[no-untyped-call]

    def require_place(self, dp_rank: int, dp_ranks: int) -> None:
        """Raises UsageError if the slots are not dealt to the ranks that add up the gradients."""
        if (dp_rank, dp_ranks) != (self._rank, self.ranks):
            raise UsageError(
                "the batch plan's ranks are not those that the model is sharded over",
                key="dp_rank",
                expected=f"rank {self._rank} of {self.ranks}, as on the model's mesh",
                found=f"rank {dp_rank} of {dp_ranks}",
            )

    def start(self) -> None:
        """Before a step's first micro-step: every sum is zero."""
        self._clear_gradients()
        self._reduced = []
        for running in self.sums:
            running.total = None

    def micro_step(self, active_ranks: int) -> None:
        """Before each micro-step: the parts of ranks from ``active_ranks`` on are idle and not added."""
        self.active_ranks = active_ranks
        self._reduced.append([])
        if self.ranks > 1:
            # FSDP would add the running sum to the gradient that is there.
            self._clear_gradients()

    def finish(self) -> None:
        """After the last micro-step."""
        for running in self.sums:
            running.total = None
        for gradient in self._gradients().values():
            # Where FSDP summed by itself, on one rank, the sum did not start at +0.0.
            gradient.add_(0.0)

    def pattern(self) -> float:
        """Which parameters every micro-step reduced, as a number for ranks to compare; -1 where micro-steps differ."""
        first = self._reduced[0]
        same = all(sorted(names) == sorted(first) for names in self._reduced)
        if not same or len({*first}) < len(first) or self._gradients().keys() != {*first}:
            return -1.0
        digest = hashlib.sha256("\n".join(sorted(first)).encode()).digest()
        # 48 bits, which a float64 holds.
        return float(int.from_bytes(digest[:6], "little"))

    def explain(self) -> UsageError:
        """The error for a step in which the patterns differ. Collective."""
        micro_steps = [names for theirs in all_ranks().gather(self._reduced) for names in theirs]
        everywhere = {*micro_steps[0]}.intersection(*micro_steps)
        anywhere = {name for names in micro_steps for name in names}
        if some := sorted(anywhere - everywhere):
            return UsageError(
                "parameters that only some slots of this step used: exact mode cannot add their gradients",
                key=_some(some),
                hint="call model.set_reduce_scatter_unused_params(True): the unused then get zeros, and weight decay",
            )
        if twice := sorted({name for names in micro_steps for name in names if names.count(name) > 1}):
            return UsageError(
                "gradients that FSDP reduced more than once in one micro-step: exact mode cannot order their sum",
                key=_some(twice),
                hint="let compute_loss return the loss, and accumulate call backward, once",
            )
        return UsageError(
            "gradients that exact mode did not see", hint="call reshard.exact after the model's parameters are in place"
        )

    def _note(self, name: str, parameter: torch.Tensor) -> None:
        if self._reduced:
            self._reduced[-1].append(name)

    def _gradients(self) -> dict[str, torch.Tensor]:
        model = self._model()
        assert model is not None
        return {name: _local(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    def _clear_gradients(self) -> None:
        model = self._model()
        assert model is not None
        for parameter in model.parameters():
            parameter.grad = None


class _SlotOrderedSum:
    """FSDP2's reduce-scatter for one module: exchange the parts, add them in rank order onto the running sum."""

    def __init__(self, reduction: ExactReduction) -> None:
        self.reduction = reduction
        self.total: torch.Tensor | None = None
        reduction.sums.append(self)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        # Asked for on one rank too, where the sum is FSDP's own.
        if dtype != torch.float32:
            raise UsageError(
                "exact mode adds gradients in fp32",
                key="reduce_dtype",
                expected=torch.float32,
                found=dtype,
                hint="use MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)",
            )
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        # Another number of elements means other parameters than before: the patterns will differ at the step's end,
        # where all ranks see it together, while an error here would leave the others waiting.
        if self.total is None or self.total.numel() != output_tensor.numel():
            output_tensor.zero_()
        else:
            output_tensor.copy_(self.total)
        for part in parts.view(group.size(), -1)[: self.reduction.active_ranks]:
            output_tensor += part
        # FSDP makes this memory the sharded gradient; it stays the running sum until the next micro-step adds to it.
        self.total = output_tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


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
    meshes: dict[tuple[int, ...], DeviceMesh] = {}
    for name, parameter in model.named_parameters():
        _refuse_parameter(name, parameter)
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            meshes[tuple(dist.get_process_group_ranks(mesh.get_group()))] = mesh
    if len(meshes) != 1:
        raise UsageError(
            "exact mode needs one mesh for all parameters",
            expected=1,
            found=len(meshes),
            hint="give every fully_shard the same mesh",
        )
    for optimizer in optimizers:
        _refuse_optimizer(optimizer)
    return next(iter(meshes.values()))


def _refuse_optimizer(optimizer: torch.optim.Optimizer) -> None:
    kinds = {kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")}
    name = type(optimizer).__name__
    if kinds & _MIXING:
        raise UsageError(
            "this optimizer mixes the elements of a parameter, in an order that follows the sharding",
            key=name,
            hint=f"exact mode works with element-wise ones: {', '.join(sorted(_ELEMENTWISE))}",
        )
    if not kinds & _ELEMENTWISE:
        all_ranks().warn(f"exact mode: {name} is taken to be element-wise; if it is not, bits follow the world size")
    for group in optimizer.param_groups:
        if group.get("fused") and any(parameter.device.type == "cpu" for parameter in group["params"]):
            raise UsageError(
                "the fused CPU optimizers' bits follow the split of a tensor",
                key=name,
                hint="use fused=False in exact mode",
            )


def _refuse_parameter(name: str, parameter: nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        if parameter.requires_grad:
            raise UsageError(
                "exact mode needs every trained parameter under fully_shard",
                key=name,
                hint="call fully_shard on the whole model too, and ignore no trained parameter",
            )
        return
    if parameter.device_mesh.ndim != 1:
        raise UsageError(
            "exact mode needs a one-dimensional mesh",
            key=name,
            expected="1 mesh axis",
            found=f"{parameter.device_mesh.ndim} ({parameter.device_mesh.mesh_dim_names})",
            hint="use the stock reduction with HSDP or tensor parallelism",
        )
    if parameter.requires_grad and parameter.dtype != torch.float32:
        raise UsageError(
            "exact mode needs parameters in fp32",
            key=name,
            expected=torch.float32,
            found=parameter.dtype,
            hint="keep them in fp32 and compute in bf16 through MixedPrecisionPolicy",
        )
