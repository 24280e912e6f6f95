"""Random streams inside data workers: by sample, whatever worker fetches it and however many there are."""

from __future__ import annotations

from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import Dataset

from reshard.train.rng import cpu_stream, derive_seed

T_co = TypeVar("T_co", covariant=True)


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
