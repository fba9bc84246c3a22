"""Tokens of a batch. A forecast goes by shapes, padding included; a run counts those that are no padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .nests import fields_of, is_tensor, named_tensors

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # as a label, to torch and transformers


def tokens_by_shape(batch: Any, rows: int) -> int:
    """Positions of the first integer tensor with a sequence dimension; without one, samples."""
    return next((tensor.numel() for _, tensor in named_tensors(batch) if _has_positions(tensor)), rows)


def real_tokens(batch: Any) -> Tensor | float:
    """Tokens that are no padding: those that an attention_mask lets through, or else those of each row up to its last label that
    counts. The number stays where the batch is, so that nobody waits for it. NaN where there are no tokens."""
    counts = list(_counts(batch))
    return sum(counts[1:], start=counts[0]) if counts else math.nan


def padding_share(batch: Any) -> float:
    """Of the positions of a batch; 0 where it has no tokens."""
    real, positions = float(real_tokens(batch)), tokens_by_shape(batch, 0)
    return 1 - real / positions if positions and math.isfinite(real) else 0.0


def _counts(value: Any) -> Iterator[Tensor | float]:
    if is_tensor(value):
        value = (value,) if _has_positions(value) else ()
    fields: dict[Any, Any] | None = fields_of(value)
    if fields is None:
        fields = dict(enumerate(value)) if isinstance(value, list | tuple) else {}
    mask, ids, labels = (fields.get(name) for name in ("attention_mask", "input_ids", "labels"))
    first: Any = next((each for each in fields.values() if _has_positions(each)), None)
    if mask is not None and _has_positions(mask):
        yield mask.count_nonzero()
    elif ids is not None and labels is not None and _has_positions(labels) and labels.shape == ids.shape:
        count = labels.ne(IGNORED).cumsum(1)  # the same from the last label on
        yield (count < count[:, -1:]).sum() + count[:, -1].count_nonzero()
    elif first is not None:
        yield float(first.numel())
    else:
        for each in fields.values():
            yield from _counts(each)


def _has_positions(value: Any) -> bool:
    return is_tensor(value) and not value.is_nested and value.dim() == 2 and not value.dtype.is_floating_point
