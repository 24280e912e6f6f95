"""The exact norm: right to 1e-12, and the same bits however the elements are split and ordered."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lab import Net, Points, raw, wrap_fsdp1, wrap_fsdp2
from ranks import RankFailed, run_ranks
from torch import nn

import reshard
from reshard import BatchPlan, ElasticSampler
from reshard.train.norm import exact_norm

FLOAT32 = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
FLOAT64 = st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=True)
MIXED = st.one_of(FLOAT32, st.sampled_from([0.0, -0.0, 1e-45, -1e-40, 1e-20, 1.0, 3e38, -1e30]))


def rational_norm(values: list[float]) -> float:
    """The norm in whole-number arithmetic, right to the last few bits."""
    total = sum((Fraction(value) ** 2 for value in values), Fraction(0))
    # Scaled so that the whole square root has 100 digits to spare at any magnitude.
    scale = 10**800
    return float(Fraction(math.isqrt(total.numerator * scale * scale // total.denominator), scale))


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


@settings(max_examples=200, deadline=None)
@given(st.lists(MIXED, max_size=40), st.randoms(use_true_random=False))
@example([3e38, *[1e-45] * 30], None)
@example([1e-45], None)
@example([], None)
def test_it_is_right_and_does_not_know_the_split(values: list[float], random: Any) -> None:
    values = np.float32(values).astype(float).tolist()
    whole = exact_norm([torch.tensor(values, dtype=torch.float32)])
    assert whole == pytest.approx(rational_norm(values), rel=1e-12, abs=0)
    if random is not None:
        random.shuffle(values)
        cuts = sorted(random.randrange(len(values) + 1) for _ in range(random.randrange(4)))
        pieces = [values[a:b] for a, b in zip([0, *cuts], [*cuts, len(values)], strict=True)]
        assert bits(exact_norm([torch.tensor(piece, dtype=torch.float32) for piece in pieces])) == bits(whole)


@settings(max_examples=100, deadline=None)
@given(st.lists(FLOAT64, min_size=1, max_size=20))
@example([5e-324])
@example([1.7e308, 1.7e308, 5e-324])
@example([2.0**-1022, -(2.0**-1060)])
def test_float64_too(values: list[float]) -> None:
    found = exact_norm([torch.tensor(values, dtype=torch.float64)])
    try:
        expected = rational_norm(values)
    except OverflowError:
        expected = math.inf
    assert found == pytest.approx(expected, rel=1e-12, abs=5e-324)


def test_one_large_element_and_millions_of_tiny_ones() -> None:
    """Their sum counts in the ninth digit, though each square alone is lost beside the large one."""
    tiny, count = 2.0**-26, 3_000_000
    values = torch.full((count + 1,), tiny)
    values[count // 2] = 1.0
    expected = math.sqrt(1 + count * tiny**2)
    assert expected - 1 > 3e-10
    whole = exact_norm([values])
    assert whole == pytest.approx(expected, rel=1e-12, abs=0)
    assert bits(exact_norm(list(values.flip(0).split(1_234_567)))) == bits(whole)


def test_millions_of_large_elements_do_not_overflow() -> None:
    value = float(np.float32(0.9999))
    assert exact_norm([torch.full((3_000_000,), value)]) == pytest.approx(value * math.sqrt(3_000_000), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_float_type(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = math.sqrt(math.fsum(value * value for value in values.double().tolist()))
    assert exact_norm([values]) == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ([], 0.0),
        ([torch.empty(0)], 0.0),
        ([torch.empty(0, 3), torch.tensor(3.0), torch.empty(0), torch.tensor([[4.0]])], 5.0),
        ([torch.zeros(5), torch.tensor([-0.0])], 0.0),
        ([torch.tensor([1.0, math.inf])], math.inf),
        ([torch.tensor([1.0]), torch.tensor([-math.inf])], math.inf),
        ([torch.tensor([1.0, math.nan])], math.nan),
        ([torch.tensor([math.inf]), torch.tensor([math.nan])], math.nan),
        ([torch.tensor([math.nan] * 3)], math.nan),
        ([torch.tensor([1.5e308, 1.5e308], dtype=torch.float64)], math.inf),
        ([torch.arange(6.0).reshape(2, 3).t()], math.sqrt(55)),
    ],
    ids=lambda value: None if isinstance(value, list) else str(value),
)
def test_corner_cases(tensors: list[torch.Tensor], expected: float) -> None:
    assert exact_norm(tensors) == pytest.approx(expected, rel=1e-15, nan_ok=True)


def norm_of_parts(values: list[float], cuts: list[int]) -> bytes:
    bounds = [0, *cuts, len(values)]
    rank = dist.get_rank()
    mine = torch.tensor(values[bounds[rank] : bounds[rank + 1]], dtype=torch.float32)
    return bits(exact_norm(list(mine.split(7)), dist.group.WORLD))


def test_however_ranks_share_the_elements() -> None:
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(200, generator=generator) * 10 ** torch.randn(200, generator=generator).mul(8)
    values = values.tolist()
    whole = bits(exact_norm([torch.tensor(values, dtype=torch.float32)]))
    for cuts in ([100], [0], [1, 1], [3, 190, 199]):
        assert set(run_ranks(len(cuts) + 1, norm_of_parts, values, cuts)) == {whole}


def test_one_ranks_nan_or_inf_reaches_all() -> None:
    for value in (math.nan, math.inf):
        found = run_ranks(3, norm_of_parts, [1.0, 2.0, value], [1, 2])
        assert len(set(found)) == 1
        assert struct.unpack("<d", found[0])[0] == pytest.approx(value, nan_ok=True)


def clipped(wrap: str, exact: bool, max_norm: float) -> Any:
    """(norm before, gradients after, torch's norm and gradients of the same model unsharded)."""
    torch.manual_seed(0)
    model = Net(dropout=0.0)
    model = wrap_fsdp1(model) if wrap == "fsdp1" else wrap_fsdp2(model)
    if exact:
        reshard.exact(model)
    plan = BatchPlan(12, 1, dist.get_world_size())
    sampler = ElasticSampler(40, plan, dist.get_rank(), seed=3)
    loader = torch.utils.data.DataLoader(Points(40), batch_sampler=sampler)
    reshard.accumulate(
        model,
        next(sampler.steps(loader)),
        lambda batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        plan,
        sampler=sampler,
    )
    if wrap == "fsdp1":
        return reshard.clip_grad_norm_(model, max_norm), None, None, None
    whole = [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
    norm = reshard.clip_grad_norm_(model, max_norm)
    after = [parameter.grad.full_tensor() for parameter in model.parameters()]
    for gradient, parameter in zip(whole, theirs := [nn.Parameter(torch.zeros_like(g)) for g in whole], strict=True):
        parameter.grad = gradient
    expected_norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm).item()
    return norm, after, expected_norm, [parameter.grad for parameter in theirs]


@pytest.mark.parametrize("max_norm", [0.3, 1e6])
def test_clipping_has_the_same_bits_at_every_world_size_and_is_torchs(max_norm: float) -> None:
    seen = set()
    for world in (1, 2, 3, 4):
        for norm, after, expected_norm, expected in run_ranks(world, clipped, "fsdp2", True, max_norm):
            assert norm == pytest.approx(expected_norm, rel=1e-6)
            assert (norm > max_norm) == (max_norm == 0.3)
            for ours, theirs in zip(after, expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
            seen.add((norm, *map(raw, after)))
    assert len(seen) == 1


@pytest.mark.parametrize("wrap", ["fsdp2", "fsdp1"])
def test_without_exact_mode_it_is_torchs_own_clipping(wrap: str) -> None:
    (reference, *_), *_ = run_ranks(1, clipped, "fsdp2", True, 0.3)
    for norm, _, _, _ in run_ranks(2, clipped, wrap, False, 0.3):
        assert norm == pytest.approx(reference, rel=1e-5)


def clip_around_fsdp1() -> None:
    model = nn.Sequential(wrap_fsdp1(Net()))
    reshard.clip_grad_norm_(model, 1.0)


def test_a_module_around_fsdp1_is_refused_as_its_norm_would_be_one_ranks_only() -> None:
    with pytest.raises(RankFailed, match="FSDP1 clips at its root, and this module only contains one; pass the FSDP1"):
        run_ranks(1, clip_around_fsdp1)
