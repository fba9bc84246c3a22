"""Mesh: the ranks of a run as a grid of named axes, and the groups in which they meet.

The axes go from the outermost to the innermost, and ranks count along the innermost first: its neighbours are neighbours in a
node too. A group along some axes holds the ranks that differ in these alone.

A chunk's `Sharding` says along which axes ranks hold other stretches of it, and along which the gradients of ranks add up.
Its collectives follow: weights are all-gathered along the sharded axes; a gradient is reduce-scattered along the axes that are
both, and all-reduced along those that are summed alone.

Along the tensor axis ranks hold a model together. Of a parameter that is cut each has a part, and its gradient; of one that is
whole all have the same, and the gradient of the same samples, whose mean is taken: so they stay equal to the bit.

Along the pipeline axis ranks hold other stages, and so other parameters. One that several of them use is on each: their gradients
add up, after all else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Literal, get_args

Axis = Literal["pipeline", "data", "sequence", "tensor"]
AXES: tuple[Axis, ...] = get_args(Axis)  # the outermost first: neighbours along the last exchange the most
DATA, TENSOR, PIPELINE = "data", "tensor", "pipeline"
REPLICA, SHARD = "replica", "shard"  # the data axis, where some neighbours shard what the next so many hold too


@dataclass(frozen=True)
class Mesh:
    axes: tuple[tuple[str, int], ...]  # names and sizes

    @classmethod
    def of(cls, sizes: Mapping[Axis, int]) -> Mesh:
        return cls(tuple((name, sizes.get(name, 1)) for name in AXES))

    @cached_property
    def count(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, along: tuple[str, ...]) -> int:
        return math.prod(size for name, size in self.axes if name in along)

    def split(self, axis: str, inner: int) -> Mesh:
        """With one axis seen as two: replicas of `inner` neighbours that shard.

        >>> Mesh((("data", 8),)).split("data", 4).axes
        (('replica', 2), ('shard', 4))
        """
        found: list[tuple[str, int]] = []
        for name, size in self.axes:
            if name == axis and size % inner:
                raise ValueError(f"{size} ranks along {axis} cannot be seen as replicas of {inner}")
            found += [(REPLICA, size // inner), (SHARD, inner)] if name == axis else [(name, size)]
        return Mesh(tuple(found))

    def groups(self, along: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All ranks, in the groups that differ along these axes alone.

        >>> Mesh((("replica", 2), ("shard", 2))).groups(("replica",))
        ((0, 2), (1, 3))
        """
        return _groups(self.axes, along)

    def group(self, rank: int, along: tuple[str, ...]) -> tuple[int, ...]:
        """That which a rank is in."""
        return next(each for each in self.groups(along) if rank in each)


@cache
def _groups(axes: tuple[tuple[str, int], ...], along: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(size) for _, size in axes))):
        others = tuple(index for (name, _), index in zip(axes, place, strict=True) if name not in along)
        found.setdefault(others, []).append(rank)
    return tuple(tuple(each) for each in found.values())


@dataclass(frozen=True)
class Sharding:
    """Where a chunk's state lies on a mesh."""

    mesh: Mesh
    sharded: tuple[str, ...]  # axes along which ranks hold other stretches
    summed: tuple[str, ...]  # axes along which gradients of ranks add up
    apart: tuple[str, ...] = ()  # axes along which ranks hold chunks of other numbers: stages, parts of cut parameters
    holders: tuple[int, ...] = ()  # places along the pipeline axis that have the chunk, where more than one has

    @classmethod
    def over_data(cls, mesh: Mesh, shards: int, holders: tuple[int, ...] = ()) -> Sharding:
        """`shards` neighbours along the data axis hold a stretch each; the next so many hold the same, and so do those along the
        tensor axis. Their gradients are all of the same samples: each counts for its share (`averaged`)."""
        return cls(mesh.split("data", shards), (SHARD,), (REPLICA, SHARD, TENSOR), (PIPELINE,), holders)

    @classmethod
    def of_cut(cls, mesh: Mesh, shards: int, holders: tuple[int, ...] = ()) -> Sharding:
        """The same of parameters that the tensor axis cuts: along it, ranks have nothing to add up."""
        return cls(mesh.split("data", shards), (SHARD,), (REPLICA, SHARD), (TENSOR, PIPELINE), holders)

    @property
    def averaged(self) -> int:
        """How many ranks have the gradient of the same samples, so that their sum is so many times what it is to be."""
        return self.mesh.size((TENSOR,)) if TENSOR in self.summed else 1

    @cached_property
    def shards(self) -> int:
        return self.mesh.size(self.sharded)

    @property
    def scattered(self) -> tuple[str, ...]:
        """Axes along which a gradient is reduce-scattered."""
        return tuple(each for each in self.summed if each in self.sharded)

    @property
    def reduced(self) -> tuple[str, ...]:
        """Axes along which it is all-reduced after that."""
        return tuple(each for each in self.summed if each not in self.sharded)

    def part(self, rank: int) -> int:
        """Which of the stretches is this rank's."""
        return self.mesh.group(rank, self.sharded).index(rank)

    @property
    def norm_share(self) -> float:
        """What one rank's squares count in the sum over all ranks: those that hold the same count once together."""
        return self.shards * self.mesh.size(self.apart) / (self.mesh.count * max(len(self.holders), 1))
