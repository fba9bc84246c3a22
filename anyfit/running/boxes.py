"""A flat stretch of a tensor as boxes of it. Pure arithmetic.

Ranks shard flat buffers, and a stretch begins and ends in the middle of a row; other programs know rectangles. Of a tensor with n
dimensions a stretch is at most 2n - 1 boxes: the rest of the first row, whole rows, the start of the last row, and so on inwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from anyfit.values.cuts import Parted


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins and how long it is, by dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def is_within(self, shape: Sequence[int]) -> bool:
        return len(shape) == len(self.offsets) and all(
            min(offset, size) >= 0 and offset + size <= length
            for offset, size, length in zip(self.offsets, self.sizes, shape, strict=True)
        )

    def overlaps(self, other: Box) -> bool:
        pairs = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(mine < theirs + length and theirs < mine + size for mine, size, theirs, length in pairs)


def whole(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def boxes_of(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The elements from `start` to `end` of a tensor in row-major order, as boxes in that order.

    >>> [(box.offsets, box.sizes) for box in boxes_of((4, 3), 2, 10)]
    [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 1))]
    """
    return list(_boxes_of(tuple(shape), start, end))


def _boxes_of(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    if start == 0 and end == math.prod(shape):
        yield whole(shape)
        return
    if start >= end:
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row  # rows that are whole
    if first > last:  # within one row
        yield from _in_row(shape, last, start - last * row, end - last * row)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:]))
    if last * row < end:
        yield from _in_row(shape, last, 0, end - last * row)


def _in_row(shape: tuple[int, ...], row: int, start: int, end: int) -> Iterator[Box]:
    for box in _boxes_of(shape[1:], start, end):
        yield Box((row, *box.offsets), (1, *box.sizes))


class Strip(NamedTuple):
    """A box of a tensor, and where its elements lie in a flat stretch: in runs of equal length, a step from one to the next."""

    box: Box
    start: int
    run: int
    step: int


def strips_of(shape: Sequence[int], start: int, end: int, parted: Parted | None = None) -> list[Strip]:
    """The elements from `start` to `end` of a tensor, or of a rank's part of it. Of a part that is cut in an inner factor (q|k|v
    side by side) those of one box do not lie together.

    >>> from anyfit.values.cuts import Cut
    >>> for strip in strips_of((2, 8), 0, 8, Parted((2, 8), Cut(1, outer=2), 2, 1)):
    ...     print(strip.box.offsets, strip.box.sizes, strip.start, strip.run, strip.step)
    (0, 2) (2, 2) 0 2 4
    (0, 6) (2, 2) 2 2 4
    """
    if parted is None:
        sized = [(box, box.elements) for box in boxes_of(shape, start, end)]
        starts = itertools.accumulate((size for _, size in sized), initial=0)
        return [Strip(box, at, size, size) for (box, size), at in zip(sized, starts, strict=False)]
    dim, outer, n, rank = parted.cut.dim, parted.cut.outer, parted.n, parted.rank
    rest = parted.part[dim] // outer
    found, at = [], 0
    for box in boxes_of((*shape[:dim], outer, rest, *shape[dim + 1 :]), start, end):
        run, count = math.prod(box.sizes[dim + 1 :]), box.sizes[dim]
        for piece in range(count):
            first = ((box.offsets[dim] + piece) * n + rank) * rest + box.offsets[dim + 1]
            offsets = (*box.offsets[:dim], first, *box.offsets[dim + 2 :])
            found.append(Strip(Box(offsets, (*box.sizes[:dim], *box.sizes[dim + 1 :])), at + piece * run, run, count * run))
        at += box.elements
    return found


def tile(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes lie in the shape, do not overlap, and leave nothing out."""
    if not all(box.is_within(shape) for box in boxes) or sum(box.elements for box in boxes) != math.prod(shape):
        return False
    if not shape:
        return len(boxes) == 1
    along = max(range(len(shape)), key=lambda dim: shape[dim])
    there: list[Box] = []  # those that reach as far as the one at hand along the longest dimension
    for box in sorted((box for box in boxes if box.elements), key=lambda box: box.offsets[along]):
        there = [other for other in there if other.offsets[along] + other.sizes[along] > box.offsets[along]]
        if any(box.overlaps(other) for other in there):
            return False
        there.append(box)
    return True
