"""The ranks of a run: who they are, which stretch of a chunk each of them holds, and their collectives.

A chunk is sharded over ranks that follow each other (`shards` of them); the next so many are a replica. A gradient is
reduce-scattered over the shards, and then all-reduced over the replicas.

Collectives meet by their order, so each kind has groups of its own, and all of a kind are asked for by one thread: a lane,
which has no choice of order. What was asked for is written down, as a number that the ranks compare once a step: ranks whose
models went different ways stop before they update from it. Gloo ends a process that meets others with another size; there, ranks
say which chunk they are about to all-gather before they do.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from .lanes import Label, Task

Kind = Literal["gather", "reduce", "spread", "small"]
KINDS: tuple[Kind, ...] = ("gather", "reduce", "spread", "small")
HANG_SECONDS = 600.0  # a rank that waits longer for the others gives up

_dist: Any = dist
all_gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor  # as torch 2.13 calls it, and before
reduce_scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


class Ranks:
    """All ranks of the process group that is there, or this process alone."""

    def __init__(self, index: int = 0, count: int = 1, hang_seconds: float = HANG_SECONDS) -> None:
        self.index, self.count = index, count
        self._timeout = timedelta(seconds=hang_seconds)
        self._groups: dict[tuple[Kind, str, int], Any] = {}
        self._asked: dict[Kind, int] = dict.fromkeys(KINDS, 0)  # since the last comparison
        self.doing: dict[Kind, Label] = {}  # what is being waited for: for whoever tells of a hang

    @classmethod
    def of_process_group(cls, hang_seconds: float = HANG_SECONDS) -> Ranks:
        return cls(dist.get_rank(), dist.get_world_size(), hang_seconds) if dist.is_initialized() else cls()

    @property
    def are_several(self) -> bool:
        return self.count > 1

    def meet(self, shards: Iterable[int]) -> None:
        """Makes the groups that chunks in so many shards need. All ranks do it, in the same order."""
        if not self.are_several:
            return
        sizes = sorted({*shards, self.count})
        for kind in KINDS:
            for size in sizes:
                self._make(kind, "shard", size, [range(start, start + size) for start in range(0, self.count, size)])
                if size < self.count:
                    self._make(kind, "replica", size, [range(start, self.count, size) for start in range(size)])

    def _make(self, kind: Kind, how: str, size: int, groups: list[range]) -> None:
        if (kind, how, size) in self._groups or len(groups[0]) == 1:
            return
        for each in groups:
            made = dist.new_group(list(each), timeout=self._timeout)
            if self.index in each:
                self._groups[kind, how, size] = made

    def part_ways(self) -> None:
        """Gives the groups up."""
        while self._groups:
            dist.destroy_process_group(self._groups.popitem()[1])

    def part(self, shards: int) -> int:
        """Which of so many stretches is this rank's."""
        return self.index % shards

    def gather(self, kind: Kind, shards: int, whole: Tensor, own: Tensor, label: Label) -> None:
        """All-gathers the ranks' stretches into `whole`. `own` may lie in it."""
        self.doing[kind] = label
        all_gather(whole, own, group=self._groups[kind, "shard", shards])
        self.doing.pop(kind, None)

    def chosen(self, kind: Kind, shards: int, chunk: int) -> dict[int, int]:
        """By rank, which chunk each of those that shard this one is about to all-gather, where that has to be asked."""
        group = self._groups[kind, "shard", shards]
        if dist.get_backend(group) != "gloo":
            return {self.index: chunk}
        found, first = torch.empty(shards, dtype=torch.int64), self.index - self.part(shards)
        self.doing[kind] = Label(Task.GATHER, chunk)
        all_gather(found, torch.tensor([chunk]), group=group)
        return {first + index: each for index, each in enumerate(found.tolist())}

    def reduce(self, shards: int, whole: Tensor, own: Tensor, label: Label) -> None:
        """Into `own` the sum over all ranks of its stretch of `whole`, which is spoilt. `own` is `whole` where shards is 1."""
        self.doing["reduce"] = label
        if shards > 1:
            reduce_scatter(own, whole, group=self._groups["reduce", "shard", shards])
        if shards < self.count:
            group = self._groups["reduce", "shard" if shards == 1 else "replica", self.count if shards == 1 else shards]
            dist.all_reduce(own, group=group)
        self.doing.pop("reduce", None)

    def of_all(self, values: Tensor) -> Tensor:
        """A row of values from every rank."""
        found = values.new_empty((self.count, values.numel()))
        self.doing["small"] = Label(Task.NORMS)
        all_gather(found.view(-1), values, group=self._groups["small", "shard", self.count])
        self.doing.pop("small", None)
        return found

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's to all."""
        dist.broadcast(tensor, 0, group=self._groups["small", "shard", self.count])

    def objects(self, mine: Any) -> list[Any]:
        """Of every rank, one thing that pickles."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, mine, group=self._groups["small", "shard", self.count])
        return found

    def ask(self, kind: Kind, label: Label) -> None:
        """To be said by whoever gives a lane a collective, when it does."""
        self._asked[kind] = zlib.crc32(str(label).encode(), self._asked[kind])

    def asked(self) -> int:
        """A number for all that was asked for since it was last asked: the same on ranks that went the same way."""
        number = zlib.crc32(repr(sorted(self._asked.items())).encode())
        self._asked = dict.fromkeys(KINDS, 0)
        return number


ALONE = Ranks()
