"""What a user does with a run, done by several ranks together; and what becomes of them when they do not keep together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from anyfit.values.plan import Placement
from tests.models import next_byte_loss
from tests.oracle import assert_bit_equal, assert_close, train_plainly
from tests.plans import ON_DISK, placed_of

from .pool import Pool, pool_of
from .test_engine import only
from .work import Case, Trained, part_of, started, told, train

FEW = 6  # steps


def ways(shards: int) -> dict[str, Placement]:
    """The named points of the space: how model state is usually divided."""
    away = Placement(weights="host", gradients="host", optimizer="host", update="host")
    divided: dict[str, Any] = {"weight_shards": shards, "gradient_shards": shards, "optimizer_shards": shards}
    return {
        "whole": Placement(),
        "optimizer divided": Placement(optimizer_shards=shards),
        "gradients divided": Placement(gradient_shards=shards, optimizer_shards=shards),
        "all divided": Placement(**divided),
        "all divided, away": replace(away, **divided),
        "all divided, away, speculates": replace(away, **divided, speculates=True),
        "on the disk, speculates": replace(ON_DISK, speculates=True, gradient_shards=shards, optimizer_shards=shards),
        "streamed, speculates": Placement(optimizer="host", speculates=True, gradient_shards=shards, optimizer_shards=shards),
    }


WAYS = sorted(ways(2))


# ---------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("way", "ranks", "accumulation"), [(way, 2 + index % 2, 1 + index % 2) for index, way in enumerate(WAYS)]
)
def test_a_loss_of_sum_and_weight_is_divided_by_the_weight_of_all_ranks(way: str, ranks: int, accumulation: int) -> None:
    case = Case(optimizer="sgd", is_padded=True, clip_norm=0.5, placements=(ways(ranks)[way],), accumulation=accumulation)
    found = pool_of(ranks).run(train, case)
    losses, weights = train_plainly(case.job, case.batches())
    for each in found:
        assert each.losses == pytest.approx(losses, rel=1e-5)
    assert_close(found[0].weights, only(weights, found[0].weights), 1e-6)


def train_and_watch(case: Case) -> tuple[Trained, list[set[str]], float]:
    """Also the phases of chunks whenever the norm was known, and the share of recent steps that were not as speculated."""
    with started(case) as run:
        updates: Any = placed_of(run).updates
        apply, seen = updates.apply, list[set[str]]()

        def watched(factor: float | None) -> None:
            seen.append({chunk.update.phase.name for chunk in updates.chunks})
            apply(factor)

        updates.apply = watched
        losses = [float(run.step(part_of(batch, run.ranks.index, run.ranks.count))) for batch in case.batches(FEW)]
        return told(run, losses, [], 0), seen, updates.pace.clipped_share


@pytest.mark.parametrize("way", [way for way in WAYS if "speculates" in way])
@pytest.mark.parametrize(("ranks", "accumulation"), [(2, 1), (2, 3), (3, 2)])
def test_what_begins_before_the_norm_is_divided_by_the_weight_of_all_ranks(way: str, ranks: int, accumulation: int) -> None:
    case = Case(optimizer="sgd", is_padded=True, placements=(ways(ranks)[way],), accumulation=accumulation, delays=accumulation)
    found = pool_of(ranks).run(train_and_watch, case)
    losses, weights = train_plainly(case.job, case.batches(FEW))
    for each, phases, clipped_share in found:
        assert phases[1:] == [{"SPECULATED"}] * (FEW - 1)  # the first step makes the optimizer's state
        assert clipped_share == 0
        assert each.losses == pytest.approx(losses, rel=1e-5)
        assert_bit_equal(each.weights, found[0][0].weights)
    assert_close(found[0][0].weights, only(weights, found[0][0].weights), 1e-6)


def train_poisoned(case: Case, rank: int, at: int, name: str) -> Trained:
    """One rank's gradient of a parameter is not a number in one step."""
    with started(case) as run:
        poisoned = dict(run.model.named_parameters())[name]
        for index, batch in enumerate(case.batches(FEW)):
            is_bad = index == at and run.ranks.index == rank
            hook = poisoned.register_hook(lambda gradient: gradient * float("nan")) if is_bad else None
            run.step(part_of(batch, run.ranks.index, run.ranks.count))
            if hook is not None:
                hook.remove()
        return told(run, [], [], 0)


@pytest.mark.parametrize(("way", "at"), [(way, index % 5) for index, way in enumerate(WAYS)])
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_the_step_out_on_all(way: str, at: int) -> None:
    case = Case(model="tangled", placements=(ways(2)[way],), chunk_bytes=1, slots=16, delays=at)
    found = pool_of(2).run(train_poisoned, case, 1, at, "twice.bias")
    batches = case.batches(FEW)
    _, weights = train_plainly(case.job, [*batches[:at], *batches[at + 1 :]], 2)
    for each in found:
        assert each.skipped == 1
        assert_bit_equal(each.weights, only(weights, each.weights))


def train_apart(case: Case) -> Trained:
    """Rank 0 goes left in every step, and the others right."""
    with started(case) as run:
        for batch in case.batches(FEW):
            mine = part_of(batch, run.ranks.index, run.ranks.count).clone()
            mine[0, 0] = 1 if run.ranks.index == 0 else 2
            run.step(mine)
        return told(run, [], [], 0)


@pytest.mark.parametrize("way", ["whole", "optimizer divided", "gradients divided", "streamed, speculates"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_weight_that_one_rank_alone_uses_is_updated_on_all(way: str, precision: Any) -> None:
    case = Case(model="branching", precision=precision, placements=(ways(2)[way],), chunk_bytes=2048)
    found = pool_of(2).run(train_apart, case)
    batches = case.batches(FEW)
    for batch in batches:
        for rank in range(2):
            part_of(batch, rank, 2)[0, 0] = 1 if rank == 0 else 2
    _, weights = train_plainly(case.job, batches, 2)
    for each in found:
        assert_bit_equal(each.weights, only(weights, each.weights))


# ---------------------------------------------------------------------- loops, edits, evaluation


def train_in_a_loop(case: Case) -> Trained:
    with started(case) as run:
        losses, index, count = [], run.ranks.index, run.ranks.count
        for batch in case.batches(FEW):
            for part in part_of(batch, index, count).chunk(case.accumulation):
                run.backward(run.loss(part))
            run.update()
            losses.append(run.metrics.loss)
        return told(run, losses, [], 0)


def train_with_losses_of_ones_own(case: Case) -> Trained:
    with started(case) as run:
        losses, index, count = [], run.ranks.index, run.ranks.count
        for batch in case.batches(FEW):
            for part in part_of(batch, index, count).chunk(case.accumulation):
                with run.forward() as model:
                    loss = next_byte_loss(model, part)
                run.accept(loss, samples=len(part))
                run.backward(loss)
            run.update()
            losses.append(run.metrics.loss)
        return told(run, losses, [], 0)


@pytest.mark.parametrize(
    ("way", "loop"),
    [
        *((way, train_in_a_loop) for way in ("gradients divided", "all divided", "all divided, away, speculates")),
        ("all divided, away, speculates", train_with_losses_of_ones_own),
        *(
            pytest.param(way, train_with_losses_of_ones_own, marks=pytest.mark.full)
            for way in ("gradients divided", "all divided")
        ),
    ],
)
def test_a_loop_of_ones_own_is_the_same_as_steps(way: str, loop: Callable[[Case], Trained]) -> None:
    case = Case(placements=(ways(2)[way],), accumulation=3, clip_norm=0.5)
    pool = pool_of(2)
    looped, stepped = pool.run(loop, case), pool.run(train, case, FEW)
    for one, other in zip(looped, stepped, strict=True):
        assert one.losses == other.losses
        assert_bit_equal(one.weights, other.weights)


def train_and_edit(case: Case) -> tuple[float, Trained]:
    with started(case) as run:
        batches, index, count = case.batches(FEW), run.ranks.index, run.ranks.count
        for number, batch in enumerate(batches):
            if number == 3:
                with run.weights() as model, torch.no_grad():
                    edit(model)
            run.step(part_of(batch, index, count))
        return float(run.evaluate(part_of(batches[0], index, count))), told(run, [], [], 0)


def edit(model: Any) -> None:
    model.blocks[1].mix.weight.mul_(0.5)
    model.bytes.weight[3:5] = 0.25
    model.blocks[0].mix.bias.data = torch.full_like(model.blocks[0].mix.bias, 0.1)


@pytest.mark.parametrize("way", WAYS)
def test_edits_that_all_ranks_make_and_evaluations_are_those_of_one_process(way: str) -> None:
    case = Case(optimizer="sgd", placements=(ways(2)[way],))
    found = pool_of(2).run(train_and_edit, case)
    job, batches = case.job, case.batches(FEW)
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer = job.optimizer(model)
    for number, batch in enumerate(batches):
        if number == 3:
            with torch.no_grad():
                edit(model)
        loss: Any = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = dict(model.state_dict())
    wanted: Any = job.loss(model.eval(), batches[0])
    for evaluated, each in found:
        assert evaluated == pytest.approx(float(wanted.detach()), rel=1e-5)
        assert_close(each.weights, only(weights, each.weights), 1e-6)


# ---------------------------------------------------------------------- limits


def test_a_run_fits_a_device_of_exactly_its_peak() -> None:
    case = Case(placements=(ways(2)["all divided"],), slots=2, prefetch=1)
    peaks = [each.peak_bytes for each in pool_of(2).run(train, case, FEW)]
    again = pool_of(2).run(train, replace(case, device_bytes=max(peaks)), FEW)
    assert [each.peak_bytes for each in again] == peaks
    whole = pool_of(2).run(train, replace(case, placements=(Placement(),)), FEW)
    assert max(peaks) < min(each.peak_bytes for each in whole)


# ---------------------------------------------------------------------- ranks that part


def failing(case: Case) -> str:
    """What a pool of its own says of ranks that all fail."""
    pool = Pool(2)
    try:
        with pytest.raises(AssertionError) as raised:
            pool.run(train_apart, case)
    finally:
        pool.close()
    return str(raised.value)


@pytest.mark.parametrize("model", ["branching", "lopsided"])  # whose ways are of one size, and of different ones
def test_ranks_that_use_different_divided_weights_get_an_error_that_names_them(model: str) -> None:
    case = Case(model=model, placements=(ways(2)["all divided"],), chunk_bytes=1, slots=9)
    said = failing(case)
    for rank in range(2):
        assert f"rank {rank} needs the weights of chunk" in said
    assert "(left.weight)" in said
    assert "use a plan with weight_shards 1" in said


def test_an_optimizer_that_needs_whole_parameters_is_refused_where_they_are_divided() -> None:
    case = Case(optimizer="adafactor", placements=(ways(2)["optimizer divided"],))
    assert "use a plan with optimizer_shards 1" in failing(case)
