"""Where the command line's words go: data to stdout, talk to stderr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping

from reshard.errors import UsageError


def print_json(fields: Mapping[str, object]) -> None:
    """One JSON object to stdout; numbers that are not finite, which JSON does not have, as strings: ``"inf"``."""
    _write(json.dumps(_finite(fields), indent=2, allow_nan=False))


def print_text(text: str) -> None:
    """A result for people, to stdout.

    Raises:
        UsageError: it cannot be written there.
    """
    _write(text)


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def _write(text: str) -> None:
    try:
        print(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError("cannot write the output", found=error.strerror) from error


def print_message(text: str) -> None:
    """How it goes on, to stderr."""
    print(text, file=sys.stderr, flush=True)


def print_error(text: object) -> None:
    """Why the verb failed, to stderr."""
    print(f"reshard: error: {text}", file=sys.stderr)


def print_warning(text: object) -> None:
    """What deserves attention although the verb succeeded, to stderr."""
    print(f"reshard: warning: {text}", file=sys.stderr)
