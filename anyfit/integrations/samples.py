"""Batches to plan by, made by the Trainer's own loader from its own dataset: a usual one, and the largest there is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import Tensor

from .windows import IGNORED

MOST_LOOKED_AT = 4096  # samples of a dataset, spread over all of it
MOST_SECONDS = 4.0  # that looking may take, about


def samples_of(loader: Any, rows: int, device: torch.device) -> tuple[Mapping[str, Any], Mapping[str, Any] | None]:
    """A batch, and the largest of those to come where sizes vary. Of a dataset that can only be read in order, the first."""
    dataset, collate = loader.dataset, loader.collate_fn
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        return uneven(next(iter(loader))), None
    count = len(dataset)
    begun = time.perf_counter()
    dataset[0]
    seconds = time.perf_counter() - begun  # of a sample; images take milliseconds
    looked_at = range(0, count, -(-count // max(rows, min(MOST_LOOKED_AT, int(MOST_SECONDS / max(seconds, 1e-6))))))
    sizes = {index: size_of(dataset[index]) for index in looked_at}
    order = sorted(sizes, key=lambda index: -sizes[index])

    def batch(indices: list[int]) -> Any:
        made = collate([dataset[indices[position % len(indices)]] for position in range(rows)])
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in made.items()}

    usual = uneven(batch(list(looked_at)[:rows]))
    return usual, (batch(order[:rows]) if len(set(sizes.values())) > 1 else None)


def uneven(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Its first row with one label alone, where labels are ignored at all: so that a loss which is taken for a mean over rows,
    and is one over labels, is seen not to add up."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dim() != 2 or not (labels == IGNORED).any():
        return batch
    changed = labels.clone()
    counts = (changed[0] != IGNORED).nonzero()
    if len(counts) > 1:
        changed[0, : int(counts[-1])] = IGNORED
    return {**batch, "labels": changed}


def size_of(value: Any) -> int:
    """Numbers in a sample: tokens, pixels, labels."""
    if isinstance(value, Tensor):
        return value.numel()
    if hasattr(value, "size") and isinstance(value.size, int):  # an array
        return int(value.size)
    if isinstance(value, Mapping):
        return sum(map(size_of, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return sum(map(size_of, value))
    return len(value) if isinstance(value, list | tuple | str) else 1
