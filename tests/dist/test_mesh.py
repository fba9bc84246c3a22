"""Collectives along the axes of a mesh, by real processes: a second axis makes groups of ranks that are no neighbours."""

from __future__ import annotations

import pytest
import torch

from anyfit.placing.lanes import Label, Task
from anyfit.placing.ranks import Ranks
from anyfit.values.mesh import Axis, Mesh, Sharding

from .pool import pool_of

ELEMENTS = 8


def sharding_of(mesh: Mesh, shards: int, *, is_cut: bool) -> Sharding:
    return Sharding.of_cut(mesh, shards) if is_cut else Sharding.over_data(mesh, shards)


def exchange(sizes: dict[Axis, int], shards: int, *, is_cut: bool) -> tuple[list[float], list[float], dict[int, int]]:
    """One rank's stretch of the summed gradients, all that is gathered of them, and which chunk each of its group chose."""
    ranks, mesh = Ranks.of_process_group(), Mesh.of(sizes)
    ranks.meet(mesh, [shards])
    try:
        sharding, label = sharding_of(mesh, shards, is_cut=is_cut), Label(Task.REDUCE, 0)
        gradient = torch.arange(ELEMENTS, dtype=torch.float32) * 10**ranks.index
        own = gradient if shards == 1 else torch.empty(ELEMENTS // shards)
        ranks.reduce(sharding, gradient, own, label)
        if shards == 1:
            return own.tolist(), own.tolist(), {}
        whole = torch.empty(ELEMENTS)
        ranks.gather("gather", sharding, whole, own, label)
        return own.tolist(), whole.tolist(), ranks.chosen("gather", sharding, 7)
    finally:
        ranks.part_ways()


@pytest.mark.parametrize("sizes", [{"data": 4}, {"data": 2, "tensor": 2}, {"tensor": 4}, {"pipeline": 2, "data": 2}])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("is_cut", [False, True])
def test_gradients_are_summed_along_the_data_axis_and_of_whole_parameters_along_the_tensor_axis_too(
    sizes: dict[Axis, int], shards: int, is_cut: bool
) -> None:
    mesh = Mesh.of(sizes)
    if sizes.get("data", 1) % shards:
        return
    for rank, (own, whole, chosen) in enumerate(pool_of(4).run(exchange, sizes, shards, is_cut=is_cut)):
        together = mesh.group(rank, ("data",) if is_cut else ("data", "tensor"))
        summed = [float(index * sum(10**other for other in together)) for index in range(ELEMENTS)]
        assert whole == summed
        sharding = sharding_of(mesh, shards, is_cut=is_cut)
        length, part = ELEMENTS // shards, sharding.part(rank)
        assert own == summed[part * length : (part + 1) * length]
        assert chosen == ({} if shards == 1 else dict.fromkeys(sharding.mesh.group(rank, ("shard",)), 7))
