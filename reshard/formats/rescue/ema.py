"""A moving average of the weights, which trainers keep in a file of its own, or under a key beside the model.

Whatever its form (names and tensors, or these under a key, with ``decay`` and a count of updates beside), it becomes
``extra.ema`` of the manifest, tensor for tensor and number for number, as ``TrainState(extra={"ema": ...})`` saves it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reshard.errors import UsageError
from reshard.formats import tagged
from reshard.formats.plain_values import Budget, NotPlain, plain
from reshard.formats.rescue.assembly import Assembly
from reshard.formats.rescue.rank_state import EMA, RankState, is_tensor
from reshard.index.names import canonical_names

_WHERE = f"extra.{EMA}"
_MOST_ENTRIES = 1 << 20
_SHOWN = 4


@dataclass(frozen=True)
class _Key:
    """Stands for a tensor that is kept under a key."""

    key: str


def add_ema(assembly: Assembly, states: Sequence[RankState], parameters: Sequence[str]) -> dict[str, tagged.Json]:
    """Adds the tensors of all ranks; what the manifest says, by the name of the extra part.

    Args:
        parameters: of the model; those that have no average are among the notes.

    Raises:
        CheckpointUnsound: ranks disagree on a tensor.
    """
    held = [state.rest[EMA] for state in states if EMA in state.rest]
    if not held:
        return {}
    try:
        structures = [_with_keys(content, _WHERE, Budget(_MOST_ENTRIES)) for content, _ in held]
        encoded = tagged.encode(structures[0], where=_WHERE, external=_key)
    except (NotPlain, UsageError) as fault:
        assembly.notes.append(f"left out, for it holds more than tensors and plain values: {EMA} ({fault})")
        return {}
    for content, source in held:
        for key, tensor in _tensors(content, _WHERE):
            assembly.add_tensor(key, tensor, source)
    _report_missing(assembly, tagged.stored_keys(encoded), parameters)
    return {EMA: encoded}


def _with_keys(value: Any, key: str, budget: Budget, level: int = 0) -> Any:
    """The structure, with the keys of the tensors in their places."""
    if is_tensor(value):
        return _Key(key)
    if not isinstance(value, dict):
        return plain(value, budget, level)
    budget.spend(level)
    return {
        plain(name, budget, level + 1): _with_keys(entry, f"{key}.{name}", budget, level + 1)
        for name, entry in value.items()
    }


def _key(value: Any, _path: str) -> str | None:
    return value.key if isinstance(value, _Key) else None


def _tensors(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if is_tensor(value):
        yield key, value
    elif isinstance(value, dict):
        for name, entry in value.items():
            yield from _tensors(entry, f"{key}.{name}")


def _report_missing(assembly: Assembly, keys: Sequence[str], parameters: Sequence[str]) -> None:
    # Below whatever keys they lie, a name begins behind one of the dots.
    tails = {key[match.end() :] for key in keys for match in re.finditer(r"\.", key)}
    averaged = tails.union(*(canonical_names([tail]).values() for tail in tails))
    missing = [name for name in parameters if name not in averaged]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        assembly.notes.append(f"without a moving average: {', '.join(missing[:_SHOWN])}{more}")
