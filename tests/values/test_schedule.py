"""Schedules of a pipeline, against those of torch and the closed formula of their bubble."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from anyfit.values.schedule import Action, Pass, Table, forward_only, in_flight, play, refuse, table

SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 8, 16, 24)))


def of_torch(kind: type[Any], ranks: int, chunks: int, micro_batches: int) -> Table:
    """What torch's schedule does, without the turns that it waits for others."""
    made = kind.__new__(kind)
    rounds = max(1, micro_batches // ranks)
    vars(made).update(
        _num_stages=ranks * chunks, pp_group_size=ranks, n_local_stages=chunks, _n_microbatches=micro_batches,
        number_of_rounds=rounds, microbatches_per_round=micro_batches // rounds,
    )  # fmt: skip
    if kind is schedules.Schedule1F1B:
        by_rank = made._get_pipeline_order()
    else:
        by_rank = {rank: made._calculate_single_rank_operations(rank) for rank in range(ranks)}
    names: dict[Any, Pass] = {schedules._ComputationType.FORWARD: "forward", schedules._ComputationType.FULL_BACKWARD: "backward"}
    return tuple(tuple(_numbered(rank, by_rank[rank], names)) for rank in range(ranks))


def _numbered(rank: int, actions: list[Any], names: dict[Any, Pass]) -> Iterator[Action]:
    """With micro-batches counted here: torch's table of 1F1B counts those of the last rank from one."""
    seen: Counter[tuple[Pass, int]] = Counter()
    for each in actions:
        if each is not None and each.computation_type in names:
            of, stage = names[each.computation_type], each.stage_index
            yield Action(rank, of, stage, seen[of, stage])
            seen[of, stage] += 1


@pytest.mark.parametrize(("ranks", "micro_batches"), [each for each in SIZES if each[1] >= each[0]])
def test_a_stage_a_rank_goes_as_torchs_1f1b_does(ranks: int, micro_batches: int) -> None:
    assert table(ranks, ranks, micro_batches) == of_torch(schedules.Schedule1F1B, ranks, 1, micro_batches)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
@pytest.mark.parametrize("chunks", [2, 3])
def test_more_stages_a_rank_go_as_torchs_interleaved_1f1b_does(ranks: int, chunks: int, micro_batches: int) -> None:
    if micro_batches % max(1, micro_batches // ranks):
        with pytest.raises(ValueError, match="rounds of equal length"):
            table(ranks, ranks * chunks, micro_batches)
        return
    found = table(ranks, ranks * chunks, micro_batches)
    assert found == of_torch(schedules.ScheduleInterleaved1F1B, ranks, chunks, micro_batches)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 32), st.floats(0.1, 3), st.floats(0.1, 3))
def test_even_stages_take_what_the_closed_formula_says(
    ranks: int, chunks: int, micro_batches: int, forward: float, backward: float
) -> None:
    if chunks > 1 and micro_batches % ranks:
        return  # a last round that is shorter has no such formula
    stages = ranks * chunks
    found = play(table(ranks, stages, micro_batches), [forward] * stages, [backward] * stages)
    assert found == pytest.approx((micro_batches * chunks + ranks - 1) * (forward + backward))


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 16), st.data())
def test_any_table_ends_and_makes_every_pass_once(ranks: int, chunks: int, micro_batches: int, data: st.DataObject) -> None:
    stages = ranks * chunks
    try:
        refuse(ranks, stages, micro_batches)
    except ValueError:
        return
    seconds = st.lists(st.floats(0.01, 5), min_size=stages, max_size=stages)
    found = table(ranks, stages, micro_batches)
    assert play(found, data.draw(seconds), data.draw(seconds), send=0.1) > 0
    made = sorted(each for actions in found for each in actions)
    assert made == sorted(
        Action(stage % ranks, of, stage, number)  # type: ignore[arg-type]
        for stage in range(stages)
        for number in range(micro_batches)
        for of in ("forward", "backward")
    )


def test_a_stage_holds_as_many_micro_batches_as_there_are_stages_from_it_on() -> None:
    assert in_flight(table(4, 4, 16), 4) == (4, 3, 2, 1)
    assert in_flight(table(4, 4, 2), 4) == (2, 2, 2, 1)


def test_an_evaluation_goes_forward_alone() -> None:
    found = forward_only(2, 4, 3)
    assert {each.of for actions in found for each in actions} == {"forward"}
    assert play(found, [1.0] * 4, [0.0] * 4) > 0


def test_ranks_that_wait_for_each_other_are_told() -> None:
    first = [Action(0, "backward", 0, 0), Action(0, "forward", 0, 0)]
    with pytest.raises(ValueError, match="no rank can go on: rank 0 waits to make"):
        play((tuple(first), ()), [1.0, 1.0], [1.0, 1.0])


@pytest.mark.parametrize("stages", [1, 3])
def test_ranks_have_as_many_stages_each(stages: int) -> None:
    with pytest.raises(ValueError, match=f"{stages} stages on 2 ranks of a pipeline: each rank has as many, so 2, 4"):
        table(2, stages, 4)
