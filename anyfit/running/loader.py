"""The order of the data: the same for any machine, and exactly resumable.

An epoch's order is a permutation drawn from (seed, epoch). Epochs follow each other without a seam: only an incomplete batch at
the very end is dropped. Each rank gets its share of every batch. The position counts the batches that the user was given, and not
those that were prefetched. A batch's random numbers (augmentations, masking in collate_fn) are drawn from (seed, rank, position):
the same after a resume and for any number of workers, and different on every rank. Ranks of one tensor axis count as one, and get
the same share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from anyfit.placing.ranks import ALONE, Ranks
from anyfit.values.job import Job

from .randomness import own_generators, seeded

DECIDED = {  # options of DataLoader that are not taken, and why
    "batch_size": "it is Job(batch_size=)",
    "batch_sampler": "the order comes from Job(seed=), so that a checkpoint can go on in it",
    "sampler": "the order comes from Job(seed=), so that a checkpoint can go on in it",
    "shuffle": "",
    "drop_last": "only what makes no whole batch after the last epoch is left out",
    "generator": "a batch's random numbers come from Job(seed=), the rank and the batch's position",
    "in_order": "batches come in the order that a checkpoint goes on in",
}


@runtime_checkable
class Sized(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


class Loader:
    """Iterates over batches of `batch_size`; iterating again goes on after the last batch that was given out."""

    def __init__(
        self, dataset: Sized, batch_size: int, seed: int, epochs: int, shuffle: bool, ranks: Ranks = ALONE, **options: Any
    ) -> None:
        if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
            raise TypeError(
                f"run.loader takes a dataset with len() and indexing, got {type(dataset).__name__}; "
                "hand batches of your own loader to run.step instead"
            )
        if type(epochs) is not int or epochs < 1:
            raise ValueError(f"epochs must be a whole number from 1 up, got {epochs}")
        for name, why in DECIDED.items():
            if name in options:
                why = f": {why}" if why else ""
                raise TypeError(f"run.loader decides {name} itself{why}; it takes the other options of torch's DataLoader")
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._epochs, self._shuffle, self._options, self._rank = epochs, shuffle, options, ranks.replica
        share = batch_size // ranks.replicas
        self._rows = range(ranks.replica * share, (ranks.replica + 1) * share)  # of a batch, this rank's
        if len(self) == 0:
            raise ValueError(f"{len(dataset)} samples in {epochs} epochs do not make one batch of {batch_size}")
        self.position = 0  # batches that the user was given

    def __len__(self) -> int:
        return self._epochs * len(self._dataset) // self._batch_size

    def __iter__(self) -> Iterator[Any]:
        options = dict(self._options)
        made = _Made(self._dataset, options.pop("collate_fn", None) or default_collate, f"{self._seed} {self._rank}")
        # Of its own, or to go on in the middle would draw one random number more than not to have stopped.
        seeds = torch.Generator().manual_seed((self._seed * 1_000_003 + self._rank) % 2**63)
        options["worker_init_fn"] = functools.partial(_begin_worker, made, options.get("worker_init_fn"))
        inner: Iterator[Any] = iter(
            DataLoader(made, batch_sampler=self._batches(self.position), collate_fn=_as_it_is, generator=seeds, **options)  # type: ignore[arg-type]
        )
        for batch in inner:
            self.position += 1
            yield batch

    @property
    def order(self) -> dict[str, Any]:
        """What the order of the samples depends on besides the seed."""
        return {"samples": len(self._dataset), "shuffle": self._shuffle}

    @property
    def facts(self) -> dict[str, str]:
        """What all ranks must have alike for their shares to make up the batches."""
        return {
            "samples in run.loader's dataset": str(len(self._dataset)),
            "epochs of run.loader": str(self._epochs),
            "shuffle of run.loader": str(self._shuffle),
            "batches drawn from run.loader": str(self.position),
        }

    def _batches(self, start: int) -> Iterator[_Drawn]:
        size, per_epoch = self._batch_size, len(self._dataset)
        orders: dict[int, list[int]] = {}
        for index in range(start, len(self)):
            batch = _Drawn()
            batch.position = index
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


class Data:
    """The data of a run: its loader, where it has one, and where it stood in the checkpoint that the run goes on from."""

    def __init__(self, job: Job, ranks: Ranks) -> None:
        self._job, self._ranks = job, ranks
        self.loader: Loader | None = None
        self._position = 0  # of the checkpoint, in batches …
        self._order: dict[str, Any] | None = None  # … of this order; None where they were of no loader's

    def make_loader(self, dataset: Sized, epochs: int, shuffle: bool, options: dict[str, Any]) -> Loader:
        if self.loader is not None:
            raise RuntimeError("this run has a loader; one data order a run can be resumed")
        job = self._job
        self.loader = Loader(dataset, job.batch_size, job.seed, epochs, shuffle, self._ranks, **options)
        before, order = self._order, self.loader.order
        if self._position and before is not None and before != order:
            was, now = ("shuffled" if each["shuffle"] else "not shuffled" for each in (before, order))
            raise ValueError(
                f"the checkpoint stands at batch {self._position} of an order of {before['samples']} samples, and this dataset "
                f"has {order['samples']} ({was} then, {now} now): the order is another; give run.loader the same data, or "
                "draw batches from a loader of your own"
            )
        self.loader.position = self._position
        return self.loader

    def take_up(self, position: int, order: dict[str, Any] | None) -> None:
        self._position, self._order = position, order
        if self.loader is not None:
            self.loader.position = position

    @property
    def is_of_no_loader(self) -> bool:
        return self.loader is None and not self._position and self._order is None

    def to_json(self) -> dict[str, Any]:
        if self.loader is None:
            return {"loader_position": self._position, "loader_order": self._order}
        return {"loader_position": self.loader.position, "loader_order": self.loader.order}


class _Drawn(list[int]):
    """The samples of a rank's share of a batch."""

    position: int


class _Made:
    """Whole batches, each made with random numbers of its own: what a DataLoader indexes, here or in a worker."""

    def __init__(self, dataset: Sized, collate: Callable[[list[Any]], Any], key: str) -> None:
        self.dataset, self._collate, self._key = dataset, collate, key
        self._generators: list[Any] | None = None  # that the user's own code holds, in this process

    def __getitems__(self, drawn: _Drawn) -> Any:
        if self._generators is None:
            self._generators = own_generators(self.dataset, self._collate)
        with seeded(f"{self._key} {drawn.position}", self._generators):
            many = getattr(self.dataset, "__getitems__", None)
            return self._collate(many(list(drawn)) if many else [self.dataset[index] for index in drawn])

    def __len__(self) -> int:
        return len(self.dataset)


def _begin_worker(made: _Made, then: Callable[[int], Any] | None, worker: int) -> None:
    """The worker finds the user's own dataset where torch says, and then does what the user wants first."""
    object.__setattr__(get_worker_info(), "dataset", made.dataset)  # it is frozen
    if then is not None:
        then(worker)


def _as_it_is(batch: Any) -> Any:
    return batch
