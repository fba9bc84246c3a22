"""The ranks of a run: who they are, which stretch of a chunk each of them holds, and their collectives.

A chunk's `Sharding` on the mesh (values/mesh.py) says which ranks meet for it. Collectives meet by their order, so each kind has
groups of its own, and one thread asks for all of a kind: a lane, which has no choice of order. Once a step the ranks compare a
number for all that was asked for: ranks whose models went different ways stop before they update from it. Gloo ends a process
that meets others with another size; there, ranks say which chunk they are about to all-gather before they do.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from anyfit.layouts.axis import Axis
from anyfit.stages.wires import GroupWire
from anyfit.values.mesh import DATA, PIPELINE, TENSOR, Mesh, Sharding

from .lanes import Label, Task

Kind = Literal["gather", "reduce", "all_gather", "small", "tensor", "pipeline", "together", "held", "wire"]
KINDS: tuple[Kind, ...] = ("gather", "reduce", "all_gather", "small")  # those of chunks
HANG_SECONDS = 600.0  # a rank that waits longer for the others gives up

_dist: Any = dist
all_gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor  # as torch 2.13 calls it, and before
reduce_scatter = getattr(_dist, "reduce_scatter_single", None) or _dist.reduce_scatter_tensor


class Ranks:
    """All ranks of the process group that is there, or this process alone."""

    def __init__(self, index: int = 0, count: int = 1, hang_seconds: float = HANG_SECONDS) -> None:
        self.index, self.mesh = index, Mesh.of({"data": count})
        self._timeout = timedelta(seconds=hang_seconds)
        self._groups: dict[tuple[Kind, tuple[int, ...]], Any] = {}  # by the ranks that are in it
        self._asked: dict[Kind, int] = dict.fromkeys(KINDS, 0)  # since the last comparison
        self.doing: dict[Kind, Label] = {}  # what is being waited for: for whoever tells of a hang

    @classmethod
    def of_process_group(cls, hang_seconds: float = HANG_SECONDS) -> Ranks:
        return cls(dist.get_rank(), dist.get_world_size(), hang_seconds) if dist.is_initialized() else cls()

    @property
    def count(self) -> int:
        return self.mesh.count

    @property
    def are_several(self) -> bool:
        return self.count > 1

    def meet(self, mesh: Mesh, shards: Iterable[int], shared: Iterable[tuple[int, ...]] = ()) -> None:
        """Takes a plan's mesh; makes the groups that so many shards need, and one of all. All ranks call it in one order.
        `shared`: places of the pipeline that hold parameters together."""
        if not self.are_several:
            return
        self.mesh = mesh
        wanted = {tuple(range(self.count)): None}
        ways = (Sharding.over_data, Sharding.of_cut) if self.tensor > 1 else (Sharding.over_data,)
        for each in (way(mesh, size) for size in sorted(set(shards)) for way in ways):
            for along in (each.sharded, each.scattered, each.reduced):
                wanted |= dict.fromkeys(each.mesh.groups(along))
        others: list[tuple[Kind, tuple[int, ...]]] = [("tensor", members) for members in mesh.groups((TENSOR,))]
        if self.pipeline > 1:
            others += [("together", members) for members in mesh.groups((PIPELINE, TENSOR))]
            for members in mesh.groups((PIPELINE,)):
                others += [("pipeline", members), ("wire", members)]
                others += [("held", tuple(members[place] for place in places)) for places in sorted(set(shared))]
        for kind, members in (*itertools.product(KINDS, wanted), *others):
            if len(members) > 1 and (kind, members) not in self._groups:
                backend = "gloo" if kind == "wire" else None
                made = dist.new_group(list(members), timeout=self._timeout, backend=backend)
                if self.index in members:
                    self._groups[kind, members] = made

    # ------------------------------------------------------------------ where this rank is

    @property
    def replica(self) -> int:
        """Along the data axis: ranks with the same see the same samples."""
        return self.mesh.group(self.index, (DATA,)).index(self.index)

    @property
    def replicas(self) -> int:
        return self.mesh.size((DATA,))

    @property
    def tensor(self) -> int:
        """How many ranks hold the model together, and see the same samples."""
        return self.mesh.size((TENSOR,))

    @property
    def axis(self) -> Axis:
        """Those that this one holds it with."""
        if self.tensor == 1:
            return Axis()
        members = self.mesh.group(self.index, (TENSOR,))
        return Axis(len(members), members.index(self.index), self._groups["tensor", members])

    @property
    def pipeline(self) -> int:
        """How many ranks hold the stages of the model, and see the same samples."""
        return self.mesh.size((PIPELINE,))

    @property
    def place(self) -> int:
        """Along the pipeline axis."""
        return self.mesh.group(self.index, (PIPELINE,)).index(self.index)

    @property
    def is_last_place(self) -> bool:
        """It has the model's last stage, and with it the loss."""
        return self.place == self.pipeline - 1

    @property
    def together(self) -> Axis:
        """Those that see the same samples as this one, along the tensor and the pipeline axis."""
        if self.pipeline == 1:
            return self.axis
        members = self.mesh.group(self.index, (PIPELINE, TENSOR))
        return Axis(len(members), members.index(self.index), self._groups["together", members])

    @property
    def same_stages(self) -> tuple[tuple[int, ...], ...]:
        """All ranks, those together that have the same stages."""
        return self.mesh.groups(tuple(name for name, _ in self.mesh.axes if name != PIPELINE))

    def wire(self) -> GroupWire:
        members = self.mesh.group(self.index, (PIPELINE,))
        return GroupWire(members, self._groups["wire", members])

    def from_place(self, tensor: Tensor, place: int) -> None:
        """That of one place of the pipeline, to all of them."""
        members = self.mesh.group(self.index, (PIPELINE,))
        dist.broadcast(tensor, members[place], group=self._groups["pipeline", members])

    def sum_held(self, tensor: Tensor, places: tuple[int, ...], label: Label) -> None:
        """Over the places of the pipeline that hold a parameter together."""
        self.doing["held"] = label
        members = self.mesh.group(self.index, (PIPELINE,))
        dist.all_reduce(tensor, group=self._groups["held", tuple(members[place] for place in places)])
        self.doing.pop("held", None)

    def _group(self, kind: Kind, sharding: Sharding, along: tuple[str, ...]) -> Any:
        return self._groups[kind, sharding.mesh.group(self.index, along)]

    def _all(self) -> Any:
        return self._groups["small", tuple(range(self.count))]

    def part_ways(self) -> None:
        """Gives the groups up."""
        while self._groups:
            dist.destroy_process_group(self._groups.popitem()[1])

    def gather(self, kind: Kind, sharding: Sharding, whole: Tensor, own: Tensor, label: Label) -> None:
        """All-gathers the ranks' stretches into `whole`. `own` may lie in it."""
        self.doing[kind] = label
        all_gather(whole, own, group=self._group(kind, sharding, sharding.sharded))
        self.doing.pop(kind, None)

    def chosen(self, kind: Kind, sharding: Sharding, chunk: int) -> dict[int, int]:
        """By rank, which chunk each of those that shard this one is about to all-gather, where that has to be asked."""
        group = self._group(kind, sharding, sharding.sharded)
        if dist.get_backend(group) != "gloo":
            return {self.index: chunk}
        found = torch.empty(sharding.shards, dtype=torch.int64)
        self.doing[kind] = Label(Task.GATHER, chunk)
        all_gather(found, torch.tensor([chunk]), group=group)
        return dict(zip(sharding.mesh.group(self.index, sharding.sharded), found.tolist(), strict=True))

    def reduce(self, sharding: Sharding, whole: Tensor, own: Tensor, label: Label) -> None:
        """Into `own` the sum over the ranks of its stretch of `whole`, which is spoilt. Unsharded, `own` is `whole`."""
        self.doing["reduce"] = label
        mesh = sharding.mesh
        if mesh.size(sharding.scattered) > 1:
            reduce_scatter(own, whole, group=self._group("reduce", sharding, sharding.scattered))
        if mesh.size(sharding.reduced) > 1:
            dist.all_reduce(own, group=self._group("reduce", sharding, sharding.reduced))
        self.doing.pop("reduce", None)

    def of_all(self, values: Tensor, kind: Kind = "small", task: Task = Task.NORMS) -> Tensor:
        """A row of values from every rank."""
        found = values.new_empty((self.count, values.numel()))
        self.doing[kind] = Label(task)
        all_gather(found.view(-1), values, group=self._groups[kind, tuple(range(self.count))])
        self.doing.pop(kind, None)
        return found

    def scale_of(self, weights: Tensor) -> float:
        """What turns sums of all ranks, each with its weight, into means: the same number whoever computes it."""
        whole = math.fsum(weights.tolist()) / self.tensor
        return 1.0 / whole if whole else math.nan

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's to all."""
        dist.broadcast(tensor, 0, group=self._all())

    def objects(self, mine: Any) -> list[Any]:
        """Of every rank, one thing that pickles."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, mine, group=self._all())
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
