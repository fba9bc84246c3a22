"""Gradients that are added up on the host have the bits of torch's sums."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyfit.kernels import sums
from anyfit.kernels.adamw import is_native
from anyfit.kernels.sums import add, norm, root

SPECIAL = [0.0, -0.0, 1e-45, -1e-40, float("inf"), float("-inf"), float("nan"), 3.3e38, 1.0]


def drawn(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-30, 30, (count,), generator=generator)
    found[: len(SPECIAL)] = torch.tensor(SPECIAL)[:count]
    return found[torch.randperm(count, generator=generator)]


@pytest.mark.parametrize("is_in_cpp", [True, False])
@given(
    count=st.integers(1, 5000),
    offset=st.integers(0, 7),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    is_first=st.booleans(),
    threads=st.integers(1, 4),
)
def test_the_bits_are_torchs(is_in_cpp: bool, count: int, offset: int, dtype: torch.dtype, is_first: bool, threads: int) -> None:
    assert is_native()
    total, part = drawn(count + offset, 1)[offset:].clone(), drawn(count + offset, 2).to(dtype)[offset:]
    expected = part.float() if is_first else total + part
    with pytest.MonkeyPatch.context() as patch:
        if not is_in_cpp:
            patch.setattr(sums, "is_native", lambda: False)
        squares = add(total, part, is_first=is_first, threads=threads)
    if is_in_cpp:
        assert squares == pytest.approx(float(total.double().square().sum()), rel=1e-12, nan_ok=True)
        assert squares is not None
        assert torch.equal(root(squares).nan_to_num(), norm(total).nan_to_num())
    else:
        assert squares is None
    same = total.view(torch.int32) == expected.view(torch.int32)
    assert bool((same | (total.isnan() & expected.isnan())).all())


def test_many_threads_share_a_large_sum() -> None:
    total, part = drawn(10**6, 3), drawn(10**6, 4).bfloat16()
    expected = total + part
    add(total, part, is_first=False, threads=7)
    assert torch.equal(total.nan_to_num(), expected.nan_to_num())


def test_what_does_not_fit_together_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be added"):
        add(torch.zeros(3), torch.zeros(4), is_first=False)
    with pytest.raises(ValueError, match="cannot be added"):
        add(torch.zeros(3), torch.zeros(3, dtype=torch.float16), is_first=False)
    with pytest.raises(ValueError, match="without gaps"):
        add(torch.zeros(3), torch.zeros(6)[::2], is_first=False)


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000, 3_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_right_however_many_elements_it_has(count: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    values = (torch.randn(count, generator=torch.Generator().manual_seed(count)) * 1e-3).to(dtype)
    found = norm(values)
    assert found.dtype == torch.float32
    assert found.shape == ()
    assert float(found) == pytest.approx(float(values.double().norm()), rel=2e-7)
    for threads in (2, 3, 16):
        assert torch.equal(norm(values, threads=threads), found)
    monkeypatch.setattr(sums, "is_native", lambda: False)
    assert float(norm(values)) == pytest.approx(float(found), rel=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_what_is_not_finite_is_not_finite_either(dtype: torch.dtype) -> None:
    values = torch.ones(100_000, dtype=dtype)
    values[77_777] = math.inf
    assert float(norm(values, threads=2)) == math.inf
    values[99_999] = math.nan
    assert math.isnan(float(norm(values, threads=2)))
    assert float(norm(torch.full((4,), 1e30))) == pytest.approx(2e30)  # whose squares fp32 has no room for
