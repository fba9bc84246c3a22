"""Axis: the ranks that hold a block together, and how they bring a tensor from one way of being held to another.

Every rank runs the same code, so all of them meet at each exchange in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from .parts import joined, part

_dist: Any = dist
all_gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor  # as torch 2.13 calls it, and before
reduce_scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    n: int = 1
    rank: int = 0
    group: Any = None  # of torch.distributed; None: all ranks

    @classmethod
    def of_all(cls) -> Axis:
        return cls(dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else cls()

    def moved(self, x: Tensor, held: Held, wanted: Held) -> Tensor:
        if held == wanted:
            return x
        if held == WHOLE:
            return self.mask(x) if wanted == SUM else self.slice(x, wanted)  # type: ignore[arg-type]
        if held == SUM:
            return self.all_reduce(x) if wanted == WHOLE else self.reduce_scatter(x, wanted)  # type: ignore[arg-type]
        assert isinstance(held, Cut)
        if wanted == WHOLE:
            return self.all_gather(x, held)
        assert isinstance(wanted, Cut)
        return self.all_to_all(x, held, wanted) if held.dim != wanted.dim else self.regroup(x, held, wanted)

    def slice(self, x: Tensor, wanted: Cut) -> Tensor:
        return part(x, wanted, self.n, self.rank)

    def mask(self, x: Tensor) -> Tensor:
        """A summand: all of it, or nothing."""
        return x if self.rank == 0 else torch.zeros_like(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: Tensor, held: Cut) -> Tensor:
        x = x.contiguous()
        parts = x.new_empty((self.n, *x.shape))
        all_gather(parts.view(-1), x.view(-1), group=self.group)
        return joined(parts.unbind(), held)

    def reduce_scatter(self, x: Tensor, wanted: Cut) -> Tensor:
        parts = self._parts(x, wanted)
        own = torch.empty_like(parts[0])
        reduce_scatter(own.view(-1), parts.view(-1), group=self.group)
        return own

    def all_to_all(self, x: Tensor, held: Cut, wanted: Cut) -> Tensor:
        sent = self._parts(x, wanted)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got.view(-1), sent.view(-1), group=self.group)
        return joined(got.unbind(), held)

    def regroup(self, x: Tensor, held: Cut, wanted: Cut) -> Tensor:
        return self.slice(self.all_gather(x, held), wanted)

    def _parts(self, x: Tensor, cut: Cut) -> Tensor:
        """What is each rank's, one after the other."""
        return torch.stack([part(x, cut, self.n, rank) for rank in range(self.n)])

    def agreed(self, mine: Any) -> Any:
        """What the first rank has, on all of them: ranks that solve by themselves may differ."""
        return self.all_of(mine)[0]

    def all_of(self, mine: Any) -> Sequence[Any]:
        if self.n == 1:
            return [mine]
        found: list[Any] = [None] * self.n
        dist.all_gather_object(found, mine, group=self.group)
        return found


# ---------------------------------------------------------------------- borders


class _Moves(torch.autograd.Function):
    """From one way of holding a tensor to another; its gradient goes back."""

    @staticmethod
    def forward(context: Any, x: Tensor, held: Held, wanted: Held, axis: Axis) -> Tensor:
        context.held, context.wanted, context.axis = held, wanted, axis
        return axis.moved(x, held, wanted)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return context.axis.moved(gradients[0], context.wanted, context.held), None, None, None


def entering(x: Tensor, held: Held, axis: Axis) -> Tensor:
    """A whole tensor as a cut block takes it; its gradient is whole again."""
    return x if held == WHOLE else marked(_Moves.apply(x, WHOLE, held, axis), held)  # type: ignore[no-untyped-call]


def leaving(x: Tensor, axis: Axis) -> Tensor:
    """What a cut block gives, whole: for all that is not a cut block."""
    held = held_as(x)
    if held is None:
        raise ValueError("this is not the very tensor that a cut block gave: bring it to whole before anything else reads it")
    left: Tensor = x if held == WHOLE else _Moves.apply(x, held, WHOLE, axis)  # type: ignore[no-untyped-call]
    return left


def marked(x: Tensor, held: Held) -> Tensor:
    """The tensor, with a note of how it is held: its shape alone does not tell a part from a whole."""
    x.held_along_axis = (held, x._version)  # type: ignore[attr-defined]
    return x


def held_as(x: Tensor) -> Held | None:
    """As it was marked; None where it was not, or was changed since."""
    held, version = getattr(x, "held_along_axis", (None, -1))
    return held if version == x._version else None
