"""Checkpoints of flat parameters that other tools wrote, tensor by tensor, where they are at hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from reshard.formats.rescue.fairscale import open_fairscale
from reshard.formats.rescue.fsdp_ranks import open_ranks
from reshard.formats.rescue.hints import Hints, read_layout
from reshard.formats.rescue.rank_sets import rank_sets

PEERS = Path(__file__).resolve().parents[2].parent / "shared" / "peers"
CASES = {
    **dict.fromkeys(
        [
            "fsdp1_local_flat_nested_w4",
            "fsdp1_local_flat_single_w4",
            "fsdp1_local_orig_nested_w4",
            "old24_fsdp1_local_flat_w4",
            "verl_fsdp1_flat_w4",
            "verl_fsdp1_orig_w4",
        ],
        open_ranks,
    ),
    **dict.fromkeys(["fairscale_fairseq_single_w2", "fairscale_metaseq_w4", "fairscale_noflat_w2"], open_fairscale),
}


def expected(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Shape and bytes of every tensor, by our keys; read without anything of ours."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {
        key.replace("optim.", "optim.state.", 1) if key.startswith("optim.") else key: (
            tuple(entry["shape"]),
            data[slice(*entry["data_offsets"])],
        )
        for key, entry in header.items()
    }


@pytest.mark.skipif(not PEERS.is_dir(), reason="no checkpoints of other tools here")
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_what_the_tool_had(case: str) -> None:
    folder = PEERS / case
    order = json.loads((folder / "case.json").read_text())["optim_param_order_per_group"]
    layout = folder / "flat_layout.json"
    hints = Hints(units=read_layout(layout) if layout.exists() else None, param_order=tuple(map(tuple, order)))
    files = [path for path in (folder / "ckpt").iterdir() if path.is_file()]
    checkpoint = CASES[case](folder / "ckpt", rank_sets(files), hints)
    index = checkpoint.index
    found = {
        key: (index.shapes[index.number[key]], checkpoint.read_array(key).tobytes())
        for key in index.names
        if not key.startswith("rng.")
    }
    wanted = expected(folder / "expected.safetensors")
    assert found.keys() == wanted.keys()
    assert [key for key in wanted if found[key] != wanted[key]] == []
    assert list(index.tiling_faults()) == []
    assert checkpoint.manifest is not None and checkpoint.manifest.step == 3
