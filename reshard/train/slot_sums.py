"""Sums of gradients in the order of the slots.

FSDP2 takes a collective of ours for its reduce-scatter, which exchanges the same bytes (all-to-all) and then lets each
rank add the parts it received, in rank order, onto the running sum of its shard. Slot v runs in micro-step v // ranks
on rank v % ranks, so rank order within a micro-step, micro-step after micro-step, *is* slot order. On one rank FSDP's
own accumulation has that order already.

Every sum starts at +0.0, so that a slot whose part is missing leaves no trace: x + 0.0 is x for every x but -0.0, and a
sum that started at +0.0 is never -0.0.

With replicas (HSDP) the ranks of replica 0 come first, then those of replica 1, and so on. The running sum goes along
that chain: each replica receives it, adds the parts of its own ranks and sends it on. FSDP then all-reduces over the
replicas; all but the last give zeros to that, so it only copies.

FSDP lays the gradients of a module end to end, those that there are. So each slot must use the same parameters, once;
FSDP's own hooks on them tell which it reduced, and a step in which that differs is refused on all ranks together.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from reshard.dcp.ranks import all_ranks
from reshard.errors import UsageError

_reductions: weakref.WeakKeyDictionary[nn.Module, ExactReduction] = weakref.WeakKeyDictionary()


def exact_reduction(model: nn.Module) -> ExactReduction | None:
    """What :func:`reshard.exact` made of a model, or of one inside it (``torch.compile`` wraps one); else None.

    Raises:
        UsageError: there are several in it.
    """
    found = {id(each): each for module in model.modules() if (each := _reductions.get(module)) is not None}
    if not found:
        return None
    if len(found) > 1:
        raise UsageError(
            "several models in exact mode within one: their sums would not be in one order",
            found=len(found),
            hint="call reshard.exact once, on the root that holds them all, or accumulate each by itself",
        )
    return next(iter(found.values()))


class ExactReduction:
    """The running sums of one step, shared by the model's FSDP modules. ``accumulate`` drives it.

    Attributes:
        ranks: of the mesh, so as many as share a sum.
        shard_group: the ranks that a parameter is sharded over.
        active_ranks: how many of all have a slot in this micro-step.
        threads: CPU threads that the run is to have.
        machine: the kind of device that it is on.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, threads: int, machine: str) -> None:
        self._model = weakref.ref(model)
        self.threads = threads
        self.machine = machine
        self.shard_group = mesh.get_group(mesh.ndim - 1)
        self.replicas = mesh.get_group(0) if mesh.ndim > 1 and mesh.size(0) > 1 else None
        self.replica = 0 if self.replicas is None else self.replicas.rank()
        self.ranks = mesh.size()
        self._rank = self.replica * self.shard_group.size() + self.shard_group.rank()
        self.active_ranks = 0
        self._is_open = False
        self.sums: list[_SlotOrderedSum] = []
        self._reduced: list[list[str]] = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(functools.partial(self._note, name))  # type: ignore[no-untyped-call]

    def install(self, module: FSDPModule) -> None:
        """Has an FSDP module add its gradients here."""
        running = _SlotOrderedSum(self)
        self.sums.append(running)
        module.set_custom_reduce_scatter(running)  # type: ignore[arg-type]
        if self.ranks > 1:
            # On one rank it would be a division by one.
            module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        assert isinstance(module, nn.Module)
        _reductions[module] = self

    @property
    def described(self) -> dict[str, Any]:
        """What the bits depend on, as manifests have it."""
        return {"threads": self.threads, "machine": self.machine}

    def require_place(self, dp_rank: int, dp_ranks: int) -> None:
        """Raises UsageError if the slots are not dealt to the ranks that add up the gradients."""
        if (dp_rank, dp_ranks) != (self._rank, self.ranks):
            raise UsageError(
                "the batch plan's ranks are not those that the model is sharded over",
                key="dp_rank",
                expected=f"rank {self._rank} of {self.ranks}, as on the model's mesh",
                found=f"rank {dp_rank} of {dp_ranks}",
            )

    def require_all_of(self, model: nn.Module) -> None:
        """Raises UsageError if something in a model is trained whose gradients are not added here."""
        outside = [
            name
            for name, each in model.named_modules()
            if _reductions.get(each) is None and isinstance(each, FSDPModule)
        ]
        own = self._model()
        if own is not None and own is not model:
            here = {id(parameter) for parameter in own.parameters()}
            outside += [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in here]
        if outside:
            raise UsageError(
                "exact mode was switched on for a part of the model, and the rest is trained as well",
                key=_some([name or "the root" for name in outside]),
                hint="call reshard.exact on the root given to fully_shard, and on nothing else",
            )

    def require_step(self) -> None:
        """Raises UsageError outside of :func:`reshard.accumulate`, where nobody knows which slots there are."""
        if not self._is_open:
            raise UsageError(
                "a backward outside of reshard.accumulate: exact mode does not know whose gradients these are",
                hint="let reshard.accumulate run every backward of the model",
            )

    def require_as_promised(self) -> None:
        """Raises UsageError if what :func:`reshard.exact` set for the process has been changed since."""
        if (threads := torch.get_num_threads()) != self.threads:
            raise UsageError(
                "the number of CPU threads was changed after reshard.exact, and some kernels' sums follow it",
                key="threads",
                expected=self.threads,
                found=threads,
                hint="give the number to reshard.exact, and leave it to that",
            )
        if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
            raise UsageError(
                "deterministic algorithms were switched off after reshard.exact",
                key="use_deterministic_algorithms",
                hint="leave them on, or train without exact mode",
            )

    @property
    def active_here(self) -> int:
        """How many ranks of this replica have a slot in this micro-step."""
        shards = self.shard_group.size()
        return min(shards, max(0, self.active_ranks - self.replica * shards))

    def start(self) -> None:
        """Before a step's first micro-step: every sum is zero."""
        self._clear_gradients()
        self._is_open = True
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
        self._is_open = False
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
        model = self._model()
        if not first and model is not None and any(parameter.requires_grad for parameter in model.parameters()):
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
            mended = "call model.set_reduce_scatter_unused_params(True): the unused then get zeros, and weight decay"
            can_mend = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
            return UsageError(
                "parameters that only some slots of this step used: exact mode cannot add their gradients",
                key=_some(some),
                hint=mended if can_mend else "use a later torch, which can reduce the unused as zeros",
            )
        if twice := sorted({name for names in micro_steps for name in names if names.count(name) > 1}):
            return UsageError(
                "gradients that FSDP reduced more than once in one micro-step: exact mode cannot order their sum",
                key=_some(twice),
                hint="let compute_loss return the loss, and accumulate call backward, once",
            )
        return UsageError(
            "gradients that exact mode did not see",
            hint="call reshard.exact once the parameters are in place, and leave set_requires_gradient_sync on",
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
        self._reduction = reduction
        self.total: torch.Tensor | None = None

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
        if group.size() == 1:
            # Called here by torch 2.9; later ones do this by themselves. FSDP adds it to the gradient that is there.
            output_tensor.copy_(input_tensor)
            return
        self._reduction.require_step()
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        # Another number of elements means other parameters than before: the patterns will differ at the step's end,
        # where all ranks see it together, while an error here would leave the others waiting.
        if self.total is None or self.total.numel() != output_tensor.numel():
            output_tensor.zero_()
        else:
            output_tensor.copy_(self.total)
        self._add(parts.view(group.size(), -1), output_tensor)
        # FSDP makes this memory the sharded gradient; it stays the running sum until the next micro-step adds to it.
        self.total = output_tensor

    def _add(self, parts: torch.Tensor, running: torch.Tensor) -> None:
        """Adds the parts of the ranks that have a slot; where there are replicas, in their turn."""
        replicas, replica = self._reduction.replicas, self._reduction.replica
        if replicas is not None and replica > 0:
            dist.recv(running, group=replicas, group_src=replica - 1)
        for part in parts[: self._reduction.active_here]:
            running += part
        if replicas is not None and replica < replicas.size() - 1:
            dist.send(running, group=replicas, group_dst=replica + 1)
            running.zero_()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
