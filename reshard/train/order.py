"""The order of an epoch: a permutation that is computed, not stored.

A Feistel network over the next power of four permutes 0..4^k-1; walking along its cycle until the value falls below
``length`` makes it a permutation of 0..length-1 (Black and Rogaway, 2002). So any position of any epoch costs a few
operations and no memory, however many samples there are, and the order depends on nothing but the numbers below: not on
a library's generator, a world size, or how far the epoch has got.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from reshard.train.rng import derive_seed

ROUNDS = 8


class EpochOrder:
    """Position in the epoch -> sample index, for one (length, seed, epoch).

    Saved positions rely on it: for the same numbers the order must never change.

    Args:
        length: samples in the data set.
        seed, epoch: what the permutation follows.
        shuffle: False for the data set's own order.
    """

    def __init__(self, length: int, seed: int, epoch: int, *, shuffle: bool = True) -> None:
        self.length = length
        self.shuffle = shuffle
        self._half_bits = max(1, ((length - 1).bit_length() + 1) // 2)
        self._keys = [np.uint64(derive_seed("order", seed, epoch, i)) for i in range(ROUNDS)]

    def __getitem__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sample indices (int64) at an array of positions, each in [0, length).

        Raises:
            IndexError: a position outside the epoch.
        """
        # Beyond the end the network still gives numbers, but ones that other positions have already.
        if positions.size and not (positions.min() >= 0 and positions.max() < self.length):
            raise IndexError(f"positions {positions.min()}..{positions.max()} of an epoch of {self.length} samples")
        if not self.shuffle:
            return np.asarray(positions, dtype=np.int64)
        values = self._permute(np.asarray(positions, dtype=np.uint64))
        while (outside := values >= np.uint64(self.length)).any():
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64)

    def _permute(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        shift = np.uint64(self._half_bits)
        mask = np.uint64((1 << self._half_bits) - 1)
        left, right = values >> shift, values & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        permuted: NDArray[np.uint64] = (left << shift) | right
        return permuted


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The finaliser of splitmix64 (Steele, Lea and Flood, 2014): every input bit reaches every output bit.
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
