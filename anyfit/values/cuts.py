"""How the ranks of one axis hold a tensor.

    WHOLE             every rank has all of it
    SUM               every rank has a summand of it: what is left to add up is all of it
    Cut(dim, outer)   the dimension, seen as outer x n x rest, is cut in the middle: rank r has [:, r, :]

`Cut(d)` is the usual cut. Of rows that were flattened from (batch, sequence), a cut sequence is `Cut(0, outer=batch)`; of
columns that hold q|k|v side by side, `Cut(1, outer=3)` gives every rank its part of each.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        return tuple(size // n if dim == self.dim else size for dim, size in enumerate(shape))


Held: TypeAlias = Literal["whole", "sum"] | Cut


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
