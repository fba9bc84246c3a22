"""Axis: the ranks that hold a block together, and how they bring a tensor from one way of being held to another.

Every rank runs the same code, so all of them meet at each exchange in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from .parts import filled_up, joined, part, rows_of

_dist: Any = dist
all_gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor  # as torch 2.13 calls it, and before
reduce_scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Axis:
    n: int = 1
    rank: int = 0
    group: Any = None  # of torch.distributed; None: all ranks
    rows: int | None = None  # of what is cut, where n does not divide them: the last rank has fewer

    @classmethod
    def of_all(cls) -> Axis:
        return cls(dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else cls()

    def over(self, rows: int) -> Axis:
        """The same ranks, for cuts of so many rows (or columns, of logits)."""
        return self if rows % self.n == 0 else replace(self, rows=rows)

    def counted(self, own: int) -> tuple[int, int]:
        """Of a dimension of which this rank has `own`: where they begin, and how many all ranks have."""
        return (own * self.rank, own * self.n) if self.rows is None else (self.rank * -(-self.rows // self.n), self.rows)

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
        return part(x, wanted, self.n, self.rank) if self.rows is None else rows_of(x, wanted.dim, self.n, self.rank)

    def mask(self, x: Tensor) -> Tensor:
        """A summand: all of it, or nothing."""
        return x if self.rank == 0 else torch.zeros_like(x)

    def all_reduce(self, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, x: Tensor, held: Cut) -> Tensor:
        if self.rows is None:
            return joined(self.stacked(x).unbind(), held)
        filled = filled_up(x, held.dim, -(-self.rows // self.n))
        return joined(self.stacked(filled).unbind(), held).narrow(held.dim, 0, self.rows).contiguous()

    def stacked(self, x: Tensor) -> Tensor:
        """What all ranks have, one after the other along a new first dimension."""
        parts = x.new_empty((self.n, *x.shape))
        all_gather(parts.view(-1), x.contiguous().view(-1), group=self.group)
        return parts

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

    def shared(self, x: Tensor) -> Tensor:
        """What every rank has, for work of which each does a part: the gradients that come back are summands."""
        found: Tensor = _Shared.apply(x, self)  # type: ignore[no-untyped-call]
        return found

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of what every rank has."""
        return moved(x, WHOLE, Cut(0), self)

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


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, axis: Axis) -> Tensor:
        context.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return context.axis.all_reduce(gradients[0]), None


def moved(x: Tensor, held: Held, wanted: Held, axis: Axis) -> Tensor:
    """A tensor held as wanted; its gradient goes back the same way."""
    found: Tensor = x if held == wanted else _Moves.apply(x, held, wanted, axis)  # type: ignore[no-untyped-call]
    return found
