"""Random streams that do not know the world size: by slot for the training step, by sample for the data.

Whatever rank runs a slot, and whatever worker fetches a sample, it finds the same stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch.utils.data import Dataset

from reshard.dcp.ranks import all_ranks
from reshard.train.rng import cpu_stream, derive_seed

T_co = TypeVar("T_co", covariant=True)


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
            seed = derive_seed(self.seed, self.step, slot)
            # torch.manual_seed would seed the other CUDA devices too, and nothing would put those back.
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            yield

    def advance(self) -> None:
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if int(state["seed"]) != self.seed:
            all_ranks().warn(
                f"seed {self.seed} of the slots' streams ignored; the checkpoint's {state['seed']} restored"
            )
        self.seed, self.step = int(state["seed"]), int(state["step"])


class SampleIndex(int):
    """A sample's index that carries its epoch, so that a worker process knows it even if it outlives the epoch."""

    epoch: int

    def __new__(cls, index: int, epoch: int) -> SampleIndex:
        self = super().__new__(cls, index)
        self.epoch = epoch
        return self

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.epoch


class _Indexable(Protocol[T_co]):
    def __getitem__(self, index: Any, /) -> T_co: ...
    def __len__(self) -> int: ...


class SeededDataset(Dataset[T_co], Generic[T_co]):
    """A map-style data set whose randomness follows (seed, epoch, sample).

    While an item is made, the generators of Python, NumPy and torch (CPU) run on a stream of the sample's own; the
    process's streams go on undisturbed. The epoch is known where an ``ElasticSampler``'s indices come in, else it is 0:
    give it to the loader itself, since a ``Subset`` or ``ConcatDataset`` around it makes indices of its own.
    """

    def __init__(self, dataset: _Indexable[T_co], seed: int = 0) -> None:
        self.dataset = dataset
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> T_co:
        epoch = index.epoch if isinstance(index, SampleIndex) else 0
        with cpu_stream(derive_seed("sample", self.seed, epoch, int(index))):
            return self.dataset[int(index)]
