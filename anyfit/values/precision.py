"""How training keeps a parameter: the dtypes of its weight, the low half of its master, its gradient and its gradient sum.

weight     what the model computes with
low        beside a bf16 weight, the other 16 bits of its exact fp32 master; other weights are their own masters
gradient   as autograd makes it
sum        of gradients, over micro-batches and over ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

ELEMENT_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16,
    "uint8": 1, "int8": 1, "bool": 1, "int16": 2, "int32": 4, "int64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    weight: str
    low: str | None
    gradient: str
    sum: str

    @property
    def is_split(self) -> bool:
        """A master is two halves: the weight, and what is beside it."""
        return self.low is not None

    @property
    def low_bytes(self) -> int:
        return 0 if self.low is None else ELEMENT_BYTES[self.low]

    @property
    def adding_bytes(self) -> int:
        """Read and written to add one gradient to those of earlier micro-batches. A gradient of the sum's own dtype becomes the
        sum in the first of them."""
        return 2 * ELEMENT_BYTES[self.sum] + (0 if self.gradient == self.sum else ELEMENT_BYTES[self.gradient])


PRECISIONS = {  # that a Job can ask for, by name
    "bf16": Precision("bfloat16", "int16", "bfloat16", "float32"),
    "fp32": Precision("float32", None, "float32", "float32"),
}
SUM_BYTES = ELEMENT_BYTES["float32"]  # an element of gradients that add up over micro-batches or ranks, of any weights


@cache
def precision_of(dtype: str) -> Precision:
    """Of weights of this dtype, by its name in torch."""
    known = {each.weight: each for each in PRECISIONS.values()}
    return known.get(dtype) or Precision(dtype, None, dtype, dtype)
