"""The allocator's rules, played: never less than what is alive, exact where the rules are known, no leak on repetition."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from anyfit.costing.allocator import LARGE_SEGMENT, MIB, SMALL_SEGMENT, CachingAllocator

sizes = st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=40)


def test_small_blocks_share_segments_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    for _ in range(4096):
        allocator.take(1)  # 512 bytes each
    assert allocator.reserved_bytes == SMALL_SEGMENT
    allocator.take(1)
    assert allocator.reserved_bytes == 2 * SMALL_SEGMENT


def test_middling_blocks_share_twenty_mebibytes_and_large_ones_have_their_own() -> None:
    allocator = CachingAllocator()
    allocator.take(9 * MIB)
    allocator.take(9 * MIB)
    assert allocator.reserved_bytes == LARGE_SEGMENT
    allocator.take(33 * MIB)
    assert allocator.reserved_bytes == LARGE_SEGMENT + 34 * MIB


def test_a_freed_block_is_taken_again_and_split() -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(40 * MIB))
    allocator.take(16 * MIB)
    allocator.take(24 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_neighbours_merge_when_freed_in_any_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        allocator = CachingAllocator()
        allocator.give(allocator.take(60 * MIB))
        pieces = [allocator.take(20 * MIB) for _ in range(3)]
        for index in order:
            allocator.give(pieces[index])
        allocator.take(60 * MIB)
        assert allocator.reserved_bytes == 60 * MIB


def test_what_is_left_of_a_large_block_is_kept_whole_unless_it_is_worth_splitting() -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(20 * MIB))
    allocator.take(19 * MIB)  # 1 MiB would be left: not split
    allocator.take(MIB)
    assert allocator.reserved_bytes == 20 * MIB + SMALL_SEGMENT


@given(sizes, st.integers(0, 1000))
def test_reserved_covers_what_is_alive_and_the_same_again_takes_no_more(wanted: list[int], seed: int) -> None:
    """Where all are of one size: of several, a small one may come to lie where a large one did, as the best fit there is."""
    mixed = reserved_by_the_same(wanted, seed)
    assert mixed == sorted(mixed)
    assert len(set(reserved_by_the_same([max(wanted)] * len(wanted), seed))) == 1


def reserved_by_the_same(wanted: list[int], seed: int) -> list[int]:
    """Three times over, each time given back in another order."""
    allocator, shuffle = CachingAllocator(), random.Random(seed)
    reserved = []
    for _ in range(3):
        alive: list[tuple[int, object]] = []
        for size in wanted:
            alive.append((size, allocator.take(size)))
            assert allocator.reserved_bytes >= sum(each for each, _ in alive)
        shuffle.shuffle(alive)
        for _, piece in alive:
            allocator.give(piece)  # type: ignore[arg-type]
        reserved.append(allocator.reserved_bytes)
    return reserved
