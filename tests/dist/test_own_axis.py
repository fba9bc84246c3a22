"""A start that plans for itself may hold a model together over a tensor axis; the result is that of one process."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.oracle import assert_close

from . import own_axis
from .pool import pool_of


def assert_same(found: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    for each in found:
        assert each["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert_close({name: each["weights"][name] for name in wanted["weights"]}, wanted["weights"], 1e-5)


def test_a_batch_that_ranks_cannot_share_has_a_tensor_axis_unasked() -> None:
    found = pool_of(2).run(own_axis.by_loader, 7)
    assert found[0]["mesh"]["tensor"] == 2
    assert_same(found, own_axis.by_loader_plainly(7))


def test_a_mesh_that_is_asked_for_is_planned_and_divides_the_vocabulary() -> None:
    found = pool_of(2).run(own_axis.of_words, {"tensor": 2})
    assert found[0]["mesh"]["tensor"] == 2
    assert len(found[0]["tables"]) == 2
    assert_same(found, own_axis.of_words_plainly())


def test_one_long_sample_is_cut_along_its_length_with_heads_exchanged() -> None:
    found = pool_of(4).run(own_axis.of_long_samples)
    assert found[0]["mesh"]["tensor"] == 4
    assert found[0]["cuts"] == {("cut 1", "cut 1")}
    assert "Ulysses in 2 blocks" in found[0]["layout"]
    assert_same(found, own_axis.of_long_samples_plainly())


def test_parts_that_a_sampler_gives_each_rank_make_the_batch_of_their_axis() -> None:
    found, wanted = pool_of(2).run(own_axis.by_own_sampler), own_axis.by_own_sampler_plainly()
    assert_same(found, wanted)
    assert [each["evaluated"] for each in found] == pytest.approx([wanted["evaluated"]] * 2, rel=1e-5)
    assert "different batches" not in found[0]["said"]


def test_parts_of_other_lengths_are_refused_with_what_to_do() -> None:
    said = pool_of(2).run(own_axis.of_unlike_lengths)
    assert all(
        "a tensor of shape (2, 10) and a tensor of shape (2, 8) do not make one; pad them to one length" in each for each in said
    )


def test_blocks_that_cannot_be_cut_are_named_where_ranks_can_share_the_batch_in_no_other_way() -> None:
    (said, other) = pool_of(2).run(own_axis.uncut)
    assert "has a hook on its gradient" in said["error"]
    assert other == said


MESHES = [{"pipeline": 2}, {"tensor": 2, "pipeline": 2}, pytest.param({"data": 2, "pipeline": 2}, marks=pytest.mark.full)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_stages_that_the_planner_cut_train_as_one_process(mesh: dict[str, int]) -> None:
    found, wanted = pool_of(math.prod(mesh.values())).run(own_axis.staged, mesh), own_axis.staged_plainly()
    assert {name: found[0]["mesh"][name] for name in mesh} == mesh
    assert found[0]["mesh"]["pipeline"] == 2
    assert found[0]["stages"] >= 2
    assert_same(found, wanted)
    assert found[0]["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)


def test_a_loss_that_mixes_samples_is_refused_before_a_pipeline_trains() -> None:
    said = pool_of(2).run(own_axis.of_a_loss_that_mixes_samples)
    assert all("it is not made of those of micro-batches" in each for each in said), said


# ---------------------------------------------------------------------- stages that nobody asked for


def test_ranks_that_wait_long_for_each_other_have_stages_unasked() -> None:
    found, wanted = pool_of(2).run(own_axis.unasked, "plain"), own_axis.unasked_plainly("plain")
    assert found[0]["mesh"]["pipeline"] == 2
    assert_same(found, wanted)
    assert found[0]["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)


@pytest.mark.parametrize(("model", "why"), [("unlike", "it cannot be evaluated in stages"), ("compiled", "is compiled, and a")])
def test_a_model_that_cannot_be_placed_in_stages_trains_without_and_says_why(model: str, why: str) -> None:
    found, wanted = pool_of(2).run(own_axis.unasked, model), own_axis.unasked_plainly(model)
    assert found[0]["mesh"]["pipeline"] == 1
    assert "planning without a pipeline axis: " in found[0]["said"]
    assert why in found[0]["said"]
    assert_same(found, wanted)
    assert found[0]["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)


def test_blocks_of_a_stage_are_run_a_second_time_before_any_is_recomputed() -> None:
    said = pool_of(2).run(own_axis.of_blocks_that_differ, own_axis.plan_of_blocks_that_differ())
    for each in said:
        assert "the plan recomputes blocks." in each
        assert "its output differs when it is run again" in each
