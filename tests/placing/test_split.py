"""Split masters: exact for every bit pattern."""

from __future__ import annotations

import struct

import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfit.kernels.split import merge, split
from tests.oracle import round_half_away


def both_ways(exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    high, low = torch.empty(exact.shape, dtype=torch.bfloat16), torch.empty(exact.shape, dtype=torch.int16)
    split(exact.clone(), high, low)
    back = torch.empty_like(exact)
    merge(high, low, back)
    return high, back


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=64))
def test_any_bit_pattern_comes_back(patterns: list[int]) -> None:
    exact = torch.tensor(patterns, dtype=torch.int32).view(torch.float32)
    _, back = both_ways(exact)
    assert torch.equal(back.view(torch.int32), exact.view(torch.int32))


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
def test_the_high_half_is_the_nearest_bf16_ties_away_from_zero(values: list[float]) -> None:
    exact = torch.tensor(values, dtype=torch.float32)
    high, _ = both_ways(exact)
    assert torch.equal(high.view(torch.int16), round_half_away(exact).view(torch.int16))


def test_ties_denormals_and_infinities() -> None:
    tie_up = struct.unpack("f", struct.pack("I", 0x3F808000))[0]  # exactly between two bf16 numbers
    values = [tie_up, -tie_up, 0.0, -0.0, 1e-45, -1e-45, float("inf"), float("-inf"), 3.4028234e38]
    exact = torch.tensor(values, dtype=torch.float32)
    high, back = both_ways(exact)
    assert torch.equal(back.view(torch.int32), exact.view(torch.int32))
    assert high[:2].tolist() == [1.0078125, -1.0078125]
