"""A mesh: groups along its axes, and the collectives of a chunk that is sharded on it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfit.values.mesh import AXES, Mesh, Sharding

meshes = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES}).map(Mesh.of)


@given(meshes, st.sets(st.sampled_from(AXES)))
def test_groups_along_axes_hold_every_rank_once_and_have_one_size(mesh: Mesh, chosen: set[str]) -> None:
    along = tuple(sorted(chosen))
    groups = mesh.groups(along)
    assert sorted(itertools.chain.from_iterable(groups)) == list(range(mesh.count))
    assert {len(each) for each in groups} == {mesh.size(along)}
    others = tuple(axis for axis in AXES if axis not in along)
    for one, other in itertools.product(groups, mesh.groups(others)):
        assert len(set(one) & set(other)) == 1  # a rank is where its groups along both meet


def test_neighbours_along_the_innermost_axis_are_neighbouring_ranks_and_others_are_not() -> None:
    mesh = Mesh.of({"data": 2, "tensor": 4})
    assert mesh.groups(("tensor",)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups(("data",)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.split("data", 1).groups(("replica",)) == mesh.groups(("data",))


@given(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), st.data())
def test_shards_of_the_data_axis_are_neighbours_and_replicas_hold_the_same_stretch(ranks: int, data: st.DataObject) -> None:
    shards = data.draw(st.sampled_from([each for each in range(1, ranks + 1) if ranks % each == 0]))
    sharding = Sharding.over_data(Mesh.of({"data": ranks}), shards)
    assert sharding.shards == shards
    assert [sharding.part(rank) for rank in range(ranks)] == [rank % shards for rank in range(ranks)]
    assert sharding.mesh.groups(sharding.scattered) == tuple(
        tuple(range(start, start + shards)) for start in range(0, ranks, shards)
    )
    assert sharding.mesh.groups(sharding.reduced) == tuple(tuple(range(start, ranks, shards)) for start in range(shards))


@given(meshes, st.data())
def test_a_norm_counts_every_stretch_once_whatever_it_is_sharded_along(mesh: Mesh, data: st.DataObject) -> None:
    sharded = tuple(sorted(data.draw(st.sets(st.sampled_from(AXES)))))
    sharding = Sharding(mesh, sharded, ("data",))
    squares = [float(sharding.part(rank) + 1) for rank in range(mesh.count)]  # one rank's, of the stretch that it holds
    once = sum(range(1, sharding.shards + 1))
    assert math.isclose(sum(squares) * sharding.norm_share, once)
    assert {*sharding.scattered} | {*sharding.reduced} == {"data"}


@given(meshes, st.data())
def test_what_several_stages_hold_counts_once_in_a_norm(mesh: Mesh, data: st.DataObject) -> None:
    stages = mesh.size(("pipeline",))
    holders = tuple(sorted(data.draw(st.sets(st.integers(0, stages - 1), min_size=1))))
    made = data.draw(st.sampled_from([Sharding.over_data, Sharding.of_cut]))
    sharding = made(mesh, 1, holders if len(holders) > 1 else ())
    held = [rank for rank in range(mesh.count) if rank * stages // mesh.count in holders]
    different = mesh.size(("tensor",)) if made == Sharding.of_cut else 1  # parts of it
    assert math.isclose(len(held) * sharding.norm_share, different)


def test_an_axis_that_shards_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="6 ranks along data cannot be seen as replicas of 4"):
        Mesh.of({"data": 6}).split("data", 4)
