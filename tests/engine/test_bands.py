from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.engine.bands import band_at


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.integers(0, 40))
def test_bands_follow_one_another_and_hold_every_element_once(shape: list[int], most: int) -> None:
    numbers = np.arange(math.prod(shape)).reshape(shape)
    element = 0
    while element < numbers.size:
        first, band = band_at(shape, element, most)
        assert first == element
        assert band.elements <= max(1, most)
        place = tuple(slice(low, end) for low, end in zip(band.offsets, band.ends, strict=True))
        assert numbers[place].ravel().tolist() == list(range(first, first + band.elements))
        for inside in (first + band.elements // 2, first + band.elements - 1):
            assert band_at(shape, inside, most) == (first, band)
        element += band.elements


def test_bands_are_as_large_as_they_may_be() -> None:
    assert band_at((100, 10), 0, 55)[1].sizes == (5, 10)
    assert band_at((100, 10), 0, 10_000)[1].sizes == (100, 10)
    assert band_at((3, 100), 0, 40)[1].sizes == (1, 40)
