"""The ``.metadata`` file of torch.distributed.checkpoint (DCP), read without torch.

The file is one pickle (protocol 4, no persistent ids) of a ``torch.distributed.checkpoint.metadata.Metadata``, written
last and by one rank; until it is there the checkpoint is not finished. Every object below is pickled as NEWOBJ and a
BUILD with its attributes as a dict, unless it says otherwise::

    Metadata
        state_dict_metadata   dict: flat key -> TensorStorageMetadata | BytesStorageMetadata
        planner_data          dict: flat key -> path in the nested state, a tuple of str (dict) and int (list) steps;
                              None, or a planner's own data, where the state was not flattened by the stock planner
        storage_data          dict: MetadataIndex -> _StorageInfo
        storage_meta          StorageMeta(checkpoint_id: str or Path, save_id, load_id, modules); since 2.3
        version               "1.0.0"; since 2.7
        all_local_plans       Megatron only: the SavePlans of all ranks
    TensorStorageMetadata     properties, size: Size, chunks: [ChunkStorageMetadata(offsets: Size, sizes: Size)]
    BytesStorageMetadata      no attributes: any other object, stored by torch.save
    TensorProperties          BUILD with a tuple (dtype, layout, requires_grad, memory format, pinned); up to 2.2 the
                              class is that of torch.distributed._shard.sharded_tensor.metadata
    MetadataIndex             fqn, offset: Size (None for bytes), index: a hint that is not part of its identity
    _StorageInfo              relative_path, offset, length; transform_descriptors where the bytes went through a stream
                              transform such as compression. Of torch.distributed.checkpoint.filesystem

    torch.Size                REDUCE torch.Size((n, ...))
    dtype                     GLOBAL torch <name>, e.g. torch float32
    layout                    REDUCE torch.serialization._get_layout("torch.strided")
    memory format             REDUCE of an enum member by its number; up to Python 3.11.3, of builtins.getattr with the
                              enum and the member's name

``storage_data`` says where each chunk lies: the bytes [offset, offset + length) of the file ``relative_path`` are one
complete ``torch.save`` archive with the chunk, or with the object. A chunk is looked up by (flat key, offsets). Several
ranks that own no rows of a tensor each leave a chunk of no elements, at an offset that equals the dim. Sizes, offsets
and keys are written here and nowhere else: without this file the ``.distcp`` files are nameless pieces.
"""

from __future__ import annotations

import gc
import os
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from reshard.errors import CheckpointUnsound, StorageError
from reshard.formats import unpickle
from reshard.formats.rescue.sharded_classes import unknown
from reshard.formats.unpickle import StandIn
from reshard.index.dtypes import ITEM_BYTES, REFUSED
from reshard.index.index import ARCHIVE, Index, IndexBuilder, Place

FILE_NAME = ".metadata"


@dataclass(frozen=True)
class DcpMetadata:
    """What a DCP checkpoint holds and where each byte of it lies.

    Attributes:
        index: tensors and objects by flat key; a chunk of no elements for which nothing was stored is left out.
        paths: flat key -> path in the nested state; empty where the stock planner did not record it.
        transforms: stream transforms that the bytes went through; where there are any, a byte range is not an archive.
        version: of the metadata, as torch records it since 2.7.
        others: attributes of another tool's metadata that torch's has not.
    """

    index: Index
    paths: dict[str, tuple[str | int, ...]]
    transforms: frozenset[str] = frozenset()
    version: str | None = None
    others: Mapping[str, Any] = field(default_factory=dict)


def read(folder: str | os.PathLike[str]) -> DcpMetadata:
    """Reads the ``.metadata`` of a checkpoint folder.

    Raises:
        CheckpointUnsound: it is missing, damaged, contradicts itself or points outside the folder.
        UnsafePickle: it names classes that are not part of DCP.
        StorageError: the file system failed to read it.
    """
    return read_file(Path(folder) / FILE_NAME)


def read_file(path: str | os.PathLike[str], of: str | None = None) -> DcpMetadata:
    """As ``read``, for a metadata file of any name, such as the ``__<rank>.metadata`` of a save without collectives.

    Args:
        of: the module of another tool that has a Metadata and a _StorageInfo of its own. There may be objects of more
            classes, for which something inert stands.
    """
    with _without_garbage_collection():
        return _read_file(Path(path), of)


def _read_file(path: Path, of: str | None) -> DcpMetadata:
    allowed = _ALLOWED if of is None else {**_ALLOWED, (of, "Metadata"): _Metadata, (of, "_StorageInfo"): _StorageInfo}
    try:
        with path.open("rb") as file:
            root = unpickle.read(file, allowed, path=path, unknown=None if of is None else unknown)
    except (FileNotFoundError, NotADirectoryError):
        hint = "the save was not finished, or the files of rank 0 are on another machine's disk"
        if any(path.parent.glob("__*.metadata")):
            hint = (
                "the save ran with use_collectives=False, which leaves a __<rank>.metadata per rank: "
                "rewrite it with reshard offline, which merges them"
            )
        raise CheckpointUnsound("missing", path=path, hint=hint) from None
    except OSError as error:
        raise StorageError("cannot be read", path=path, found=error) from error
    try:
        return _contents(root, path, keeps_others=of is not None)
    except (_Contradiction, AttributeError) as error:
        # A stand-in has just the attributes that the file gave it.
        raise CheckpointUnsound(f"not the metadata of a checkpoint ({error})", path=path) from error


class _Metadata(StandIn):
    state_dict_metadata: object
    storage_data: object


class _TensorStorage(StandIn):
    properties: object
    size: object
    chunks: object


class _BytesStorage(StandIn):
    pass


class _Chunk(StandIn):
    offsets: object
    sizes: object


class _Index(StandIn):
    fqn: object


class _StorageInfo(StandIn):
    relative_path: object
    offset: object
    length: object


class _Properties(StandIn):
    dtype: object

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.dtype = state[0]


class _Ignored(StandIn):
    pass


def _layout(name: object) -> object:
    return name


def _member(enum: object, name: object) -> object:
    """What ``getattr`` is allowed to do."""
    if enum is not _Ignored or not isinstance(name, str):
        raise TypeError("an attribute of something else than an enum")
    return _Ignored()


_DTYPES = frozenset(ITEM_BYTES) | REFUSED
_ATTRIBUTES = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")

_DCP = "torch.distributed.checkpoint"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_PLANS = ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")

_ALLOWED: dict[tuple[str, str], Any] = {
    (f"{_DCP}.metadata", "Metadata"): _Metadata,
    (f"{_DCP}.metadata", "TensorStorageMetadata"): _TensorStorage,
    (f"{_DCP}.metadata", "BytesStorageMetadata"): _BytesStorage,
    (f"{_DCP}.metadata", "ChunkStorageMetadata"): _Chunk,
    (f"{_DCP}.metadata", "MetadataIndex"): _Index,
    (f"{_DCP}.metadata", "TensorProperties"): _Properties,
    (f"{_DCP}.metadata", "StorageMeta"): _Ignored,
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"): _Ignored,
    (f"{_DCP}.filesystem", "_StorageInfo"): _StorageInfo,
    (f"{_DCP}.filesystem", "_StoragePrefix"): _Ignored,
    (_SHARDED_TENSOR, "TensorProperties"): _Properties,
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): _Ignored,
    **{(module, "getattr"): _member for module in ("builtins", "__builtin__")},
    ("torch", "Size"): tuple,
    ("torch.serialization", "_get_layout"): _layout,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): name for name in _DTYPES},
    **{(f"{_DCP}.planner", name): _Ignored for name in _PLANS},
    # Python 3.13 pickled paths by the name of a private module.
    **{(module, name): _Ignored for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


class _Contradiction(Exception):
    """The pickle is whole and does not hold what a DCP metadata file holds."""


@dataclass
class _Storage:
    """``storage_data``: (flat key, offsets) -> which entry it is, and file number, start and length of each entry."""

    entries: dict[tuple[str, tuple[int, ...] | None], int]
    places: array[int]
    transforms: set[str]

    def place(self, key: str, offsets: tuple[int, ...] | None) -> tuple[int, int, int] | None:
        entry = self.entries.get((key, offsets))
        if entry is None:
            return None
        file, start, length = self.places[3 * entry : 3 * entry + 3]
        return file, start, length


def _contents(root: object, path: Path, keeps_others: bool = False) -> DcpMetadata:
    metadata = _expect(root, _Metadata)
    builder = IndexBuilder(path.parent, ARCHIVE)
    storage = _storage(_expect(metadata.storage_data, dict), builder)
    lost: list[str] = []
    objects: list[str] = []
    for key, entry in _expect(metadata.state_dict_metadata, dict).items():
        _expect(key, str)
        if type(entry) is _TensorStorage:
            _add_tensor(key, entry, storage, builder, lost)
            continue
        _expect(entry, _BytesStorage)
        objects.append(key)
    files = list(builder.files)
    for key in objects:
        if (place := storage.place(key, None)) is None:
            lost.append(f"{key}: no bytes are recorded for this object")
        else:
            builder.objects[key] = Place(files[place[0]], place[1], place[2])
    if lost:
        raise CheckpointUnsound(
            "lists what was never stored",
            path=path,
            hint="part of the ranks did not take part in the save: use an earlier checkpoint",
            details=lost,
        )
    paths = _paths(getattr(metadata, "planner_data", None))
    version = getattr(metadata, "version", None)
    others = {name: value for name, value in vars(metadata).items() if keeps_others and name not in _ATTRIBUTES}
    return DcpMetadata(
        builder.build(),
        paths,
        frozenset(storage.transforms),
        version if isinstance(version, str) else None,
        others,
    )


def _storage(entries: dict[object, object], builder: IndexBuilder) -> _Storage:
    storage = _Storage({}, array("q"), set())
    numbers: dict[str, int] = {}
    for number, (index, info) in enumerate(entries.items()):
        key = _expect(_expect(index, _Index).fqn, str)
        offsets = getattr(index, "offset", None)
        info = _expect(info, _StorageInfo)
        file = _expect(info.relative_path, str)
        if file not in numbers:
            _check_inside(file)
            numbers[file] = builder.file(file)
        start, length = _counts((info.offset, info.length), key)
        storage.places.extend((numbers[file], start, length))
        storage.entries[key, None if offsets is None else _counts(offsets, key)] = number
        if (transforms := getattr(info, "transform_descriptors", None)) is not None:
            storage.transforms.update(_expect(name, str) for name in _expect(transforms, list))
    return storage


def _add_tensor(key: str, entry: _TensorStorage, storage: _Storage, builder: IndexBuilder, lost: list[str]) -> None:
    dtype = _expect(entry.properties, _Properties).dtype
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise _Contradiction(f"{key}: no dtype")
    shape = _counts(entry.size, key)
    if len(shape) > _MOST_DIMS:
        raise _Contradiction(f"{key}: {len(shape)} dims")
    builder.tensor(key, dtype, shape)
    for chunk in _expect(entry.chunks, list):
        offsets, sizes = _counts(_expect(chunk, _Chunk).offsets, key), _counts(chunk.sizes, key)
        if not len(offsets) == len(sizes) == len(shape):
            raise _Contradiction(f"{key}: a chunk of {sizes} at {offsets} in a tensor of {shape}")
        place = storage.place(key, offsets)
        if place is not None:
            builder.chunk(offsets, sizes, place)
        elif 0 not in sizes:
            lost.append(f"{key}: no bytes are recorded for the chunk of {sizes} at {offsets}")


def _paths(planner_data: object) -> dict[str, tuple[str | int, ...]]:
    """The paths of the stock planner. Any other planner may keep there what it likes, which is not ours to judge."""
    if not isinstance(planner_data, dict):
        return {}
    for key, steps in planner_data.items():
        if type(key) is not str or type(steps) is not tuple or not {type(step) for step in steps} <= {str, int}:
            return {}
    return planner_data


def _check_inside(file: str) -> None:
    """Refuses a name that leaves the folder: the next thing done with it is to open it."""
    parts = file.split("/")
    encodable = file.encode(errors="ignore").decode() == file
    is_long = any(len(part.encode(errors="ignore")) > _LONGEST_NAME_BYTES for part in parts)
    if not encodable or is_long or "\0" in file or ".." in parts or parts[-1] in ("", ".") or parts[0] == "":
        raise _Contradiction(f"names the file {file!r}, which is not inside the checkpoint")


def _counts(value: object, key: str) -> tuple[int, ...]:
    if type(value) is tuple:
        for count in value:
            if type(count) is not int or not 0 <= count < _TOO_LARGE:
                break
        else:
            return value
    raise _Contradiction(f"{key}: an offset or a length that is not one")


# The end of a range, and a product of two sizes of a sound tensor, must fit 64 bits.
_TOO_LARGE = 1 << 62
_MOST_DIMS = 64
_LONGEST_NAME_BYTES = 255
_T = TypeVar("_T")


def _expect(value: object, kind: type[_T]) -> _T:
    if type(value) is not kind:
        raise _Contradiction(f"a {type(value).__name__} where a {kind.__name__} belongs")
    return value


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Millions of objects without a cycle among them: looking for cycles doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
