"""Bytes of a checkpoint: the sums are zlib's, the numbers those of split.py, in C++ and where it is not built."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyfit.kernels import bytes as module
from anyfit.kernels.bytes import Move, copy, crc32, move_all, populate, split, touch
from anyfit.kernels.pages import in_huge_pages
from anyfit.kernels.split import merge as merge_in_torch
from anyfit.kernels.split import split as split_in_torch
from tests.conftest import FULL

EXAMPLES = 2000 if FULL else 150


@pytest.fixture(params=["built", "not built"], scope="module")
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    before = list(module._libraries)
    if request.param == "not built":
        module._libraries[:] = [None]
    elif module._library() is None:
        pytest.skip("no C++ compiler here")
    assert (module._library() is not None) == (request.param == "built")
    yield request.param
    module._libraries[:] = before


def merge(high: Tensor, low: Tensor, out: Tensor, *, past_cache: bool = False) -> None:
    move_all([Move(high, low, out)], past_cache=past_cache)


def random_bytes(count: int, seed: int, offset: int = 0) -> Tensor:
    """At any distance from a cache line."""
    made = np.random.default_rng(seed).integers(0, 256, count + offset + 64, dtype=np.uint8)
    first = -made.ctypes.data % 64 + offset
    return torch.from_numpy(made)[first : first + count]


@pytest.mark.usefixtures("kind")
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 63), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_sums_are_those_of_zlib(count: int, offset: int, seed: int, value: int) -> None:
    data = random_bytes(count, seed, offset)
    assert crc32(data, value) == zlib.crc32(data.numpy().data, value)


@pytest.mark.usefixtures("kind")
def test_sums_of_every_length_and_of_what_is_no_tensor_are_those_of_zlib() -> None:
    data = random_bytes(400, 1).numpy().tobytes()
    for count in range(400):
        assert crc32(data[:count]) == zlib.crc32(data[:count])
        assert crc32(bytearray(data[:count]), count) == zlib.crc32(data[:count], count)
        assert crc32(memoryview(data)[count:]) == zlib.crc32(data[count:])
    for fill in (0, 255):
        assert crc32(bytes([fill]) * 100_003) == zlib.crc32(bytes([fill]) * 100_003)


@pytest.mark.usefixtures("kind")
def test_a_sum_goes_on_where_another_ended() -> None:
    data = random_bytes(2**20 + 13, 2)
    for cut in (0, 1, 64, 2**19 + 5, len(data)):
        assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data.numpy().data)


@pytest.mark.usefixtures("kind")
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 31), st.integers(0, 31), st.integers(0, 15), st.integers(0, 2**32 - 1), st.booleans())
def test_numbers_are_put_together_as_in_torch(count: int, high: int, low: int, out: int, seed: int, past_cache: bool) -> None:
    halves = random_bytes(2 * count, seed, 2 * high).view(torch.bfloat16)
    lows = random_bytes(2 * count, seed + 1, 2 * low).view(torch.int16)
    room = torch.zeros(count + out + 16)
    first = -room.data_ptr() // 4 % 16 + out
    found, expected = room[first : first + count], torch.empty(count)
    merge(halves, lows, found, past_cache=past_cache)
    merge_in_torch(halves, lows, expected)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    assert not room[:first].any()
    assert not room[first + count :].any()


@pytest.mark.usefixtures("kind")
def test_every_half_is_put_together_with_the_least_and_the_greatest() -> None:
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for value in (-(2**15), -1, 0, 1, 2**15 - 1):
        low, found, expected = torch.full((2**16,), value, dtype=torch.int16), torch.empty(2**16), torch.empty(2**16)
        merge(high, low, found)
        merge_in_torch(high, low, expected)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.usefixtures("kind")
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 63), st.integers(0, 63), st.booleans())
def test_what_is_copied_is_the_same_and_nothing_beside_it_changes(count: int, at: int, to: int, past_cache: bool) -> None:
    data, room = random_bytes(count, count, at), torch.zeros(count + 128, dtype=torch.uint8)
    copy(data, room[to : to + count], past_cache=past_cache)
    assert torch.equal(room[to : to + count], data)
    assert not room[:to].any()
    assert not room[to + count :].any()


@pytest.mark.usefixtures("kind")
@settings(max_examples=EXAMPLES // 5, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=8), st.booleans(), st.sampled_from([0, 10]))
def test_many_are_moved_at_once(sizes: list[tuple[int, bool]], past_cache: bool, nice: int) -> None:
    generator, moves, expected = torch.Generator().manual_seed(len(sizes)), [], []
    for count, has_halves in sizes:
        high, out = torch.randn(count, generator=generator).bfloat16(), torch.zeros(count)
        low = torch.randint(-(2**15), 2**15, (count,), generator=generator).to(torch.int16)
        exact = torch.empty(count)
        merge_in_torch(high, low, exact)
        moves.append(Move(high, low, out) if has_halves else Move(exact, None, out))
        expected.append(exact)
    move_all(moves, past_cache=past_cache, nice=nice)
    for move, exact in zip(moves, expected, strict=True):
        assert torch.equal(move.out.view(torch.int32), exact.view(torch.int32))


def test_who_gives_way_is_another_thread() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    move_all([Move(torch.ones(3), None, torch.zeros(3))], nice=10)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def test_memory_is_given_until_it_is_not_wanted_any_more() -> None:
    size = 2**24
    if not populate(in_huge_pages(size), 2**21, nice=10, ends=ctypes.c_int32()):
        pytest.skip("the kernel cannot, or there is no C++ compiler here")
    memory, unwanted = in_huge_pages(size), in_huge_pages(size)
    memory[5] = 7
    assert populate(memory, 2**21, nice=10, ends=ctypes.c_int32())
    assert populate(unwanted, 2**21, nice=10, ends=ctypes.c_int32(1))
    assert memory[5] == 7
    assert resident_bytes(memory) == size
    assert resident_bytes(unwanted) == 0


def resident_bytes(memory: Tensor) -> int:
    """Of the pages that it lies in."""
    pages = (ctypes.c_ubyte * (memory.numel() // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.numel()), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ValueError, match="of one length"):
        copy(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="without gaps"):
        copy(torch.zeros(3, 2)[:, 0], torch.zeros(3))
    with pytest.raises(ValueError, match="is not copied to"):
        copy(torch.zeros(3), torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="cannot be merged"):
        merge(torch.zeros(3), torch.zeros(3, dtype=torch.int16), torch.zeros(3))


@pytest.mark.usefixtures("kind")
@settings(max_examples=EXAMPLES // 5, deadline=None)
@given(st.integers(0, 3000), st.integers(0, 15), st.integers(0, 31), st.integers(0, 31), st.integers(0, 2**31))
def test_any_bits_are_taken_apart_as_torch_does_and_nothing_beside_them_changes(
    count: int, at: int, high: int, low: int, seed: int
) -> None:
    exact = random_bytes(4 * count, seed, 4 * at).view(torch.float32)
    highs, lows = torch.zeros(count + 64, dtype=torch.bfloat16), torch.zeros(count + 64, dtype=torch.int16)
    found = highs[high : high + count], lows[low : low + count]
    expected = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
    split(exact, *found)
    split_in_torch(exact.clone(), *expected)
    assert torch.equal(found[0].view(torch.int16), expected[0].view(torch.int16))
    assert torch.equal(found[1], expected[1])
    assert not highs[:high].any()
    assert not highs[high + count :].any()
    assert not lows[:low].any()
    assert not lows[low + count :].any()
    whole = torch.empty(count)
    merge(*found, whole)
    assert torch.equal(whole.view(torch.int32), exact.view(torch.int32))


@pytest.mark.usefixtures("kind")
def test_bytes_that_are_touched_stay_as_they_are_and_have_memory() -> None:
    size, ends = 2**25, ctypes.c_int32()
    memory, fresh, unwanted = in_huge_pages(size), in_huge_pages(size), in_huge_pages(size)
    memory[::5000] = 7
    expected = memory.clone()
    if not touch(memory, 4096, ends):
        pytest.skip("no C++ compiler here")
    touch(fresh, 4096, ends)
    assert resident_bytes(fresh) == size
    assert torch.equal(memory, expected)
    assert not fresh.any()
    touch(unwanted, 4096, ctypes.c_int32(1))
    assert resident_bytes(unwanted) == 0
