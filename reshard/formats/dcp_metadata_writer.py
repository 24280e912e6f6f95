"""Writes the ``.metadata`` of a DCP checkpoint, without torch: the pickle that stock torch makes of the same objects.

The objects and their pickled form are described in `reshard.formats.dcp_metadata`. Classes cannot be pickled without
being imported, so the instructions are put together here; what recurs (classes, attribute names, dtypes) is memoised at
the start and only referred to. A chunk then takes some 60 bytes and no object of Python.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence

from reshard.index.index import Index, Place

_DCP = "torch.distributed.checkpoint"
_GLOBALS = {
    "Metadata": (f"{_DCP}.metadata", "Metadata"),
    "TensorStorageMetadata": (f"{_DCP}.metadata", "TensorStorageMetadata"),
    "BytesStorageMetadata": (f"{_DCP}.metadata", "BytesStorageMetadata"),
    "ChunkStorageMetadata": (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    "MetadataIndex": (f"{_DCP}.metadata", "MetadataIndex"),
    "TensorProperties": (f"{_DCP}.metadata", "TensorProperties"),
    "MemoryFormat": (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    "StorageInfo": (f"{_DCP}.filesystem", "_StorageInfo"),
    "Size": ("torch", "Size"),
    "layout": ("torch.serialization", "_get_layout"),
}
_TEXTS = [
    "properties", "size", "chunks", "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length",
    "torch.strided", "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version",
]  # fmt: skip
VERSION = "1.0.0"


def metadata_bytes(index: Index, objects: Mapping[str, Place], paths: Mapping[str, Sequence[str | int]]) -> bytes:
    """The content of ``.metadata``.

    Args:
        index: the tensors, with the archives of their chunks.
        objects: the archives of all else, by key.
        paths: key -> path in the nested state; a key without one is its own path.
    """
    emit = _Emitter(sorted(set(index.dtypes)), index.files)
    tensors = [_tensor(emit, index, number) for number in range(len(index.names))]
    entries = [emit.text(name) + entry for name, entry in zip(index.names, tensors, strict=True)]
    entries += [emit.text(key) + emit.instance("BytesStorageMetadata", {}) for key in objects]
    planner = [emit.text(key) + emit.path(paths.get(key, (key,))) for key in (*index.names, *objects)]
    root = emit.instance(
        "Metadata",
        {
            "state_dict_metadata": emit.dictionary(entries),
            "planner_data": emit.dictionary(planner),
            "storage_data": emit.dictionary(_storage(emit, index, objects)),
            "storage_meta": b"N",
            "version": emit.text(VERSION),
        },
    )
    return b"".join([b"\x80\x02", emit.prologue, root, b"."])


def _tensor(emit: _Emitter, index: Index, number: int) -> bytes:
    first, last = int(index.first[number]), int(index.first[number + 1])
    dims = len(index.shapes[number])
    offsets, sizes = index.offsets[first:last, :dims].tolist(), index.sizes[first:last, :dims].tolist()
    chunk = emit.template("ChunkStorageMetadata", "offsets", "sizes")
    chunks = [chunk(emit.shape(offset), emit.shape(size)) for offset, size in zip(offsets, sizes, strict=True)]
    return emit.instance(
        "TensorStorageMetadata",
        {
            "properties": emit.properties(index.dtypes[number]),
            "size": emit.shape(index.shapes[number]),
            "chunks": b"](" + b"".join(chunks) + b"e",
        },
    )


def _storage(emit: _Emitter, index: Index, objects: Mapping[str, Place]) -> Iterable[bytes]:
    files, starts, lengths = index.file.tolist(), index.start_bytes.tolist(), index.length_bytes.tolist()
    entry = emit.template("MetadataIndex", "fqn", "offset", "index")
    for number, name in enumerate(index.names):
        first, last = int(index.first[number]), int(index.first[number + 1])
        key = emit.text(name)
        offsets = index.offsets[first:last, : len(index.shapes[number])].tolist()
        for hint, (row, offset) in enumerate(zip(range(first, last), offsets, strict=True)):
            yield entry(key, emit.shape(offset), emit.number(hint))
            yield emit.place(index.files[files[row]], starts[row], lengths[row])
    for name, place in objects.items():
        yield entry(emit.text(name), b"N", b"N")
        yield emit.place(place.file, place.start_bytes, place.length_bytes)


class _Emitter:
    """Instructions for the values that occur; each method gives those that push one value.

    Attributes:
        prologue: memoises what recurs; to come before everything else.
    """

    def __init__(self, dtypes: Sequence[str], files: Sequence[str]) -> None:
        self._memo: dict[str, bytes] = {}
        prologue = []
        named = [*_GLOBALS.items(), *((f"dtype {name}", ("torch", name)) for name in dtypes)]
        for name, (module, attribute) in named:
            prologue.append(self._memoise(name, b"c" + f"{module}\n{attribute}\n".encode()))
        texts = [*((f"text {text}", text) for text in _TEXTS), *((f"file {name}", name) for name in files)]
        for name, text in texts:
            prologue.append(self._memoise(name, self.text(text)))
        for dtype in dtypes:
            prologue.append(self._memoise(f"properties {dtype}", self._properties(dtype)))
        self.prologue = b"".join(prologue)
        self._place = self.template("StorageInfo", "relative_path", "offset", "length")

    def _memoise(self, name: str, value: bytes) -> bytes:
        number = struct.pack("<I", len(self._memo))
        self._memo[name] = b"j" + number
        return value + b"r" + number + b"0"

    def instance(self, name: str, attributes: Mapping[str, bytes]) -> bytes:
        """An object of a class, made without calling its constructor."""
        if not attributes:
            return self._memo[name] + b")\x81}b"
        return self.template(name, *attributes)(*attributes.values())

    def template(self, name: str, *attributes: str) -> Callable[..., bytes]:
        """As `instance`, for many objects of one class: a function from the attributes' values."""
        parts = [self._memo[f"text {attribute}"] for attribute in attributes]
        parts[0] = self._memo[name] + b")\x81}(" + parts[0]

        def fill(*values: bytes) -> bytes:
            return b"".join([piece for pair in zip(parts, values, strict=True) for piece in pair]) + b"ub"

        return fill

    def dictionary(self, items: Iterable[bytes]) -> bytes:
        """A dict of keys and values in turn, or of pairs of them."""
        return b"}(" + b"".join(items) + b"u"

    def shape(self, sizes: Sequence[int]) -> bytes:
        """A ``torch.Size``."""
        return self._memo["Size"] + b"(" + b"".join(map(self.number, sizes)) + b"t\x85R"

    def path(self, steps: Sequence[str | int]) -> bytes:
        """A tuple of strings and numbers."""
        return b"(" + b"".join(self.number(s) if isinstance(s, int) else self.text(s) for s in steps) + b"t"

    def place(self, file: str, start_bytes: int, length_bytes: int) -> bytes:
        """A ``_StorageInfo``."""
        name = self._memo.get(f"file {file}") or self.text(file)
        return self._place(name, self.number(start_bytes), self.number(length_bytes))

    def properties(self, dtype: str) -> bytes:
        """The ``TensorProperties`` of a plain tensor; one object for all tensors of a dtype."""
        return self._memo[f"properties {dtype}"]

    def _properties(self, dtype: str) -> bytes:
        layout = self._memo["layout"] + self._memo["text torch.strided"] + b"\x85R"
        contiguous = self._memo["MemoryFormat"] + self.number(0) + b"\x85R"
        state = b"(" + self._memo[f"dtype {dtype}"] + layout + b"\x89" + contiguous + b"\x89t"
        return self._memo["TensorProperties"] + b")\x81" + state + b"b"

    def text(self, text: str) -> bytes:
        """A string."""
        encoded = text.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(encoded)) + encoded

    def number(self, value: int) -> bytes:
        """An int."""
        if 0 <= value < 1 << 8:
            return b"K" + value.to_bytes(1, "little")
        if 0 <= value < 1 << 31:
            return b"J" + value.to_bytes(4, "little")
        return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)
