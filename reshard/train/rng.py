"""The random states of a process: saved per rank, restored, or derived anew where the world size changed.

Every state is a uint8 tensor: torch's own bytes for torch and CUDA, UTF-8 JSON of ``getstate()`` for Python and NumPy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from reshard.dcp.ranks import all_ranks
from reshard.errors import CheckpointUnsound


def capture_rng() -> dict[str, torch.Tensor]:
    """This process's generators: ``python``, ``numpy``, ``torch``, and ``cuda_<i>`` for every visible device.

    ``cuda_0`` is the current device, whatever its number: a rank may come back on a node where it has another one.
    """
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    states = {
        "python": _json_bytes([version, list(internal), gauss]),
        "numpy": _json_bytes([name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states.update({f"cuda_{i}": torch.cuda.get_rng_state(device) for i, device in enumerate(_cuda_devices())})
    return states


def restore_rng(states: Mapping[str, torch.Tensor]) -> None:
    """The inverse of :func:`capture_rng`. CUDA devices that are only there or only here are left out; it is said.

    Raises:
        CheckpointUnsound: a state is not what its generator takes.
    """
    devices = _cuda_devices()
    saved_devices = sum(name.startswith("cuda_") for name in states)
    if bool(saved_devices) != bool(devices):
        all_ranks().warn(
            f"random states of {saved_devices} CUDA devices in the checkpoint, {len(devices)} devices here: "
            "the CUDA streams do not go on as they were"
        )
    for name, state in states.items():
        try:
            _restore_one(name, state, devices)
        except (ValueError, TypeError, RuntimeError, IndexError, OverflowError) as fault:
            raise CheckpointUnsound(f"not a random state: {fault}", key=f"rng.{name}") from fault


def _restore_one(name: str, state: torch.Tensor, devices: list[int]) -> None:
    if name == "python":
        version, internal, gauss = json.loads(bytes(state.tolist()))
        random.setstate((version, tuple(internal), gauss))
    elif name == "numpy":
        kind, keys, position, has_gauss, cached = json.loads(bytes(state.tolist()))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    elif name == "torch":
        torch.set_rng_state(state)
    elif not name.startswith("cuda_"):
        raise ValueError("no such generator here")
    elif (place := int(name.removeprefix("cuda_"))) < len(devices):
        torch.cuda.set_rng_state(state, devices[place])


def _cuda_devices() -> list[int]:
    """The visible devices, the current one first."""
    if not torch.cuda.is_available():
        return []
    current = torch.cuda.current_device()
    return [current, *(device for device in range(torch.cuda.device_count()) if device != current)]


def reseed(saved: Mapping[str, torch.Tensor], step: int, rank: int, world: int) -> None:
    """The rule where the world size changed: new streams, all distinct, from what was saved.

    Each generator is seeded with SHA-256 over rank 0's saved torch state, the step and the new world size, plus the
    rank: torch's CPU generator takes 32 bits of a seed only, and hashes of many ranks could meet in those.
    """
    source = hashlib.sha256(bytes(saved["torch"].tolist())).hexdigest() if "torch" in saved else "none"
    seed_everything((derive_seed(source, step, world) + rank) % 2**63)


def seed_everything(seed: int) -> None:
    """Seeds Python, NumPy, torch and every CUDA device."""
    _seed_cpu(seed)
    torch.cuda.manual_seed_all(seed)


def _seed_cpu(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])
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


def derive_seed(*parts: object) -> int:
    """63 bits out of anything with a stable text form, the same on every machine and Python."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _json_bytes(value: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
