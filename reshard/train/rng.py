"""Random states: of the process, saved per rank; and streams that belong to slots instead of ranks.

Every state is a uint8 tensor: torch's own bytes for torch and CUDA, UTF-8 JSON of ``getstate()`` for Python and NumPy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from reshard.errors import CheckpointUnsound


def capture_rng() -> dict[str, torch.Tensor]:
    """This process's generators: ``python``, ``numpy``, ``torch``, and ``cuda_<i>`` for every visible device."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python": _json_bytes([version, list(internal), gauss]),
        "numpy": _json_bytes([name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states.update({f"cuda_{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())})
    return states


def restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    """The inverse of :func:`capture_rng`. States of CUDA devices that are not here are left out.

    Raises:
        CheckpointUnsound: a state is not what its generator takes.
    """
    for name, state in states.items():
        try:
            _restore_one(name, state)
        except (ValueError, TypeError, RuntimeError, IndexError) as fault:
            raise CheckpointUnsound(f"not a random state: {fault}", key=f"rng.{name}") from fault


def _restore_one(name: str, state: torch.Tensor) -> None:
    if name == "python":
        version, internal, gauss = json.loads(bytes(state.tolist()))
        random.setstate((version, tuple(internal), gauss))
    elif name == "numpy":
        kind, keys, position, has_gauss, cached = json.loads(bytes(state.tolist()))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    elif name == "torch":
        torch.set_rng_state(state)
    elif torch.cuda.is_available() and int(name.removeprefix("cuda_")) < torch.cuda.device_count():
        torch.cuda.set_rng_state(state, int(name.removeprefix("cuda_")))


def reseed(saved: Mapping[str, torch.Tensor], step: int, rank: int, world: int) -> None:
    """The rule where the world size changed: new streams, all distinct, from what was saved.

    Each generator is seeded with SHA-256 over rank 0's saved torch state, the step, the new world size and the rank.
    """
    source = hashlib.sha256(bytes(saved["torch"].tolist())).hexdigest() if "torch" in saved else "none"
    seed_everything(derive_seed(source, step, world, rank))


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, torch and every CUDA device."""
    _seed_cpu(seed)
    torch.cuda.manual_seed_all(seed)


def _seed_cpu(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def cpu_stream(seed: int) -> Iterator[None]:
    """Runs a block on CPU generators seeded with ``seed``, and puts the former ones back."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        _seed_cpu(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


class SlotStreams:
    """A random stream for each slot of each step, whatever rank runs it: dropout that does not know the world size.

    Stateful: ``state_dict`` holds the seed and the number of steps done. ``accumulate`` calls it; by hand::

        with streams.slot(3):
            loss = ...            # forward; a recomputed activation restores the stream by itself
        ...
        streams.advance()         # once a step, after its last slot

    Only torch's generators (CPU and the current CUDA device) are switched; outside they continue undisturbed.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.step = 0

    @contextlib.contextmanager
    def slot(self, slot: int) -> Iterator[None]:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(derive_seed(self.seed, self.step, slot))
            yield

    def advance(self) -> None:
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seed, self.step = int(state["seed"]), int(state["step"])


def derive_seed(*parts: object) -> int:
    """63 bits out of anything with a stable text form, the same on every machine and Python."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _json_bytes(value: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
