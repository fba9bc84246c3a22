"""The GPU's update on a GPU: the bits of the CPU's, without waiting and without compiling anew."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch

from anyfit.kernels import adamw_gpu as module
from anyfit.kernels.adamw import Settings, State, adamw_in_torch, can_be_as_on_gpu
from anyfit.kernels.adamw_gpu import adamw_on_gpu, can_run_on_gpu
from tests.kernels.test_adamw import empty_like, masters_of, state_of
from tests.kernels.test_adamw_gpu import (  # noqa: F401  - the same tests, where this file's device is
    adamw,
    assert_same,
    moved,
    test_a_scale_that_lies_beside_the_chunk_is_as_one_that_is_given,
    test_halves_are_rounded_away_from_zero_as_on_the_cpu,
    test_infinities_nans_and_denormals_are_as_on_the_cpu,
    test_nothing_to_do_is_fine,
    test_only_the_ranges_change_and_the_rest_is_carried_over,
    test_roots_and_quotients_of_all_magnitudes_are_the_nearest,
    test_several_steps_give_the_cpus_bits,
    test_some_tensors_may_stay_in_place_while_others_move,
)

pytestmark = pytest.mark.gpu
SETTINGS = Settings(lr=3e-4, weight_decay=0.1)


@pytest.fixture(scope="module")
def device() -> str:
    pytest.importorskip("triton", reason="Triton is not installed: it comes with torch's CUDA builds")
    assert can_run_on_gpu("cuda")
    assert can_be_as_on_gpu()
    return "cuda"


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that it does not see every way to wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_two_hundred_steps_stay_beside_torch_on_the_cpu(device: str) -> None:
    """Not its bits: torch's square roots on the CPU may be an ulp beside the nearest, and what differs stays."""
    generator = torch.Generator().manual_seed(0)
    expected = state_of(torch.randn(50_000, generator=generator) * 0.02, is_split=True)
    state = moved(expected, device)
    for step in range(1, 201):
        gradient = (torch.randn(50_000, generator=generator) * 1e-3).bfloat16()
        adamw_in_torch(expected, gradient, SETTINGS, step)
        adamw_on_gpu(state, gradient.to(device), SETTINGS, step)
    found = moved(state, "cpu")
    torch.testing.assert_close(masters_of(found), masters_of(expected), rtol=1e-6, atol=1e-8)
    assert torch.equal(found.m, expected.m)
    assert torch.equal(found.v, expected.v)


def test_the_host_never_waits(device: str) -> None:
    state, gradient = moved(state_of(torch.ones(5000), is_split=True), device), torch.ones(5000, device=device)
    out = empty_like(state)
    with waiting_is_an_error():
        for step in range(1, 4):
            adamw_on_gpu(state, gradient, SETTINGS, step, out=out, scale=0.5, ranges=[(7, 100), (200, 4000)])
            adamw_on_gpu(state, gradient, SETTINGS, step)
            adamw_on_gpu(state, gradient, SETTINGS, step, scale=gradient[0])


def test_it_runs_in_the_order_of_the_current_stream(device: str) -> None:
    """What the stream brings before it is what it updates."""
    expected, gradient = state_of(torch.randn(100_000), is_split=True), torch.randn(100_000).bfloat16()
    state, late = moved(expected, device), torch.zeros(100_000, dtype=torch.bfloat16, device=device)
    ready = gradient.to(device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        late.copy_(ready)
        adamw_on_gpu(state, late, SETTINGS, 1, scale=0.5)
    stream.synchronize()
    adamw(expected, gradient, SETTINGS, 1, scale=0.5)
    assert_same(state, expected)


def test_steps_rates_scales_and_ranges_compile_nothing_anew(device: str) -> None:
    state, gradient = moved(state_of(torch.ones(8192), is_split=True), device), torch.ones(8192, device=device)

    def compiled() -> int:
        return len(module._kernel().device_caches[torch.cuda.current_device()][0])

    adamw_on_gpu(state, gradient, SETTINGS, 1)
    before = compiled()
    for step, start in enumerate((0, 1, 16, 1024, 1025, 2048, 16, 17), 1):
        settings = Settings(lr=1.0 / step, weight_decay=0.1 * step)
        adamw_on_gpu(state, gradient, settings, step, scale=1 / step, ranges=[(start, start + 1), (4096, 4096 + start)])
    assert compiled() == before


def test_elements_beyond_the_reach_of_32_bits_are_found(device: str) -> None:
    elements, tail = 2**31 + 5000, 10_000
    if torch.cuda.mem_get_info()[0] < elements * 14 + 2**30:
        pytest.skip("needs 29 GiB of GPU memory")
    expected, gradient = state_of(torch.randn(tail), is_split=True), torch.randn(tail).bfloat16()
    long = State(*(torch.zeros(elements, dtype=each.dtype, device=device) for each in expected.tensors))
    gradients = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    for whole, end in zip((*long.tensors, gradients), (*expected.tensors, gradient), strict=True):
        whole[-tail:] = end.to(device)
    adamw(expected, gradient, Settings(lr=0.1), 1)
    adamw_on_gpu(long, gradients, Settings(lr=0.1), 1)
    assert_same(State(*(each[-tail:] for each in long.tensors)), expected)
    assert not any(each[:-tail].any() for each in long.tensors)
