"""Casts between floating types, element for element as torch does them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from reshard.index.dtypes import CASTABLE, cast, raw

_OF_TORCH = {name: getattr(torch, name) for name in CASTABLE}


def as_raw(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy().view(raw(dtype)) if tensor.dim() else raw_scalar(tensor, dtype)


def raw_scalar(tensor: torch.Tensor, dtype: str) -> np.ndarray:
    return as_raw(tensor.reshape(1), dtype).reshape(())


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(sorted(CASTABLE), 2)))
def test_every_pattern_of_bits_is_cast_as_torch_does(source: str, target: str) -> None:
    bits = torch.from_numpy(np.frombuffer(np.random.default_rng(0).bytes(1 << 18), np.uint8).copy())
    special = torch.tensor([0.0, -0.0, 1.00390625, 1.01171875, 3.4e38, 6e-8, 1e-45, float("inf"), -float("inf")])
    numbers = torch.cat([bits.view(_OF_TORCH[source]), special.to(_OF_TORCH[source])])
    expected = numbers.to(_OF_TORCH[target])
    found = torch.from_numpy(cast(as_raw(numbers, source), source, target).copy().view(np.uint8))
    found = found.view(_OF_TORCH[target])
    assert torch.equal(found.isnan(), expected.isnan())
    is_number = ~expected.isnan()
    assert torch.equal(found[is_number].view(torch.uint8), expected[is_number].view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 5)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_shape_and_order_are_kept(shape: tuple[int, ...], is_transposed: bool) -> None:
    numbers = torch.rand(shape)
    content = numbers.numpy().T if is_transposed else numbers.numpy()
    found = cast(content.view(raw("float32")), "float32", "bfloat16")
    expected = torch.from_numpy(np.array(content)).to(torch.bfloat16).view(torch.int16).numpy()
    assert found.shape == expected.shape
    assert np.array_equal(np.asarray(found).view(np.int16), expected)
