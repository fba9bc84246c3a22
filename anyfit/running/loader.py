"""The order of the data: the same for any machine, and exactly resumable.

An epoch's order is a permutation drawn from (seed, epoch). Epochs follow each other without a seam, so that only what makes no
whole batch at the very end is left out. Each of several ranks gets its share of every batch, so that together they see what one
would. The position is the number of batches handed out; a batch that was
prefetched but not handed out does not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader

from anyfit.placing.ranks import ALONE, Ranks


@runtime_checkable
class Sized(Protocol):
    """A map-style dataset."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """Iterates over batches of `batch_size`; iterating again goes on where the last batch was handed out."""

    def __init__(
        self, dataset: Sized, batch_size: int, seed: int, epochs: int, shuffle: bool, ranks: Ranks = ALONE, **options: Any
    ) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(
                f"run.loader takes a dataset with len() and indexing, got {type(dataset).__name__}; "
                "hand batches of your own loader to run.step instead"
            )
        if epochs < 1:
            raise ValueError(f"epochs must be at least 1, got {epochs}")
        for name in ("batch_size", "batch_sampler", "sampler", "shuffle", "drop_last"):
            if name in options:
                raise TypeError(f"run.loader decides {name} itself; it takes the other options of torch's DataLoader")
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._epochs, self._shuffle, self._options = epochs, shuffle, options
        share = batch_size // ranks.count
        self._rows = range(ranks.index * share, (ranks.index + 1) * share)  # of a batch, this rank's
        if len(self) == 0:
            raise ValueError(f"{len(dataset)} samples in {epochs} epochs do not make one batch of {batch_size}")
        self.position = 0  # batches handed out

    def __len__(self) -> int:
        return self._epochs * len(self._dataset) // self._batch_size

    def __iter__(self) -> Iterator[Any]:
        # Of its own, or to go on in the middle would draw one random number more than not to have stopped.
        seeds = torch.Generator().manual_seed((self._seed * 1_000_003 + self.position) % 2**63)
        options = {"generator": seeds, **self._options}
        inner: Iterator[Any] = iter(DataLoader(self._dataset, batch_sampler=self._batches(self.position), **options))  # type: ignore[arg-type]
        for batch in inner:
            self.position += 1
            yield batch

    def _batches(self, start: int) -> Iterator[list[int]]:
        size, per_epoch = self._batch_size, len(self._dataset)
        orders: dict[int, list[int]] = {}
        for index in range(start, len(self)):
            batch = []
            for place in self._rows:
                epoch, row = divmod(index * size + place, per_epoch)
                if epoch not in orders:
                    orders = {epoch: self._order(epoch)}
                batch.append(orders[epoch][row])
            yield batch

    def _order(self, epoch: int) -> list[int]:
        if not self._shuffle:
            return list(range(len(self._dataset)))
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        order: list[int] = torch.randperm(len(self._dataset), generator=generator).tolist()
        return order
