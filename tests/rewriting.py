"""For tests of the rewrite: checkpoints in any tiling by stock's own archives, read back by stock torch alone."""

from __future__ import annotations

import io
import pickle
import struct
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from sharded import archive, places
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from reshard.formats.checkpoint import Checkpoint
from reshard.geometry.mesh import Mesh
from reshard.rewrite import run as offline
from reshard.rewrite.prepare import prepare

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
]

Boxes = Sequence[tuple[Sequence[int], Sequence[int]]]


def any_bits(shape: Sequence[int], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor of arbitrary bits (of 0 and 1 for bool): every NaN there is among them."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    top = 2 if dtype == torch.bool else 256
    return torch.randint(0, top, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(tuple(shape))


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order."""
    # Torch calls one element contiguous whatever its stride, and then refuses to view it.
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
    return dense.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def write_boxes(
    folder: Path,
    tensors: Mapping[str, tuple[torch.Tensor, Boxes]],
    objects: Mapping[str, Any] | None = None,
    files: int = 3,
    archives: Mapping[tuple[str, int], bytes] | None = None,
) -> Path:
    """A DCP checkpoint whose chunks are the given boxes, dealt out to files in turn.

    Args:
        archives: (key, number of the box) -> bytes to store in place of the chunk's archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    contents = [bytearray() for _ in range(files)]
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    turn = 0

    def put(place: MetadataIndex, data: bytes) -> None:
        nonlocal turn
        file = turn % files
        storage[place] = _StorageInfo(f"__{file}_0.distcp", len(contents[file]), len(data))
        contents[file] += data
        turn += 1

    for key, (tensor, boxes) in tensors.items():
        chunks = []
        for number, (offsets, sizes) in enumerate(boxes):
            offset = torch.Size(offsets)
            chunks.append(ChunkStorageMetadata(offset, torch.Size(sizes)))
            part = tensor[tuple(slice(low, low + size) for low, size in zip(offsets, sizes, strict=True))]
            put(MetadataIndex(key, offset), (archives or {}).get((key, number)) or archive(part.clone()))
        entries[key] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.shape, chunks)
    for key, value in (objects or {}).items():
        entries[key] = BytesStorageMetadata()
        put(MetadataIndex(key), archive(value))
    metadata = Metadata(entries, planner_data={key: (key,) for key in entries}, storage_data=storage)
    for number, content in enumerate(contents):
        (folder / f"__{number}_0.distcp").write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    return folder


def rows_of(tensor: torch.Tensor, parts: int) -> Boxes:
    """The boxes of dim-0 shards, as ``torch.chunk`` cuts."""
    if not tensor.dim():
        return [((), ())]
    rest = tuple(tensor.shape[1:])
    boxes, row = [], 0
    for part in tensor.chunk(parts):
        boxes.append(((row, *(0,) * len(rest)), (len(part), *rest)))
        row += len(part)
    return boxes


def stock_metadata(folder: Path) -> Metadata:
    """What stock torch reads from ``.metadata``."""
    return dcp.FileSystemReader(folder).read_metadata()


def stock_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a DCP checkpoint, loaded whole by stock torch."""
    entries = stock_metadata(folder).state_dict_metadata
    target: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=folder, no_dist=True)
    return target


def stock_objects(folder: Path) -> dict[str, bytes]:
    """The stored bytes of everything that is not a tensor."""
    metadata = stock_metadata(folder)
    found = {}
    for place, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[place.fqn], BytesStorageMetadata):
            content = (folder / info.relative_path).read_bytes()
            found[place.fqn] = content[info.offset : info.offset + info.length]
    return found


def stock_chunks(folder: Path) -> dict[tuple[str, tuple[int, ...]], torch.Tensor]:
    """(key, offsets) -> the tensor in the archive that the metadata names, by ``torch.load``."""
    metadata = stock_metadata(folder)
    found = {}
    for place, info in metadata.storage_data.items():
        if isinstance(metadata.state_dict_metadata[place.fqn], TensorStorageMetadata):
            content = (folder / info.relative_path).read_bytes()
            stream = io.BytesIO(content[info.offset : info.offset + info.length])
            found[place.fqn, tuple(place.offset)] = torch.load(stream, weights_only=True)
    return found


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Same keys, dtypes, shapes and bits."""
    assert sorted(found) == sorted(expected)
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape), key
        assert bits(found[key]) == bits(tensor), key


def rewrite(source: Path, destination: Path, mesh: Mesh | int, **options: Any) -> offline.Summary:
    """The rewrite, in this process."""
    force = options.pop("force", False)
    prepared = prepare(source, Mesh(mesh) if isinstance(mesh, int) else mesh, **options)
    return offline.run(prepared, destination, force=force)


def file_bytes(folder: Path, but: Iterable[str] = ()) -> dict[str, bytes]:
    """Every file below a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in but
    }


def payload_place(folder: Path, key: str, offsets: tuple[int, ...]) -> tuple[Path, int, int]:
    """File, first byte and length of a chunk's elements, found by the standard library."""
    info = places(folder)[key, offsets]
    path = folder / info.relative_path
    content = path.read_bytes()[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(content)) as opened:
        (record,) = [entry for entry in opened.infolist() if entry.filename.endswith("/data/0")]
    name_bytes, extra_bytes = struct.unpack_from("<HH", content, record.header_offset + 26)
    return path, info.offset + record.header_offset + 30 + name_bytes + extra_bytes, record.file_size


def assert_holds(checkpoint: Checkpoint, state: Mapping[str, torch.Tensor]) -> None:
    """The same names, dtypes, shapes and bits, and chunks that tile. Closes the checkpoint."""
    with checkpoint:
        assert sorted(checkpoint.keys) == sorted(state)
        assert list(checkpoint.index.tiling_faults()) == []
        for name, tensor in state.items():
            found = checkpoint.read(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape), name
            assert bits(found) == bits(tensor), name
