"""Gradients with the same bits at every world size.

Forward and backward of a micro-batch do not know the world size; the order in which gradients are added does. Here it
is the order of the slots: FSDP2 takes a collective of ours for its reduce-scatter, which exchanges the same bytes
(all-to-all) and then lets each rank add the parts it received, in rank order, onto the running sum of its shard. Slot
v runs in micro-step v // ranks on rank v % ranks, so rank order within a micro-step, micro-step after micro-step, *is*
slot order. On one rank FSDP never calls the collective; its own accumulation has that order already.

Every sum starts at +0.0, so that a slot whose part is missing leaves no trace: x + 0.0 is x for every x but -0.0, and a
sum that started at +0.0 is never -0.0.

Needs FSDP2 on a one-dimensional mesh, parameters and gradient reduction in fp32 (compute may be bf16).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from reshard.environment import want_deterministic_cublas
from reshard.errors import StateMismatch, UsageError
from reshard.train import fsdp1

log = logging.getLogger("reshard")
_reductions: weakref.WeakKeyDictionary[torch.nn.Module, ExactReduction] = weakref.WeakKeyDictionary()


def exact(
    model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer] = (), *, threads: int = 1
) -> ExactReduction:
    """Makes an FSDP2 model sum gradients in slot order. Call it on every rank, once, after ``fully_shard``.

    ``accumulate`` and ``clip_grad_norm_`` do their part by themselves afterwards. Deterministic algorithms are
    switched on for the process, and on the CPU the number of threads is fixed, since some kernels' sums follow it.

    Args:
        model: the root module given to ``fully_shard``.
        optimizers: those that will step it, to be checked.
        threads: CPU threads, the same at every world size.

    Raises:
        UsageError: something here cannot be exact; it is named.
    """
    modules: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    _refuse_inexact(model, modules, optimizers)
    want_deterministic_cublas()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_num_threads(threads)
    reduction = ExactReduction(model)
    for module in modules:
        module.set_custom_reduce_scatter(_SlotOrderedSum(reduction))  # type: ignore[arg-type]
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    _reductions[model] = reduction
    return reduction


def exact_reduction(model: torch.nn.Module) -> ExactReduction | None:
    """What :func:`exact` made of this model, or None."""
    return _reductions.get(model)


class ExactReduction:
    """The running sums of one step, shared by the model's FSDP modules. ``accumulate`` drives it."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self.active_ranks = 0
        self.sums: list[_SlotOrderedSum] = []

    def start(self) -> None:
        """Before a step's first micro-step: every sum is zero."""
        self._clear_gradients()
        for running in self.sums:
            running.total = None

    def micro_step(self, active_ranks: int) -> None:
        """Before each micro-step: the parts of ranks from ``active_ranks`` on are idle and not added."""
        self.active_ranks = active_ranks
        if dist.is_initialized() and dist.get_world_size() > 1:
            # FSDP would add the running sum to the gradient that is there.
            self._clear_gradients()

    def finish(self) -> None:
        """After the last micro-step."""
        for gradient in self._gradients():
            # Where FSDP summed by itself, on one rank, the sum did not start at +0.0.
            gradient.add_(0.0)

    def _gradients(self) -> list[torch.Tensor]:
        model = self._model()
        assert model is not None
        return [_local(p.grad) for p in model.parameters() if p.grad is not None]

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
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if input_tensor.dtype != torch.float32:
            raise UsageError(
                "exact mode adds gradients in fp32",
                key="reduce_dtype",
                expected=torch.float32,
                found=input_tensor.dtype,
                hint="use MixedPrecisionPolicy(param_dtype=..., reduce_dtype=torch.float32)",
            )
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        if self.total is None:
            output_tensor.zero_()
        elif self.total.numel() == output_tensor.numel():
            output_tensor.copy_(self.total)
        else:
            raise StateMismatch(
                "another set of parameters got gradients in this micro-step than before",
                expected=f"{self.total.numel()} elements a rank",
                found=output_tensor.numel(),
                hint="call model.set_reduce_scatter_unused_params(True)",
            )
        for part in parts.view(group.size(), -1)[: self.reduction.active_ranks]:
            output_tensor += part
        # FSDP makes this memory the sharded gradient; it stays the running sum until the next micro-step adds to it.
        self.total = output_tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _refuse_inexact(
    model: torch.nn.Module, modules: list[FSDPModule], optimizers: Iterable[torch.optim.Optimizer]
) -> None:
    if fsdp1.is_fsdp1(model):
        raise UsageError("exact mode needs FSDP2: FSDP1 has no hook for its reduce-scatter", hint="use fully_shard")
    if not isinstance(model, FSDPModule):
        raise UsageError("exact mode needs the root given to fully_shard", found=type(model).__name__)
    for name, parameter in model.named_parameters():
        _refuse_parameter(name, parameter)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            on_cpu = any(parameter.device.type == "cpu" for parameter in group["params"])
            if group.get("fused") and on_cpu:
                raise UsageError(
                    "the fused CPU optimizers' bits follow the split of a tensor",
                    key=type(optimizer).__name__,
                    hint="use fused=False in exact mode",
                )


def _refuse_parameter(name: str, parameter: torch.nn.Parameter) -> None:
    if not isinstance(parameter, DTensor):
        if parameter.requires_grad:
            raise UsageError("exact mode needs every trained parameter under fully_shard", key=name)
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
