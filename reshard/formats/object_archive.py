"""A plain value as ``torch.save`` stores it, as DCP keeps what is not a tensor; written and read without torch."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from reshard.errors import CheckpointUnsound
from reshard.formats import unpickle
from reshard.formats.plain_values import VALUE_CLASSES, Budget, NotPlain, plain
from reshard.formats.torch_archive import TENSOR_CLASSES, persistent_storage, read_directory
from reshard.formats.zip_parts import FOLDER

_ALLOWED = {**TENSOR_CLASSES, **VALUE_CLASSES}
_MOST_REPEATED_ENTRIES = 1 << 17


def object_archive(value: Any) -> bytes:
    """What ``torch.save`` writes of a plain value."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as archive:
        records = {"data.pkl": pickle.dumps(value, protocol=2), "byteorder": b"little", "version": b"3\n"}
        for name, record in records.items():
            # A time of its own would make other bytes of the same value.
            archive.writestr(zipfile.ZipInfo(f"{FOLDER}/{name}"), record)
    return content.getvalue()


def object_value(content: bytes, path: Path, key: str) -> Any:
    """The value in an archive; None where it holds tensors or something that is not plain.

    Raises:
        CheckpointUnsound: it is damaged.
        UnsafePickle: it names something that plain values do not need.
    """

    def read(start: int, length: int) -> bytes:
        return content[start : start + length]

    try:
        record = read_directory(read, len(content))["data.pkl"]
        data = io.BytesIO(read(record.start_bytes, record.length_bytes))
        value = unpickle.read(data, _ALLOWED, path=path, persistent=persistent_storage)
        return plain(value, Budget(record.length_bytes + _MOST_REPEATED_ENTRIES))
    except NotPlain:
        return None
    except KeyError:
        raise CheckpointUnsound("not an object of torch.save: no data.pkl", path=path, key=key) from None
