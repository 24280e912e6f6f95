"""Handing on, between the ranks that hold the same boxes, what one of them has read. Over CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist

from reshard.dcp.ranks import Ranks
from reshard.dcp.shards import Shard, as_array
from reshard.dcp.sharing import Held, Shares, part_rows

# Small boxes travel together, up to this many bytes; larger ones on their own, without a copy.
_PACK_BYTES = 4 << 20


def exchange(shards: Sequence[Shard], held: Held, shares: Shares, ranks: Ranks) -> None:
    """Gives each shard what others have read of it. Collective for the ranks that share anything."""
    if ranks.group is None or not shares.groups:
        return
    # Boxes in the order of their marks, and groups in that of their ranks: on all ranks the same.
    order = np.lexsort((held.mark[:, 1], held.mark[:, 0], shares.group))
    starts = np.searchsorted(shares.group[order], np.arange(len(shares.groups) + 1))
    with ranks.contact(), torch.no_grad():
        for number, members in enumerate(shares.groups):
            boxes = order[starts[number] : starts[number + 1]].tolist()
            for part, member in enumerate(members):
                taken = [
                    _part(shards[box].tensor, shares.taker[box], part, len(members))
                    for box in boxes
                    if shares.taker[box] in (member, -1)
                ]
                for pack in _packs([tensor for tensor in taken if tensor.numel()]):
                    if member == ranks.rank:
                        _send(pack, [other for other in members if other != member], ranks.group)
                    else:
                        _receive(pack, member, ranks.group)


def _part(tensor: torch.Tensor, taker: int, part: int, parts: int) -> torch.Tensor:
    if taker >= 0:
        return tensor
    first, last = part_rows(tensor.shape[0], part, parts)
    return tensor[first:last]


def _packs(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    pack: list[torch.Tensor] = []
    pack_bytes = 0
    for tensor in tensors:
        length = tensor.numel() * tensor.element_size()
        if pack and pack_bytes + length > _PACK_BYTES:
            yield pack
            pack, pack_bytes = [], 0
        pack.append(tensor)
        pack_bytes += length
    if pack:
        yield pack


def _send(pack: Sequence[torch.Tensor], receivers: Sequence[int], group: dist.ProcessGroup) -> None:
    views = [tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).cpu() for tensor in pack]
    content = views[0] if len(views) == 1 else torch.cat(views)
    for work in [dist.isend(content, group=group, group_dst=receiver) for receiver in receivers]:
        assert work is not None
        work.wait()


def _receive(pack: Sequence[torch.Tensor], sender: int, group: dist.ProcessGroup) -> None:
    if len(pack) == 1 and pack[0].is_contiguous() and as_array(pack[0]) is not None:
        dist.recv(pack[0].reshape(-1).view(torch.uint8), group=group, group_src=sender)
        return
    lengths = [tensor.numel() * tensor.element_size() for tensor in pack]
    content = torch.empty(sum(lengths), dtype=torch.uint8)
    dist.recv(content, group=group, group_src=sender)
    start = 0
    for tensor, length in zip(pack, lengths, strict=True):
        # A view of another dtype has to start at a multiple of its width.
        tensor.copy_(content[start : start + length].clone().view(tensor.dtype).view(tensor.shape))
        start += length
