"""A flat stretch of a tensor as boxes of it. Pure arithmetic.

Ranks shard flat buffers, and a stretch begins and ends in the middle of a row; other programs know rectangles. Of a tensor with n
dimensions a stretch is at most 2n - 1 boxes: the rest of the first row, whole rows, the start of the last row, and so on inwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


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
