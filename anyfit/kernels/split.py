"""Split masters: a bf16 weight and an int16 low half that together are an exact fp32 number; fp32 weights are their own.

With `bits` the fp32 pattern: high = (bits + 0x8000) >> 16, low = the signed low 16 bits, and bits = (high << 16) + low.
Ties round away from zero, unlike torch's cast: with ties-to-even the low half would need a 17th bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

WRITTEN_AT_ONCE = 2**20  # elements: enough for all cores at once, and scratch that stays in their caches


def merge(high: Tensor, low: Tensor, out: Tensor) -> None:
    """Writes the fp32 numbers of (bf16 `high`, int16 `low`) into the fp32 tensor `out`."""
    bits = out.view(torch.int32)
    bits.copy_(high.view(torch.int16))
    bits.bitwise_left_shift_(16)
    bits.add_(low)


def split(exact: Tensor, high: Tensor, low: Tensor) -> None:
    """Writes the fp32 tensor `exact` as (bf16 `high`, int16 `low`); `exact` is used up."""
    bits = exact.view(torch.int32)
    low.copy_(bits)  # keeps the low 16 bits
    high.view(torch.int16).copy_(bits.sub_(low).bitwise_right_shift_(16))


@dataclass(frozen=True, eq=False)
class Masters:
    """One generation of exact masters, flat or of one parameter, wherever they lie."""

    weights: Tensor  # the high halves where there are low ones, else the masters themselves
    low: Tensor | None

    def read(self, exact: Tensor) -> None:
        """Into an fp32 buffer."""
        if self.low is None:
            exact.copy_(self.weights)
        else:
            merge(self.weights, self.low, exact)

    def write(self, exact: Tensor) -> None:
        """From an fp32 buffer, which is used up."""
        if self.low is None:
            self.weights.copy_(exact)
        else:
            split(exact, self.weights, self.low)

    def exact(self) -> Tensor:
        """Where the low halves are; the weights themselves where there are none."""
        if self.low is None:
            return self.weights.detach()
        exact = torch.empty(self.weights.shape, dtype=torch.float32, device=self.low.device)
        merge(self.weights.to(self.low.device), self.low, exact)
        return exact


def forget_low(low: Tensor, edited: Tensor) -> None:
    """A bf16 weight that was edited is its own new master."""
    low.masked_fill_(edited.to(low.device), 0)


def put(given: Tensor, homes: Sequence[Tensor], low: Tensor | None, *, is_split: bool) -> None:
    """Sets flat buffers of weights, and the low halves beside them, to these numbers, little by little."""
    if not is_split:
        for home in homes:
            home.copy_(given)
        return
    where = homes[0].device if low is None else low.device
    first = next((home for home in homes if home.device == where), None)  # is written at once, and the others from it
    for start in range(0, given.numel(), WRITTEN_AT_ONCE):
        part = slice(start, min(start + WRITTEN_AT_ONCE, given.numel()))
        new = partial(torch.empty, part.stop - part.start, device=where)
        high = new(dtype=torch.bfloat16) if first is None else first[part]
        rest = new(dtype=torch.int16) if low is None else low[part]
        if given.dtype == torch.bfloat16:  # its own high half
            high.copy_(given[part])
            rest.zero_()
        else:
            split(new(dtype=torch.float32).copy_(given[part]), high, rest)
        for home in homes:
            if home is not first:
                home[part].copy_(high)
