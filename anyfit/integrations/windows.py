"""What one update of a Trainer is made of: the batches of its accumulation window, which a plan may cut into pieces.

With batches b of a window and pieces i of a batch, and L_b what the Trainer would go backward from, the loss of the update is

    L = sum of L_b             L_b = sum of s_i L_i

s_i is 1 where L_i is a sum that is divided by `num_items_in_batch`. Where the loss does not read that number it is a mean, and
s_i is the piece's share of its batch's labels, or of its rows (losses.py). anyfit is told (s_i L_i, w_i), with weights w_i that
add up to 1 on every rank: so nothing is divided but as the Trainer divides. Whether pieces add up at all, anyfit tries with
numbers before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # as a label, to transformers


@dataclass(frozen=True)
class Shares:
    """Of a batch, by what a mean may be over."""

    rows: float
    labels: float
    next_labels: float  # the first label of a row is of no token before it

    def of(self, whole: Shares) -> Shares:
        return Shares(
            self.rows / (whole.rows or 1), self.labels / (whole.labels or 1), self.next_labels / (whole.next_labels or 1)
        )


@dataclass(frozen=True, eq=False)
class Piece:
    """A batch of the window, or some of its rows."""

    inputs: Mapping[str, Any]
    items: Tensor | None  # `num_items_in_batch`, of the whole window over all ranks
    batches: int  # of the window
    shares: Shares | None = None  # of its batch, where it is a part of one
    weight: float = 1.0  # of the window's rows

    @property
    def rows(self) -> int:
        return rows_of(self.inputs) or 1


Window = Sequence[Piece]


def weighted(window: Window, total: float = 1.0) -> list[Piece]:
    """The pieces, weighted by their rows. Sums of the weights, made one by one in fp32, end at the total exactly."""
    rows, done = sum(piece.rows for piece in window), 0
    found, before = [], torch.zeros(())
    for piece in window:
        done += piece.rows
        after = torch.tensor(total * (done / rows))
        found.append(replace(piece, weight=float(after - before)))
        before = after
    return found


def cut(window: Window, sizes: Sequence[int]) -> list[list[Piece]]:
    """`Job(split=)`: every batch of a window in pieces of so many rows. Batches are not put together: their lengths differ."""
    pieces = [part for piece in window for part in pieces_of(piece, sizes[0])]
    if len(pieces) != len(window):
        pieces = weighted(pieces, sum(piece.weight for piece in window))
    parts, last = pieces[: len(sizes) - 1], pieces[len(sizes) - 1 :]
    return [*([piece] for piece in parts), *([last] if last else [])]


def pieces_of(piece: Piece, rows: int) -> list[Piece]:
    count = rows_of(piece.inputs)
    if count is None or count <= rows:
        return [piece]
    parts = [sliced(piece.inputs, start, start + rows) for start in range(0, count, rows)]
    whole = counted_in(piece.inputs)
    before = piece.shares or Shares(1.0, 1.0, 1.0)
    shares = [counted_in(part).of(whole) for part in parts]
    return [
        replace(
            piece,
            inputs=part,
            shares=Shares(before.rows * each.rows, before.labels * each.labels, before.next_labels * each.next_labels),
        )
        for part, each in zip(parts, shares, strict=True)
    ]


def counted_in(inputs: Mapping[str, Any]) -> Shares:
    rows = rows_of(inputs) or 1
    labels = inputs.get("shift_labels", inputs.get("labels"))
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return Shares(rows, rows, rows)
    counts = labels != IGNORED
    return Shares(rows, int(counts.sum()), int(counts[..., 1:].sum()) if counts.dim() > 1 else rows)


def rows_of(inputs: Mapping[str, Any]) -> int | None:
    """Rows of a batch that can be cut by rows; None for one that cannot, as packed sequences with their boundaries."""
    counts = set()
    for value in inputs.values():
        if isinstance(value, Tensor) and value.dim():
            counts.add(value.size(0))
        elif isinstance(value, list | tuple):
            counts.add(len(value))
        elif not isinstance(value, Tensor | str | int | float | None):
            return None
    return counts.pop() if len(counts) == 1 else None


def sliced(inputs: Mapping[str, Any], start: int, end: int) -> dict[str, Any]:
    """Some rows of a batch that can be cut."""

    def is_by_row(value: Any) -> bool:
        return isinstance(value, list | tuple) or (isinstance(value, Tensor) and value.dim() > 0)

    return {name: value[start:end] if is_by_row(value) else value for name, value in inputs.items()}
