"""Safetensors files as a checkpoint: one file, a Hugging Face folder, or the shards that torch's DCP writer leaves.

A Hugging Face folder holds all tensors whole::

    model.safetensors                                    either all in one,
    model-00001-of-00003.safetensors ...                 or in several, each tensor in one of them, and
    model.safetensors.index.json                         {"metadata": ..., "weight_map": {tensor: file}}

``HuggingFaceStorageWriter`` of torch.distributed.checkpoint, with ``save_distributed``, writes a file a rank instead::

    shard-00002-model-00001-of-00001.safetensors         what rank 1 owns of each tensor (shards count from 1)
        __metadata__["DCP_SHARDING_INFO"]                JSON: {tensor: {"saved_offsets": [...]}}, where that lies in it

A tensor's global shape is recorded nowhere: it is the largest end of its chunks, so the loss of the last shards of all
tensors cannot be seen; any other is a hole. Replicated tensors are in one shard. With ``enable_consolidation`` the
shards go to ``sharded/``, and whole copies of the tensors beside it, their index last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from reshard.errors import CheckpointUnsound, UsageError
from reshard.formats.checkpoint import Checkpoint, all_known
from reshard.formats.safetensors_header import HEAD_BYTES, Header, read_header, unique_fields
from reshard.formats.unpickle import missing_data
from reshard.index.index import RAW, Index, IndexBuilder, Payloads
from reshard.storage.byte_ranges import SourceFiles
from reshard.storage.durable import storage_errors

NAME = "safetensors"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
SHARDED_FOLDER = "sharded"

_WHOLE = "model.safetensors"
_SHARDING = "DCP_SHARDING_INFO"
_SHARD_NAME = re.compile(r"shard-\d+-.+\.safetensors")
_NUMBERED_NAME = re.compile(r"(?:shard-\d+-)?(.+)-(\d{5})-of-(\d{5})\.safetensors")
_LFS_HEAD_BYTES = 64


class _Piece(NamedTuple):
    """What one file holds of a tensor."""

    file: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start_bytes: int
    length_bytes: int


def is_shard(name: str) -> bool:
    """Whether a file's name is that of one shard of several, which says nothing alone."""
    return _SHARD_NAME.fullmatch(name) is not None


def is_model_folder(names: Iterable[str]) -> bool:
    """Whether files of these names make a folder of one model: an index, one whole file, numbered files or shards."""
    return any(
        name == _WHOLE or name.endswith(INDEX_SUFFIX) or is_shard(name) or _NUMBERED_NAME.fullmatch(name)
        for name in names
    )


def open_file(path: Path) -> Checkpoint:
    """Opens one file by itself.

    Raises:
        CheckpointUnsound: it is missing, not a sound safetensors file, or one shard of several.
        StorageError: the file system failed to read it.
    """
    return _open(path, path.parent, [path.name], {})


def open_folder(folder: Path, index: Path | None = None) -> Checkpoint:
    """Opens the files of a folder as one checkpoint.

    Args:
        index: the ``.safetensors.index.json`` to go by, where there may be several. A tensor that it does not name is
            opened all the same where a file that it names has it.

    Raises:
        CheckpointUnsound: a file is missing or unsound, a tensor is missing, in two files, or not tiled by its shards.
        UsageError: several indexes, and none of them is that of ``model.safetensors``.
        StorageError: the file system failed to read them.
    """
    with storage_errors("list the files", folder):
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith((SUFFIX, INDEX_SUFFIX)))
    index = index or _index_of(folder, names)
    weight_map: dict[str, str] = {}
    if index is not None:
        weight_map = _weight_map(index)
        files = sorted(set(weight_map.values()))
        for key, file in weight_map.items():
            if not (folder / file).exists():
                raise CheckpointUnsound(f"missing, and {index.name} names it", path=folder / file, key=key)
    elif _WHOLE in names:
        files = [_WHOLE]
    else:
        files = [name for name in names if name.endswith(SUFFIX)]
        _require_all_numbers(folder, files)
    if not files:
        raise CheckpointUnsound("names no safetensors files", path=index or folder)
    return _open(folder, folder, files, weight_map, index)


def _index_of(folder: Path, names: Sequence[str]) -> Path | None:
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    if len(indexes) > 1 and _WHOLE + ".index.json" not in indexes:
        raise UsageError("several indexes of safetensors files", path=folder, found=", ".join(indexes), hint="name one")
    preferred = sorted(indexes, key=lambda name: name != _WHOLE + ".index.json")
    return folder / preferred[0] if preferred else None


def _weight_map(path: Path) -> dict[str, str]:
    try:
        with storage_errors("read", path):
            content = path.read_bytes()
        if (reason := missing_data(content[:_LFS_HEAD_BYTES])) is not None:
            raise CheckpointUnsound(reason, path=path)
        fields = json.loads(content, object_pairs_hook=unique_fields)
        weight_map = fields["weight_map"]
        for name, file in weight_map.items():
            # The next thing done with it is to open it, so it must not lead anywhere else.
            is_name = type(file) is str and Path(file).name == file and file.isprintable() and file not in ("", "..")
            if not is_name or len(file.encode()) > 255:
                raise CheckpointUnsound(
                    "not the name of a file beside the index", path=path, key=name, found=repr(file)
                )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointUnsound(
            "not an index of safetensors files",
            path=path,
            expected='JSON with a "weight_map" of tensors to files',
            found=f"{type(error).__name__}: {error}"[:200],
        ) from error
    return dict(weight_map)


def _require_all_numbers(folder: Path, files: Sequence[str]) -> None:
    """Of ``model-00001-of-00003`` and so on, all must be there."""
    series: dict[tuple[str, int], set[int]] = {}
    for name in files:
        if (match := _NUMBERED_NAME.fullmatch(name)) is not None:
            series.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in series.items():
        # Counted, not listed: a name may claim that there are 99999.
        if len(numbers) < count:
            missing = next(number for number in range(1, count + 1) if number not in numbers)
            raise CheckpointUnsound(
                f"{count - len(numbers)} of its files are missing, first {stem}-{missing:05}-of-{count:05}{SUFFIX}",
                path=folder,
                expected=f"{count} files",
                found=len(numbers),
            )


def _open(
    path: Path, folder: Path, names: list[str], weight_map: dict[str, str], index_file: Path | None = None
) -> Checkpoint:
    files = SourceFiles([folder / name for name in names])
    try:
        pieces: dict[str, list[_Piece]] = {}
        sharded: set[str] = set()
        for number, name in enumerate(names):
            header = _header(files, number)
            offsets = _saved_offsets(header, files.paths[number])
            sharded.update(offsets)
            for tensor, (dtype, sizes, start, end) in header.tensors.items():
                begins = offsets.get(tensor, (0,) * len(sizes))
                pieces.setdefault(tensor, []).append(_Piece(name, dtype, begins, sizes, start, end - start))
        _require_mapped(weight_map, pieces, index_file)
        index = _index(folder, names, pieces, sharded)
    except BaseException:
        files.close()
        raise
    payloads = Payloads.unknown(len(index.file))
    payloads.start_bytes[:] = index.start_bytes
    return Checkpoint(
        path=path,
        format=NAME,
        index=index,
        manifest=None,
        paths={},
        files=files,
        payloads=payloads,
        locate=all_known,
        metadata_files=() if index_file is None else (index_file.name,),
    )


def _header(files: SourceFiles, number: int) -> Header:
    path = files.paths[number]
    length_bytes = files.size_bytes(number)
    try:
        header = read_header(lambda start, length: files.read(number, start, length), length_bytes)
    except CheckpointUnsound as error:
        error.path = error.path or str(path)
        raise
    if header is None:
        head = bytes(files.read(number, 0, min(length_bytes, _LFS_HEAD_BYTES)))
        raise CheckpointUnsound(
            missing_data(head) or "not a safetensors file",
            path=path,
            expected="the length of a JSON header, and the header",
            found=f"{length_bytes} bytes that begin with {head[:HEAD_BYTES]!r}",
        )
    return header


def _saved_offsets(header: Header, path: Path) -> dict[str, tuple[int, ...]]:
    """Where the pieces of a shard lie in their tensors; empty for a file of whole tensors."""
    if _SHARDING not in header.metadata:
        return {}
    offsets = {}
    key = None
    try:
        fields = json.loads(header.metadata[_SHARDING], object_pairs_hook=unique_fields)
        for key, (_, sizes, _, _) in header.tensors.items():
            begins = tuple(fields[key]["saved_offsets"])
            if len(begins) != len(sizes) or not all(type(n) is int and 0 <= n < 1 << 62 for n in begins):
                raise ValueError(f"offsets {begins} of a piece of {sizes}")
            offsets[key] = begins
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"{type(error).__name__}: {error}"[:200]
        raise CheckpointUnsound(f"no sound {_SHARDING}", path=path, key=key, found=found) from error
    return offsets


def _require_mapped(weight_map: dict[str, str], pieces: dict[str, list[_Piece]], index_file: Path | None) -> None:
    lost = [
        f"{name}: not in {file}"
        for name, file in weight_map.items()
        if not any(piece.file == file for piece in pieces.get(name, ()))
    ]
    if lost:
        name = lost[0].partition(": not in ")[0]
        raise CheckpointUnsound(
            f"names {len(lost)} tensors that their files do not have",
            path=index_file,
            key=name,
            expected=f"in {weight_map[name]}",
            found=", ".join(piece.file for piece in pieces.get(name, ())) or "in no file",
            details=lost[1:],
        )


def _index(folder: Path, names: Sequence[str], pieces: dict[str, list[_Piece]], sharded: set[str]) -> Index:
    builder = IndexBuilder(folder, RAW)
    numbers = {name: builder.file(name) for name in names}
    for key, parts in pieces.items():
        first, *others = parts
        if others:
            _require_alike(folder, key, parts, key in sharded)
        ends = zip(*(map(sum, zip(part.offsets, part.sizes, strict=True)) for part in parts), strict=True)
        builder.tensor(key, first.dtype, tuple(map(max, ends)))
        for part in parts:
            builder.chunk(part.offsets, part.sizes, (numbers[part.file], part.start_bytes, part.length_bytes))
    index = builder.build()
    if sharded and (faults := list(index.tiling_faults())):
        key, fault = faults[0]
        raise CheckpointUnsound(
            f"the shards do not hold every element once ({fault})",
            path=folder if len(names) > 1 else folder / names[0],
            key=key,
            hint="put the shards of all ranks of one save into the folder, and no others, and name the folder",
            details=[f"{name}: {what}" for name, what in faults[1:]],
        )
    return index


def _require_alike(folder: Path, key: str, parts: Sequence[_Piece], is_sharded: bool) -> None:
    first = parts[0]
    for other in parts[1:]:
        if not is_sharded:
            found = f"{first.file} and {other.file}"
            raise CheckpointUnsound("in two files", path=folder / other.file, key=key, expected="one", found=found)
        if (other.dtype, len(other.sizes)) != (first.dtype, len(first.sizes)):
            raise CheckpointUnsound(
                "shards of one tensor differ in dtype or dims",
                path=folder / other.file,
                key=key,
                expected=f"{first.dtype} of {len(first.sizes)} dims as in {first.file}",
                found=f"{other.dtype} of {len(other.sizes)} dims",
            )
