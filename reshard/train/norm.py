"""Gradient clipping, with a norm that is the same at every world size where the model is in exact mode.

The exact norm adds squares without rounding, so the order and the split of the rows do not matter. Every gradient is
scaled by one power of two (from the global maximum) into [-1, 1]; its square in float64 is exact, and is cut into limbs
of a few bits, each a whole number that an int64 can add up over all elements without overflow:

    square = limb_0 * 2^-b + limb_1 * 2^-2b + ...      b = 62 - log2(elements); limbs for 44 + log2(elements) bits

What is cut off below the last limb is at most 2^-42 of the largest square over all elements together, so the norm is
right to 2e-13. Squares of float64 elements are rounded once each, which no order or split changes either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from reshard.errors import UsageError
from reshard.train.fsdp1 import is_fsdp1
from reshard.train.slot_sums import exact_reduction

# Float64 copies of a gradient are made piece by piece: on the CPU such that they stay in a core's cache, on a GPU such
# that a piece is worth a kernel.
PIECE_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 22}


def clip_grad_norm_(model: torch.nn.Module, max_norm: float) -> float:
    """Scales the gradients down to a global 2-norm of at most ``max_norm``; returns the norm before.

    Collective. In exact mode (:func:`reshard.exact`) the norm and so the clipped gradients have the same bits at
    every world size; else it is torch's own clipping.
    """
    if not max_norm > 0:
        raise UsageError("would stop or reverse the training", key="max_norm", expected="above 0", found=max_norm)
    if isinstance(model, FullyShardedDataParallel):
        return float(model.clip_grad_norm_(max_norm))
    if is_fsdp1(model):
        raise UsageError("FSDP1 clips at its root, and this module only contains one", hint="pass the FSDP1 root")
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    reduction = exact_reduction(model)
    if reduction is None:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    norm_before = exact_norm(local, reduction.shard_group)
    # As torch clips: the coefficient is at most 1, and not-a-number passes through to every gradient.
    coefficient = max_norm / (norm_before + 1e-6)
    if not coefficient >= 1.0:
        for gradient in local:
            gradient.mul_(coefficient)
    return norm_before


def exact_norm(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None = None) -> float:
    """The 2-norm over all elements of all ranks' tensors, the same bits however they are split.

    Collective over ``group``, which must not be None where there are several ranks. NaN and inf anywhere make it NaN
    and inf on all ranks.
    """
    device = tensors[0].device if tensors else torch.device("cpu")
    pieces = list(_pieces(tensors))
    largest, elements = _extent(pieces, device, group)
    if not math.isfinite(largest):
        return largest
    if largest == 0.0:
        return 0.0
    exponent = math.frexp(largest)[1]
    headroom = max(1, elements.bit_length())
    bits = 62 - headroom
    limbs = -(-(44 + headroom) // bits)
    sums = torch.zeros(limbs, dtype=torch.int64, device=device)
    room = max((piece.numel() for piece in pieces), default=0)
    rests = torch.empty(room, dtype=torch.float64, device=device)
    wholes = torch.empty(room, dtype=torch.int64, device=device)
    for piece in pieces:
        count = piece.numel()
        _add_squares(sums, piece, exponent, bits, rests[:count], wholes[:count])
    _all_reduce(sums, dist.ReduceOp.SUM, group)
    total = sum(limb << (bits * (limbs - 1 - i)) for i, limb in enumerate(sums.tolist()))
    # Whole-number division and square root are correctly rounded, so the result is the same everywhere.
    try:
        return math.ldexp(math.sqrt(total / (1 << (bits * limbs))), exponent)
    except OverflowError:
        return math.inf


def _extent(pieces: Sequence[torch.Tensor], device: torch.device, group: dist.ProcessGroup | None) -> tuple[float, int]:
    """The largest magnitude of all, NaN if there is any, and how many elements there are."""
    ends = [torch.stack(torch.aminmax(piece)).double().abs() for piece in pieces]
    magnitudes = torch.stack(ends) if ends else torch.zeros(1, device=device, dtype=torch.float64)
    # A maximum over ranks is not reliable for NaN, so NaN travels as a flag of its own.
    isnan = magnitudes.isnan()
    extent = torch.stack([torch.where(isnan, 0.0, magnitudes).max(), isnan.any().double()])
    elements = torch.tensor([sum(piece.numel() for piece in pieces)], dtype=torch.int64, device=device)
    _all_reduce(extent, dist.ReduceOp.MAX, group)
    _all_reduce(elements, dist.ReduceOp.SUM, group)
    largest, has_nan = extent.tolist()
    return math.nan if has_nan else largest, int(elements.item())


def _add_squares(
    sums: torch.Tensor, piece: torch.Tensor, exponent: int, bits: int, rest: torch.Tensor, whole: torch.Tensor
) -> None:
    """Cuts the squares of a piece, over 4^exponent, into limbs. ``rest`` and ``whole`` are room to work in."""
    rest.copy_(piece)
    # In halves: for float64 denormals the whole factor is more than a float64 can hold.
    half = exponent // 2
    rest.mul_(math.ldexp(1.0, -half)).mul_(math.ldexp(1.0, half - exponent)).square_()
    for i in range(len(sums)):
        rest.mul_(float(1 << bits))
        # Towards zero, which is down.
        whole.copy_(rest)
        sums[i] += whole.sum()
        rest.frac_()


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    for tensor in tensors:
        if tensor.numel():
            most = PIECE_ELEMENTS.get(tensor.device.type, 1 << 20)
            yield from torch.split(tensor.detach().reshape(-1), most)


def _all_reduce(tensor: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> None:
    if group is not None and group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
