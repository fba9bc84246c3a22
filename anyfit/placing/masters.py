"""Exact fp32 masters: how they are read, set and edited, wherever they lie.

A bf16 weight and an int16 low half together are an exact fp32 number (kernels/split.py). fp32 weights are their own masters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from anyfit.kernels.split import merge, split

WRITTEN_AT_ONCE = 2**18  # elements: scratch is little, and stays in the cache


@dataclass(frozen=True, eq=False)
class Masters:
    """One generation of them, flat or of one parameter."""

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
