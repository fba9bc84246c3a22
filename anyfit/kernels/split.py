"""Split masters: a bf16 weight and an int16 low half that together are an exact fp32 number.

With `bits` the fp32 pattern: high = (bits + 0x8000) >> 16, low = the signed low 16 bits, and bits = (high << 16) + low.
Ties round away from zero, unlike torch's cast: with ties-to-even the low half would need a 17th bit.
"""

from __future__ import annotations

import torch
from torch import Tensor


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
