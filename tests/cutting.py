"""Tensors cut up at random, for tests of tilings."""

from __future__ import annotations

from hypothesis import strategies as st

from reshard.geometry.box import Box


def cut_up(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that tile a shape exactly, by up to six cuts; some may be empty."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, box.sizes[dim]))
        for start, length in ((0, cut), (cut, box.sizes[dim] - cut)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim] += start
            sizes[dim] = length
            boxes.append(Box(tuple(offsets), tuple(sizes)))
    return boxes
