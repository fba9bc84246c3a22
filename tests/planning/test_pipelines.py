"""Plans with a pipeline axis: where the stages are cut, what each holds, and what a step takes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import anyfit
from anyfit import Machine, NoPlan, Plan
from anyfit.asking import Question
from anyfit.forcing import beside, forced_plan, planned
from anyfit.meshing import Axes
from anyfit.pipelining import sends_of
from anyfit.planning.stage_cuts import calls_of
from anyfit.planning.staged_plans import pipelined
from anyfit.profiling import staged
from anyfit.targets import job_for
from anyfit.values.called import CalledBlocks, Elements, Pipeline
from anyfit.values.cuts import Cut
from anyfit.values.forced import Forced
from anyfit.values.profile import Profile
from anyfit.values.schedule import in_flight, table
from anyfit.values.units import show_seconds
from tests.machines import on_slower_links

NODE = Machine.load("h100-node")
BLOCKS = 12


@cache
def job() -> anyfit.Job:
    return job_for("gpt2-small", batch=32, seq=512)


@cache
def base(stages: int = 4) -> tuple[Profile, Pipeline]:
    (choice,) = staged(job(), NODE, (8, 1), Axes(pipeline=stages))
    assert choice.pipeline is not None
    return choice.make(), choice.pipeline()


def alike(profile: Profile) -> Profile:
    """All blocks take a millisecond a sample forward and twice that backward, and nothing else takes any time or slows them."""

    def changed(each: Any) -> Any:
        of = [(each.blocks[segment.block].name, segment.phase) for segment in each.segments]
        seconds = {"forward": 1e-3 * each.micro_batch, "backward": 2e-3 * each.micro_batch}
        pairs = zip(each.segments, of, strict=True)
        return replace(
            each, segments=tuple(replace(one, seconds=bool(at[0]) * seconds[at[1]] / of.count(at)) for one, at in pairs)
        )

    update = replace(profile.update, seconds=0.0)
    adding = 1e30  # bytes a second, of gradients that add up
    passes, fitted = tuple(map(changed, profile.passes)), profile.calibration
    fitted = replace(fitted, overlap_slowdown=replace(fitted.overlap_slowdown, value=1.0))
    alone = {"divisions": (), "memory_bytes_per_second": adding, "calibration": fitted}
    return replace(profile, passes=passes, update=update, **alone)


def test_stages_have_all_blocks_in_order_and_a_rank_as_many_stages() -> None:
    plan = anyfit.plan(job(), NODE, mesh={"pipeline": 4})
    assert (plan.mesh["data"], plan.mesh["pipeline"], plan.ranks) == (2, 4, 8)
    assert len(plan.stages) % 4 == 0
    assert [stage.first_block for stage in plan.stages[1:]] == [stage.last_block + 1 for stage in plan.stages[:-1]]
    assert (plan.stages[0].first_block, plan.stages[-1].last_block) == (0, BLOCKS - 1)
    assert plan.accumulation * plan.micro_batch == plan.share == 16
    assert sum(plan.forecast.split_seconds.values()) == pytest.approx(plan.forecast.step_seconds)
    assert Plan.from_json(plan.to_json()) == plan


def test_of_equal_blocks_a_step_takes_what_the_closed_formula_says() -> None:
    """m micro-batches through p ranks of v stages: m + (p - 1) / v times what one takes of a rank. The most micro-batches are
    best, as nothing is sent."""
    profile, pipeline = base()
    profile = alike(replace(profile, batch_size=16))
    longest = pipelined(profile, replace(pipeline, ranks=BLOCKS, sends=()))
    assert (longest.accumulation, len(longest.stages)) == (16, BLOCKS)
    assert longest.forecast.step_seconds == pytest.approx(3e-3 * (16 + BLOCKS - 1))
    assert longest.forecast.split_seconds["pipeline bubble"] == pytest.approx(3e-3 * (BLOCKS - 1))
    interleaved = pipelined(profile, replace(pipeline, ranks=2, sends=()))
    of_a_rank = 3e-3 * BLOCKS / 2
    assert of_a_rank * (16 + 1 / 4) <= interleaved.forecast.step_seconds * (1 + 1e-9)
    assert interleaved.forecast.step_seconds <= of_a_rank * (16 + 1 / 2) * (1 + 1e-9)


def test_the_picture_of_a_pipeline_has_every_rank_and_block_and_lasts_as_long_as_the_step() -> None:
    for stages in (2, 4):
        plan = pipelined(*base(stages))
        assert plan.picture is not None
        assert list(plan.picture.lanes) == [f"rank {rank}" for rank in range(stages)]
        (end,) = {rows[-1][1] for rows in plan.picture.lanes.values()}
        assert plan.picture.lanes_are_of == "a step"
        assert end == pytest.approx(plan.forecast.step_seconds, rel=0.02)
        assert {each.path: each.activations for each in plan.picture.blocks} == {
            path: plan.activations.get(path, "keep") for path in base(stages)[1].called.paths
        }
        assert Plan.from_json(plan.to_json()) == plan


def test_a_large_head_leaves_its_stage_fewer_blocks() -> None:
    profile, pipeline = base()
    plan = pipelined(profile, replace(pipeline, sends=()))
    lengths = [stage.last_block - stage.first_block + 1 for stage in plan.stages]
    ranks = [sum(lengths[rank::4]) for rank in range(4)]
    assert ranks[3] <= min(ranks[:3])


def test_less_memory_recomputes_more_until_nothing_fits() -> None:
    profile, pipeline = base()
    roomy = pipelined(profile, pipeline)
    assert not roomy.activations
    needed = []
    for room in (4.0, 3.0, 2.5):
        plan = pipelined(replace(profile, device_limit_bytes=int(room * 2**30)), pipeline)
        assert plan.fits
        assert plan.forecast.step_seconds >= roomy.forecast.step_seconds
        needed.append(plan.forecast.needed_bytes)
    assert needed == sorted(needed, reverse=True)
    with pytest.raises(NoPlan, match="does not fit on 4 stages of a pipeline: a rank needs"):
        pipelined(replace(profile, device_limit_bytes=2**28), pipeline)


def with_room(gigabytes: float, slowness: float = 1.0) -> Plan | None:
    profile, pipeline = base(2)
    profile = replace(on_slower_links(profile, slowness), device_limit_bytes=int(gigabytes * 2**30))
    try:
        return pipelined(profile, pipeline)
    except NoPlan:
        return None


ROOMS = (1.5, 1.6, 1.7, 1.8, 1.9, 2.0, 2.1, 2.2, 2.4, 2.6, 3.0, 3.5, 4.5, 6.0, 10.0)


@pytest.mark.parametrize("slowness", [1.0, 30.0])
def test_more_memory_is_never_slower_and_less_holds_less_of_the_state(slowness: float) -> None:
    plans = [with_room(room, slowness) for room in ROOMS]
    fitting = [plan for plan in plans if plan is not None]
    assert plans[: -len(fitting)] == [None] * (len(plans) - len(fitting))  # what fits, fits in more
    seconds = [plan.forecast.step_seconds for plan in fitting]
    assert all(more <= less * (1 + 1e-3) for less, more in itertools.pairwise(seconds)), seconds
    assert all(plan.fits for plan in fitting)
    least, most = fitting[0].chunks[0], fitting[-1].chunks[0]
    assert (most.weight_shards, most.optimizer) == (1, "device")
    assert least.gradient_shards > 1


def test_state_on_the_host_is_streamed_where_that_alone_makes_room_and_counts_against_its_limit() -> None:
    (choice,) = staged(job_for("gpt2-xl", batch=32, seq=256), NODE.with_devices(4, 1), (4, 1), Axes(pipeline=4))
    assert choice.pipeline is not None
    profile, pipeline = choice.make(), choice.pipeline()
    small = replace(profile, device_limit_bytes=7 * 2**30)
    plan, roomy = (pipelined(replace(profile, device_limit_bytes=room * 2**30), pipeline) for room in (7, 12))
    assert [each.chunks[0].route for each in (plan, roomy)] == ["streamed", "resident"]
    held = max(pipeline.called.held(each.first_block, each.last_block).trained for each in plan.stages)
    assert plan.forecast.peak_bytes["host"] == pytest.approx(10 * held, rel=1e-2)  # low halves, and two moments in fp32
    assert plan.forecast.split_seconds["update"] > 10 * roomy.forecast.split_seconds["update"]
    assert plan.decision("model state").choice.startswith("low halves and moments on the host")
    with pytest.raises(NoPlan):
        pipelined(replace(small, host_limit_bytes=plan.forecast.peak_bytes["host"] // 2), pipeline)


def test_a_stage_holds_the_parameters_that_its_calls_use() -> None:
    sizes = {(0,): 5, (1,): 7, (2,): 11, (0, 2): 100}
    called = CalledBlocks(("a", "b", "c"), {users: Elements(whole=size) for users, size in sizes.items()})
    assert [called.held(*border).all for border in ((0, 0), (1, 1), (1, 2), (0, 2))] == [105, 7, 118, 123]
    assert [called.shared(*border) for border in ((0, 0), (1, 1), (1, 2), (0, 2))] == [100, 0, 100, 0]
    own = base()[1].called
    assert own.paths == tuple(f"transformer.h.{index}" for index in range(BLOCKS))
    assert own.elements[0, BLOCKS - 1].all == 50304 * 768  # the embedding, which is the head


def test_the_calls_of_a_pass_take_all_of_its_seconds() -> None:
    profile, pipeline = base()
    for each in profile.passes:
        calls = calls_of(each, pipeline.called)
        assert sum(call.forward + call.backward for call in calls) == pytest.approx(each.seconds)
        assert calls[-1].forward > calls[1].forward  # the head


# ---------------------------------------------------------------------- beside a tensor axis


@cache
def beside_a_tensor_axis() -> tuple[Profile, Pipeline]:
    (choice,) = staged(job(), NODE, (8, 1), Axes(tensor=2, pipeline=2, layout="megatron"))
    assert choice.pipeline is not None
    return choice.make(), choice.pipeline()


def test_a_rank_of_a_tensor_axis_holds_its_part_of_cut_parameters() -> None:
    """As many elements as the state that its profile has, in bf16."""
    profile, pipeline = beside_a_tensor_axis()
    held = pipeline.called.all
    assert (2 * held.all) == pytest.approx(profile.state.parameters, rel=1e-3)  # but for the padding of chunks
    assert held.whole + 2 * held.cut == profile.parameters
    inside = pipeline.called.elements[3,]
    assert inside.cut > 5 * 768**2  # of twelve, half of each
    assert inside.whole == 6 * 768  # norms, and what is added after sums


def test_stages_beside_a_tensor_axis_say_how_blocks_are_cut_and_who_is_where() -> None:
    profile, pipeline = beside_a_tensor_axis()
    plan = pipelined(profile, pipeline)
    assert plan.mesh == {"pipeline": 2, "data": 2, "sequence": 1, "tensor": 2}
    assert set(plan.cut) == {f"transformer.h.{index}" for index in range(BLOCKS)}
    assert plan.cut["transformer.h.0"].parameters["mlp.c_fc.weight"] == Cut(1)
    assert not plan.tables  # which stages do not divide
    assert plan.forecast.split_seconds["exposed communication"] > plan.accumulation * 1e-5
    assert plan.forecast.tokens_per_second == pytest.approx(32 * 512 / plan.forecast.step_seconds)
    assert 0.01 < plan.forecast.compute_share < 0.6
    assert Plan.from_json(plan.to_json()) == plan


def test_neighbours_send_through_the_network_where_they_are_on_other_nodes() -> None:
    two = NODE.with_devices(8, 2)
    (choice,) = staged(job(), two, (8, 2), Axes(tensor=2, pipeline=4, layout="megatron"))
    assert choice.pipeline is not None
    links, sends = sends_of(two, (8, 2), 4), choice.pipeline().sends
    inside, across, again, back = links
    assert inside == again
    assert across == back
    copies = [each.seconds_per_byte - link.seconds_per_byte for each, link in zip(sends, links, strict=True)]
    assert copies == pytest.approx([1 / two.copies.down_both.peak + 1 / two.copies.up_both.peak] * 4)
    assert across.seconds(2**24) > 2 * inside.seconds(2**24)


# ---------------------------------------------------------------------- what a user forces


def kept_to(forced: Forced, **axes: int) -> Plan:
    return forced_plan(job(), NODE, forced, Axes.of(axes, None))


@pytest.mark.parametrize(
    ("shard", "shards"), [("none", (1, 1, 1)), ("optimizer", (1, 1, 4)), ("gradients", (1, 4, 4)), ("all", (4, 4, 4))]
)
def test_what_stages_shard_can_be_forced(shard: Any, shards: tuple[int, int, int]) -> None:
    plan = kept_to(Forced(shard=shard, micro_batch=2), pipeline=2)
    (placement,) = plan.chunks
    assert (placement.weight_shards, placement.gradient_shards, placement.optimizer_shards) == shards
    assert (plan.slots > 0) == (shard == "all")
    assert Plan.from_json(plan.to_json()) == plan


def test_a_schedule_that_is_forced_is_taken() -> None:
    plan = kept_to(Forced(schedule="interleaved", chunks=2, micro_batch=2, activations="recompute", shard="none"), pipeline=2)
    assert (len(plan.stages), plan.micro_batch) == (4, 2)
    assert set(plan.activations.values()) == {"recompute"}
    assert len(plan.activations) == BLOCKS
    assert plan.chunks[0].optimizer_shards == 1
    assert plan.decision("schedule").why == plan.decision("ranks").why == "as asked for"
    assert len(kept_to(Forced(schedule="1f1b"), pipeline=2).stages) == 2


@pytest.mark.parametrize(
    ("shard", "shards"), [("none", (1, 1, 1)), ("optimizer", (1, 1, 4)), ("gradients", (1, 4, 4)), ("all", (4, 4, 4))]
)
def test_what_is_sharded_can_be_forced_without_stages(shard: Any, shards: tuple[int, int, int]) -> None:
    forced = Forced(shard=shard, shards=None if shard == "none" else 4, micro_batch=2, activations="selective")
    plan = kept_to(forced, tensor=1)
    placement = plan.chunks[0]
    assert (placement.weight_shards, placement.gradient_shards, placement.optimizer_shards) == shards
    assert (plan.micro_batch, len(plan.activations), set(plan.activations.values())) == (2, BLOCKS, {"selective"})


def test_one_device_recomputes_all_or_nothing_as_is_asked() -> None:
    for choice, count in (("keep", 0), ("recompute", BLOCKS)):
        plan = forced_plan(job(), Machine.load("h100"), Forced(activations=choice, micro_batch=16))  # type: ignore[arg-type]
        assert len(plan.activations) == count
        assert plan.micro_batch == 16


def test_a_forced_plan_says_what_the_planner_would_have_done() -> None:
    forced = Forced(activations="recompute")
    free, plan = anyfit.plan(job(), NODE), kept_to(forced, tensor=1)
    found = beside(plan, free, forced, Axes(tensor=1)).decision("forced")
    assert found.choice == "mesh tensor=1, activations all recomputed"
    assert found.why.startswith("the planner would have taken 8 data; ")
    later = plan.forecast.mean_step_seconds - free.forecast.mean_step_seconds
    assert later > 0
    assert f"{show_seconds(later)} less a step" in found.why


def test_a_forced_plan_is_made_where_the_planner_has_none_of_its_own() -> None:
    """One sample on sixteen ranks: stages share it with a tensor axis, and nothing that the planner looks for does."""
    question = Question("gpt2-small", {"batch": 1, "seq": 512}, lambda _: NODE, axes=Axes(tensor=8, pipeline=2))
    plan = planned(question, NODE.with_devices(8, 2), Forced(micro_batch=1))
    assert (plan.mesh["data"], plan.mesh["tensor"], plan.mesh["pipeline"]) == (1, 8, 2)
    why = plan.decision("forced").why
    assert why.startswith("the planner has no plan of its own: batch_size is 1; it must be a multiple of the 16 ranks")


@pytest.mark.parametrize(
    ("forced", "axes", "said"),
    [
        (Forced(schedule="1f1b"), {}, "schedule 1f1b: stages are along a pipeline axis; ask for one, --mesh pipeline=2"),
        (Forced(shard="all", chunks=2), {"pipeline": 2}, "sharded where each rank has one stage; chunks 1 does that"),
        (Forced(shard="all", shards=3), {"tensor": 1}, "shard all=3: of 8 ranks, it can be over 2"),
        (Forced(micro_batch=8), {"tensor": 1}, "micro-batch 8: a rank's share of the batch is 4; the nearest that works is 4"),
        (Forced(chunks=8), {"pipeline": 2}, "and a forward calls 12 blocks; chunks 6 is the most"),
        (Forced(chunks=2, micro_batch=4), {"pipeline": 3, "data": 1}, "8 ranks are there"),
    ],
)
def test_what_cannot_be_forced_is_refused_with_what_can(forced: Forced, axes: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kept_to(forced, **axes)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"schedule": "gpipe"}, "schedule 'gpipe' is not known"),
        ({"schedule": "1f1b", "chunks": 2}, "schedule 1f1b has one stage a rank, and 2 chunks are asked for; use interleaved"),
        ({"micro_batch": 0}, "micro-batch is 0; give a whole number from 1 up"),
        ({"shards": 8}, "shards is 8, and not said of what"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Forced(**fields)


def test_interleaved_stages_hold_more_micro_batches() -> None:
    assert in_flight(table(4, 4, 8), 4) == (4, 3, 2, 1)
    assert sum(in_flight(table(4, 8, 8), 8)[::4]) > 4


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ({"pipeline": 3}, "mesh pipeline=3: 8 ranks are there; the nearest that fits is data=4,pipeline=2"),
        ({"pipeline": 4, "data": 4}, "mesh data=4, pipeline=4: 8 ranks are there; the nearest that fits is data=2,pipeline=4"),
        (
            {"pipeline": 2, "tensor": 8},
            "mesh tensor=8, pipeline=2: 8 ranks are there; the nearest that fits is data=1,tensor=4,pipeline=2",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_what_can(mesh: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        anyfit.plan(job(), NODE, mesh=mesh)


def test_a_pipeline_of_one_rank_is_none_and_asks_for_nothing() -> None:
    assert not Axes(pipeline=1).is_asked
    assert Axes(pipeline=1).lengths((8, 1), 32) == Axes().lengths((8, 1), 32)


def test_a_pipeline_longer_than_the_calls_of_a_forward_is_refused() -> None:
    profile, pipeline = base()
    with pytest.raises(ValueError, match="a pipeline of 16 ranks, and a forward calls 12 blocks; use a shorter axis"):
        pipelined(profile, replace(pipeline, ranks=16))
