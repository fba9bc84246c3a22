"""How the ranks of one axis hold a tensor.

    WHOLE             every rank has all of it
    SUM               every rank has a summand of it: what is left to add up is all of it
    Cut(dim, outer)   the dimension, seen as outer x n x rest, is cut in the middle: rank r has [:, r, :]

`Cut(d)` is the usual cut. Of rows that were flattened from (batch, sequence), a cut sequence is `Cut(0, outer=batch)`; of
columns that hold q|k|v side by side, `Cut(1, outer=3)` gives every rank its part of each.

Rows of a table of words need not be a multiple of n: the last rank then has fewer, and its part is filled up with zeros, so that
all ranks have parts of one shape. Everything else is cut evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

WHOLE: Literal["whole"] = "whole"
SUM: Literal["sum"] = "sum"


class Cut(NamedTuple):
    dim: int
    outer: int = 1

    def __str__(self) -> str:
        return f"cut {self.dim}" if self.outer == 1 else f"cut {self.dim} of {self.outer}"

    def divides(self, shape: Sequence[int], n: int) -> bool:
        """
        >>> Cut(0, outer=3).divides((12,), 4), Cut(0, outer=3).divides((6,), 4)
        (True, False)
        """
        return self.dim < len(shape) and shape[self.dim] >= n and shape[self.dim] % (self.outer * n) == 0

    def part(self, shape: Sequence[int], n: int) -> tuple[int, ...]:
        """The shape that a rank has."""
        return tuple(-(-size // n) if dim == self.dim else size for dim, size in enumerate(shape))

    def whole(self, part: Sequence[int], n: int) -> tuple[int, ...]:
        """The shape that parts of this one make."""
        return tuple(size * n if dim == self.dim else size for dim, size in enumerate(part))


@dataclass(frozen=True)
class Parted:
    """What one of n ranks has of a tensor that is cut."""

    shape: tuple[int, ...]  # of the whole
    cut: Cut
    n: int
    rank: int

    @property
    def part(self) -> tuple[int, ...]:
        return self.cut.part(self.shape, self.n)

    @property
    def rows(self) -> int:
        """Of the part's, along the dimension that is cut, those that are the tensor's; the others fill the part up.

        >>> Parted((7, 2), Cut(0), 3, 0).rows, Parted((7, 2), Cut(0), 3, 2).rows
        (3, 1)
        """
        size = self.part[self.cut.dim]
        return size if self.is_even else min(size, self.shape[self.cut.dim] - self.rank * size)

    @property
    def elements(self) -> int:
        """Those that are the tensor's; they come first."""
        part = self.part
        return math.prod(part) // max(part[self.cut.dim], 1) * self.rows

    @property
    def is_even(self) -> bool:
        return self.cut.divides(self.shape, self.n)

    @property
    def run(self) -> int:
        """Elements of the whole that lie side by side in it and in the part: one run, then those of the other ranks.

        >>> Parted((2, 12), Cut(1, outer=3), 2, 0).run
        2
        """
        return self.part[self.cut.dim] // self.cut.outer * math.prod(self.shape[self.cut.dim + 1 :])


Held: TypeAlias = Literal["whole", "sum"] | Cut


def all_have_rows(rows: int, n: int) -> bool:
    """Whether n ranks can divide so many, where all but the last have as many.

    >>> all_have_rows(50257, 4), all_have_rows(9, 4)
    (True, False)
    """
    return rows > (n - 1) * -(-rows // n)


def share(held: Held, n: int) -> int:
    """Of how many equal parts a rank holds one."""
    return n if isinstance(held, Cut) else 1


Move: TypeAlias = Literal["slice", "mask", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "regroup"]
FREE: tuple[Move, ...] = ("slice", "mask")  # nothing is exchanged


def move(held: Held, wanted: Held) -> Move | None:
    """What brings a tensor from one way of being held to another; None where nothing does.

    >>> move("sum", Cut(1)), move(Cut(0), Cut(1)), move("whole", Cut(0)), move(Cut(0), "sum")
    ('reduce_scatter', 'all_to_all', 'slice', None)
    """
    if held == WHOLE:
        return "mask" if wanted == SUM else "slice"
    if held == SUM:
        return "all_reduce" if wanted == WHOLE else "reduce_scatter"
    if wanted == SUM:
        return None
    if wanted == WHOLE:
        return "all_gather"
    return "all_to_all" if held.dim != wanted.dim else "regroup"
