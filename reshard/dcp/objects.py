"""What is not a tensor, in a checkpoint: a ``torch.save`` archive for each, read back through an allow-list."""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any

import torch

from reshard.dcp.torch_private import OBJECT_CLASSES
from reshard.errors import CheckpointUnsound, UnsafePickle, UsageError

_ZIP_HEAD = b"PK\x03\x04"


def object_to_bytes(key: str, value: Any) -> bytes:
    """The archive of an object.

    Raises:
        UsageError: it could not be read back without running what a pickle says. A load would refuse it: now the state
            is still there to be changed.
    """
    content = io.BytesIO()
    try:
        torch.save(value, content)
        if type(value) not in (int, float, bool, str, type(None)):
            _read(content.getvalue())
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as fault:
        raise UsageError(
            "an object that could not be loaded again",
            key=key,
            found=f"{type(value).__module__}.{type(value).__qualname__}",
            hint="make it of plain Python numbers, strings, lists and dicts, or of tensors",
            details=_refused(fault),
        ) from fault
    return content.getvalue()


def object_from_bytes(key: str, content: bytes, path: Path) -> Any:
    """The object of an archive that lies in the file ``path``.

    Raises:
        CheckpointUnsound: it is damaged.
        UnsafePickle: it names something that is not on the allow-list; nothing was run.
    """
    if not content.startswith(_ZIP_HEAD):
        raise CheckpointUnsound("damaged: no torch.save archive where this object should be", path=path, key=key)
    try:
        return _read(content)
    except pickle.UnpicklingError as fault:
        raise UnsafePickle(
            "an object that is not plain data; it was not run",
            path=path,
            key=key,
            hint="save it as plain Python numbers and strings",
            details=_refused(fault),
        ) from fault
    except (RuntimeError, ValueError, EOFError, KeyError) as fault:
        raise CheckpointUnsound(
            "damaged: an object in it cannot be read",
            path=path,
            key=key,
            found=str(fault).partition("\n")[0],
            hint="copy the file again, or use another step",
        ) from fault


def _read(content: bytes) -> Any:
    with torch.serialization.safe_globals(list(OBJECT_CLASSES)):
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def _refused(fault: Exception) -> list[str]:
    # Torch's own message advises to load without the check.
    if named := re.search(r"GLOBAL ([\w.]+)", str(fault)):
        return [f"it names {named[1]}"]
    return [] if isinstance(fault, pickle.UnpicklingError) else [str(fault)]
