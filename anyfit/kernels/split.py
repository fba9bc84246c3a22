"""Split masters: a bf16 weight and an int16 low half that together are an exact fp32 number; fp32 weights are their own.

With `bits` the fp32 pattern: high = (bits + 0x8000) >> 16, low = the signed low 16 bits, and bits = (high << 16) + low.
Ties round away from zero, unlike torch's cast: with ties-to-even the low half would need a 17th bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WRITTEN_AT_ONCE = 2**18  # elements: scratch is little, and stays in the cache


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
    scratch = torch.empty(min(WRITTEN_AT_ONCE, given.numel()), dtype=torch.float32, device=where)
    halves, lows = torch.empty_like(scratch, dtype=torch.bfloat16), torch.empty_like(scratch, dtype=torch.int16)
    for start in range(0, given.numel(), WRITTEN_AT_ONCE):
        part = slice(start, start + WRITTEN_AT_ONCE)
        exact, high, rest = (buffer[: len(given[part])] for buffer in (scratch, halves, lows))
        exact.copy_(given[part])
        split(exact, high, rest if low is None else low[part])
        for home in homes:
            home[part].copy_(high)
