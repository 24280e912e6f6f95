"""No corrupt byte of the source gets a valid checksum: whatever a rewrite does with it, it is verified."""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rewriting import payload_place, places, rewrite, rows_of, write_boxes

from reshard.engine import run as engine
from reshard.engine.blocks import PAGE_BYTES
from reshard.errors import CheckpointUnsound
from reshard.verify.check.run import check

COLUMNS = [((0, 0), (1030, 512)), ((0, 512), (1030, 300)), ((0, 812), (1030, 212))]
TENSORS: dict[str, tuple[torch.Tensor, Any]] = {
    "rows with a rest": (torch.randn(2051, 256), 2),
    "small": (torch.randn(8, 16), 1),
    "columns": (torch.randn(1030, 1024), COLUMNS),
    "narrow columns": (torch.randn(64, 6), [((0, 0), (64, 1)), ((0, 1), (64, 5))]),
    "turned": (torch.randn(700, 500).t(), 1),
    "turned and tall": (torch.randn(3, 40_000).t(), 1),
}


def flip(folder: Path, key: str, offsets: tuple[int, ...], at: float) -> None:
    path, start, length = payload_place(folder, key, offsets)
    content = bytearray(path.read_bytes())
    content[start + min(length - 1, int(length * at))] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("segment_bytes", [None, 64 * PAGE_BYTES], ids=["whole", "cut"])
@pytest.mark.parametrize("name", TENSORS)
def test_a_flipped_bit_is_named_wherever_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, segment_bytes: int | None, ranks: int, dtype: str | None
) -> None:
    if segment_bytes is not None:
        monkeypatch.setattr(engine, "SEGMENT_BYTES", segment_bytes)
    tensor, parts = TENSORS[name]
    boxes = parts if isinstance(parts, list) else rows_of(tensor, parts)
    folder = write_boxes(tmp_path / "source", {"model.w": (tensor, boxes)})
    rewrite(folder, tmp_path / "sound", ranks, dtype=dtype)
    for number, (offsets, _) in enumerate(boxes):
        for at in (0, 0.5, 0.999):
            broken = write_boxes(tmp_path / f"broken-{number}-{at}", {"model.w": (tensor, boxes)})
            flip(broken, "model.w", tuple(offsets), at)
            with pytest.raises(CheckpointUnsound, match=r"__\d_0\.distcp: model\.w: damaged: the checksum"):
                rewrite(broken, tmp_path / "made", ranks, dtype=dtype)
            assert not (tmp_path / "made").exists()
            assert [path.name for path in tmp_path.glob(".offline-*")] == []


def test_a_flipped_bit_of_an_object_is_named(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {"w": torch.ones(3)}, "text": "value" * 30}, checkpoint_id=tmp_path / "source", no_dist=True)
    info = next(info for place, info in dcp.FileSystemReader(tmp_path / "source").read_metadata().storage_data.items()
                if place.fqn == "text")  # fmt: skip
    path = tmp_path / "source" / info.relative_path
    content = bytearray(path.read_bytes())
    content[content.index(b"valuevalue") + 3] ^= 1
    path.write_bytes(content)
    archive = bytes(content[info.offset : info.offset + info.length])
    assert zipfile.ZipFile(io.BytesIO(archive)).testzip() == "archive/data.pkl"
    with pytest.raises(CheckpointUnsound, match=r"__0_0\.distcp: text: damaged: the checksum of data\.pkl is wrong"):
        rewrite(tmp_path / "source", tmp_path / "made", 2)
    assert not (tmp_path / "made").exists()


def test_a_source_that_is_put_right_is_read_anew(tmp_path: Path) -> None:
    """With its old times, as rsync and cp -p do."""
    import os

    tensor = torch.randn(400, 8)
    folder = write_boxes(tmp_path / "source", {"model.w": (tensor, rows_of(tensor, 2))})
    path, _, _ = payload_place(folder, "model.w", (0, 0))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    good = path.read_bytes()
    flip(folder, "model.w", (0, 0), 0.5)
    os.utime(path, ns=times)
    for _ in range(2):
        with pytest.raises(CheckpointUnsound, match="checksum"):
            rewrite(folder, tmp_path / "made", 3)
    path.write_bytes(good)
    os.utime(path, ns=times)
    rewrite(folder, tmp_path / "made", 3)
    assert check(tmp_path / "made", deep=True).is_sound
    assert places(tmp_path / "made")
