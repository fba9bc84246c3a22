"""The GPU's update against the CPU's, bit for bit, in Triton's interpreter; tests/gpu does the same on a GPU.

The kernel in C++ is asked to be as on a GPU: the square roots that torch takes on the CPU, and the kernel with it, are one ulp
below the nearest at times. That kernel is held to torch in test_adamw.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyfit.kernels import adamw as on_cpu
from anyfit.kernels import adamw_gpu as module
from anyfit.kernels.adamw import Settings, State, can_be_as_on_gpu
from anyfit.kernels.adamw_gpu import BLOCK, adamw_on_gpu, can_run_on_gpu

from .test_adamw import (
    SPECIAL,
    assert_same_state,
    chunks_with_ranges,
    copy_of,
    empty_like,
    numbers,
    settings_of_any_kind,
    state_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities in the interpreter
adamw = functools.partial(on_cpu.adamw, as_on_gpu=True)


@pytest.fixture(scope="module")
def device() -> Iterator[str]:
    """Where the kernel's tensors lie. Its functions are interpreted while these tests run, and as they were afterwards."""
    assert can_be_as_on_gpu(), "no C++ compiler, or an old processor: nothing to compare with"
    pytest.importorskip("triton", reason="Triton is not installed: it comes with torch's CUDA builds")
    if not hasattr(pytest.importorskip("triton._C.libtriton").interpreter, "fma_fp32"):
        pytest.skip("this Triton's interpreter rounds a fused multiply-add twice: only a GPU shows the bits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(module, "_kernels", [])
        patch.setattr(module, "_update_part", getattr(module._update_part, "fn", module._update_part))
        yield "cpu"


def moved(state: State, device: str, offset: int = 0) -> State:
    """A copy on the device, each tensor so many elements behind where an allocation begins."""

    def copied(tensor: Tensor) -> Tensor:
        longer = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
        longer[offset:] = tensor
        return longer[offset:]

    low = None if state.low is None else copied(state.low)
    return State(copied(state.weights), low, copied(state.m), copied(state.v))


def assert_same(found: State, expected: State) -> None:
    """Equal bits, and a number that is none is seen in the weights."""
    found = moved(found, "cpu")
    assert_same_state(found, expected)
    assert torch.equal(found.weights.isnan(), expected.weights.isnan())


# ---------------------------------------------------------------------- the arithmetic


@given(
    elements=st.one_of(st.integers(1, 200), st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 4099])),
    settings=settings_of_any_kind,
    is_split=st.booleans(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    scale=st.sampled_from([None, 1.0, 0.37]),
    in_place=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_several_steps_give_the_cpus_bits(
    device: str,
    elements: int,
    settings: Settings,
    is_split: bool,
    dtype: torch.dtype,
    scale: float | None,
    in_place: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    expected = state_of(numbers(elements, generator), is_split=is_split)
    state = moved(expected, device)
    for step in range(1, 5):
        gradient = numbers(elements, generator).to(dtype)
        adamw(expected, gradient, settings, step, scale=scale)
        out = None if in_place else empty_like(state)
        adamw_on_gpu(state, gradient.to(device), settings, step, out=out, scale=scale)
        state = out or state
        assert_same(state, expected)


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("decoupled", [True, False])
def test_infinities_nans_and_denormals_are_as_on_the_cpu(device: str, is_split: bool, decoupled: bool) -> None:
    settings = Settings(lr=0.1, weight_decay=0.01, decoupled=decoupled)
    pairs = torch.tensor(list(itertools.product(SPECIAL, [*SPECIAL, 1.0, -2.5])))
    gradient, expected = pairs[:, 1].contiguous(), state_of(pairs[:, 0].contiguous(), is_split=is_split)
    state = moved(expected, device)
    for step in (1, 2, 3):
        adamw(expected, gradient, settings, step)
        adamw_on_gpu(state, gradient.to(device), settings, step)
        assert_same(state, expected)


def test_halves_are_rounded_away_from_zero_as_on_the_cpu(device: str) -> None:
    """Masters just below, at and just above the middle of two weights, which an update without a gradient leaves as they are."""
    middles = (torch.arange(0x3F00, 0x4100) << 16) + 0x8000
    patterns = torch.cat([middle | sign << 31 for middle in (middles - 1, middles, middles + 1) for sign in (0, 1)])
    masters = patterns.to(torch.int32).view(torch.float32)
    expected, gradient = state_of(masters, is_split=True), torch.zeros(len(masters))
    state = moved(expected, device)
    adamw_on_gpu(state, gradient.to(device), Settings(lr=0.1), 1)
    assert_same(state, expected)


@given(st.integers(0, 0x7F800000 - 2**14), st.sampled_from([1, 2, 4097]), st.sampled_from([1.0, 1e-20, 1e-38]))
def test_roots_and_quotients_of_all_magnitudes_are_the_nearest(device: str, first: int, stride: int, m: float) -> None:
    """Second moments by bit pattern, in updates that show each root; with a small m the quotient may be a denormal."""
    squares = (first + stride * torch.arange(2**12)).clamp(max=0x7F800000).to(torch.int32).view(torch.float32)
    expected = State(torch.zeros_like(squares), None, torch.full_like(squares, m), squares)
    settings, gradient, state = Settings(lr=1.0, beta2=0.5, eps=0.0), torch.zeros_like(squares), moved(expected, device)
    adamw(expected, gradient, settings, 1)
    adamw_on_gpu(state, gradient.to(device), settings, 1)
    assert_same(state, expected)


# ---------------------------------------------------------------------- what is updated, and where to


@given(
    chunk=chunks_with_ranges(),
    is_split=st.booleans(),
    in_place=st.booleans(),
    offset=st.sampled_from([0, 1, 3, 8]),
    decoupled=st.booleans(),
)
def test_only_the_ranges_change_and_the_rest_is_carried_over(
    device: str, chunk: tuple[int, list[tuple[int, int]]], is_split: bool, in_place: bool, offset: int, decoupled: bool
) -> None:
    elements, ranges = chunk
    settings = Settings(lr=0.05, weight_decay=0.1, decoupled=decoupled)
    expected = state_of(torch.randn(elements), is_split=is_split)
    state, gradient = moved(expected, device, offset), torch.randn(elements).bfloat16()
    before, out = copy_of(expected), None if in_place else moved(empty_like(expected), device, offset)
    adamw(expected, gradient, settings, 1, ranges=ranges)
    adamw_on_gpu(state, gradient.to(device), settings, 1, out=out, ranges=ranges)
    assert_same(out or state, expected)
    if out is not None:
        assert_same(state, before)  # the old generation is whole


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("maximize", [False, True])
def test_a_scale_that_lies_beside_the_chunk_is_as_one_that_is_given(device: str, scale: float, maximize: bool) -> None:
    settings = Settings(lr=0.05, weight_decay=0.1, maximize=maximize)
    expected, gradient = state_of(torch.randn(3000), is_split=True), torch.randn(3000).bfloat16()
    state = moved(expected, device)
    adamw(expected, gradient, settings, 1, scale=scale, ranges=[(0, 100), (700, 3000)])
    there = torch.tensor(scale, device=device)
    adamw_on_gpu(state, gradient.to(device), settings, 1, scale=there, ranges=[(0, 100), (700, 3000)])
    assert_same(state, expected)
    adamw_on_gpu(state, gradient.to(device), settings, 2, scale=there * torch.nan)  # changes nothing
    assert_same(state, expected)
    with pytest.raises(ValueError, match="one fp32, of an update in place"):
        adamw_on_gpu(state, gradient.to(device), settings, 2, scale=there, out=empty_like(state))


def test_some_tensors_may_stay_in_place_while_others_move(device: str) -> None:
    expected, gradient = state_of(torch.randn(300), is_split=True), torch.randn(300)
    state = moved(expected, device)
    adamw(expected, gradient, Settings(lr=0.1), 1, ranges=[(10, 200)])
    out = replace(empty_like(state), m=state.m, low=state.low)
    adamw_on_gpu(state, gradient.to(device), Settings(lr=0.1), 1, out=out, ranges=[(10, 200)])
    assert_same(out, expected)


def test_nothing_to_do_is_fine(device: str) -> None:
    nothing = moved(state_of(torch.zeros(0), is_split=True), device)
    adamw_on_gpu(nothing, torch.zeros(0, device=device), Settings(lr=0.1), 1)
    expected = state_of(torch.ones(10), is_split=True)
    state = moved(expected, device)
    out = empty_like(state)
    adamw_on_gpu(state, torch.ones(10, device=device), Settings(lr=0.1), 1, out=out, ranges=[(3, 3)])
    assert_same(out, expected)


@pytest.mark.parametrize(
    ("ranges", "launches"), [(None, 1), ([(0, 5), (5, 5), (5, 64)], 1), ([(0, 5), (6, 64)], 2), ([(3, 3)], 0), ([], 0)]
)
def test_ranges_that_touch_take_one_launch(ranges: Any, launches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grids: list[tuple[int]] = []

    class Launched:
        def __getitem__(self, grid: tuple[int]) -> Any:
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(module, "_kernels", [Launched()])
    adamw_on_gpu(state_of(torch.zeros(64), is_split=True), torch.zeros(64), Settings(lr=0.1), 1, ranges=ranges)
    assert grids == [(1,)] * launches


# ---------------------------------------------------------------------- what is refused


WRONG = ["weights must", "low must", "m must", "v must", "gradient must", "on meta", "both be split", "share memory"]
WRONG += ["within 0 to 64", "disjoint", "ascending", "counts from 1"]


@pytest.mark.parametrize("change", WRONG)
def test_what_could_write_elsewhere_is_refused(change: str) -> None:
    state, long = state_of(torch.zeros(64), is_split=True), torch.zeros(128)
    cases: dict[str, dict[str, object]] = {
        "weights must": {"state": replace(state, weights=torch.zeros(64))},
        "low must": {"state": replace(state, low=torch.zeros(63, dtype=torch.int16))},
        "m must": {"state": replace(state, m=torch.zeros(128)[::2])},
        "v must": {"out": replace(copy_of(state), v=torch.zeros(8, 8))},
        "gradient must": {"gradient": torch.zeros(64, dtype=torch.float16)},
        "on meta": {"gradient": torch.zeros(64, device="meta")},
        "both be split": {"out": state_of(torch.zeros(64), is_split=False)},
        "share memory": {"state": replace(state, m=long[:64], v=long[63:127])},
        "within 0 to 64": {"ranges": [(0, 65)]},
        "disjoint": {"ranges": [(0, 10), (9, 20)]},
        "ascending": {"ranges": [(30, 20)]},
        "counts from 1": {"step": 0},
    }
    wrong: Any = {"state": state, "gradient": torch.zeros(64), "settings": Settings(lr=0.1), "step": 1} | cases[change]
    with pytest.raises(ValueError, match=change):
        adamw_on_gpu(**wrong)


def test_it_does_not_run_where_there_is_no_gpu() -> None:
    assert not can_run_on_gpu("cpu")
    assert not can_run_on_gpu(torch.device("meta"))
