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
    entries: list[bytes] = []
    storage: list[bytes] = []
    for number in range(len(index.names)):
        _add_tensor(emit, index, number, entries, storage)
    for key, place in objects.items():
        entries.append(emit.text(key) + emit.instance("BytesStorageMetadata", {}))
        lookup = emit.instance("MetadataIndex", {"fqn": emit.text(key), "offset": b"N", "index": b"N"})
        storage += [lookup, emit.place(place.file, place.start_bytes, place.length_bytes)]
    planner = [emit.text(key) + emit.path(paths.get(key, (key,))) for key in (*index.names, *objects)]
    root = emit.instance(
        "Metadata",
        {
            "state_dict_metadata": emit.dictionary(entries),
            "planner_data": emit.dictionary(planner),
            "storage_data": emit.dictionary(storage),
            "storage_meta": b"N",
            "version": emit.text(VERSION),
        },
    )
    return b"".join([b"\x80\x02", emit.prologue, root, b"."])


def _add_tensor(emit: _Emitter, index: Index, number: int, entries: list[bytes], storage: list[bytes]) -> None:
    """The entry of a tensor, and those of its chunks' places."""
    first, last = int(index.first[number]), int(index.first[number + 1])
    dims = len(index.shapes[number])
    key = emit.text(index.names[number])
    chunk = emit.template("ChunkStorageMetadata", "offsets", "sizes")
    lookup = emit.template("MetadataIndex", "fqn", "offset", "index")
    columns = (index.offsets[:, :dims], index.sizes[:, :dims], index.file, index.start_bytes, index.length_bytes)
    rows = zip(*(column[first:last].tolist() for column in columns), strict=True)
    chunks = []
    for hint, (offset, size, file, start, length) in enumerate(rows):
        offsets = emit.shape(offset)
        chunks.append(chunk(offsets, emit.shape(size)))
        storage.append(lookup(key, offsets, emit.number(hint)))
        storage.append(emit.place(index.files[file], start, length))
    fields = {
        "properties": emit.properties(index.dtypes[number]),
        "size": emit.shape(index.shapes[number]),
        "chunks": b"](" + b"".join(chunks) + b"e",
    }
    entries.append(key + emit.instance("TensorStorageMetadata", fields))


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

        pattern = b"%b".join([part.replace(b"%", b"%%") for part in parts]) + b"%bub"
        return lambda *values: pattern % values

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
