"""Steps that clip: what was updated before the norm was known is redone, and what of it had not begun is not done at all."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import anyfit
from anyfit.placing.lanes import Ended, Label, Lane, Track
from anyfit.placing.updates.route import RECENT_STEPS, Pace
from anyfit.values.plan import Clipping, Placement
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import ALL_ON_DISK, AWAY, AWAY_STREAMED, ON_HOST, STREAMED, hand_written, placed_of, random_delays, started

ROWS = 4
ROUTES = {"host": ON_HOST, "away": AWAY, "streamed": STREAMED, "away and streamed": AWAY_STREAMED, **ALL_ON_DISK}


def job_for(clip_norm: float, **options: Any) -> anyfit.Job:
    options = {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), "precision": "bf16"} | options
    sample = byte_batches(1, ROWS)[0]
    return anyfit.Job(model=tiny_gpt, loss=next_byte_loss, sample=sample, batch_size=ROWS, clip_norm=clip_norm, **options)


def labels_of(run: anyfit.Run) -> Counter[str]:
    """By task, how often a lane of updates has begun one."""
    seen = Counter[str]()

    def mark(label: Label) -> Ended:
        seen[label.kind] += 1
        return lambda _times: None

    lanes = placed_of(run).lanes
    for track in (*lanes.host.tracks, *lanes.streamed.tracks):
        track.mark = mark
    return seen


def norms_of(job: anyfit.Job, batches: list[Any]) -> list[float]:
    found = []
    with started(job, hand_written(job)) as run:
        for batch in batches:
            run.step(batch)
            found.append(run.metrics.gradient_norm)
    return found


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adagrad])
def test_steps_that_clip_now_and_then_are_plain_pytorchs(route: str, optimizer: Any) -> None:
    batches = byte_batches(16, ROWS)
    own = {"optimizer": lambda model: optimizer(model.parameters(), lr=1e-3)}
    limit = sorted(norms_of(job_for(1e9, **own), batches))[len(batches) * 3 // 4]  # later norms are smaller than without
    job = job_for(limit, **own)
    for seed, accumulation in ((0, 1), (1, 2)):
        kept = {"chunk_bytes": 8192, "slots": 8, "accumulation": accumulation}
        plan = hand_written(job, replace(ROUTES[route], speculates=True), **kept)
        with started(job, plan, random_delays(seed)) as run:
            placed_of(run).updates.pace._most_clipped = 1.0  # it speculates on, however many clip
            for batch in batches:
                run.step(batch)
            assert 0 < run.metrics.clipped_share < 1
            assert_bit_equal(run.state_dict(), train_plainly(job, batches, accumulation)[1])


@pytest.mark.parametrize("route", ["host", "streamed"])
def test_what_had_not_begun_when_the_norm_clips_is_not_done(route: str) -> None:
    job, batches = job_for(1e-3), byte_batches(3, ROWS)
    plan = hand_written(job, replace(ROUTES[route], speculates=True), chunk_bytes=8192)
    with started(job, plan) as run:
        placed = placed_of(run)
        placed.updates.pace._most_clipped = 1.0
        run.step(batches[0])
        placed.residency.settle_all()
        seen = labels_of(run)
        lane = placed.lanes.host if route == "host" else placed.lanes.streamed
        gate, apply = threading.Event(), placed.updates.apply

        def opening(factor: float | None) -> None:
            """The lane begins nothing before the norm is known."""
            assert seen["speculate"] == 0
            apply(factor)
            gate.set()

        placed.updates.apply = opening  # type: ignore[method-assign]
        lane.run(lambda: gate.wait() and None, order=-1)
        run.step(batches[1])
        placed.residency.settle_all()
        assert seen["speculate"] == 0
        assert seen["update"] == len(placed.updates.chunks) > 3
        placed.updates.apply = apply  # type: ignore[method-assign]
        run.step(batches[2])
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])


def test_a_job_is_dropped_only_before_it_has_begun() -> None:
    lane, done, gate = Lane(None, Track("a test", None), depth=1), list[str](), threading.Event()
    try:
        begun = threading.Event()

        def first() -> None:
            begun.set()
            gate.wait()
            done.append("first")

        tickets = [lane.run(first), lane.run(lambda: done.append("second")), lane.run(lambda: done.append("third"))]
        begun.wait()
        tickets[0].drop()  # too late
        tickets[1].drop()
        never = lane.run(lambda: done.append("never"), after=[tickets[2]])
        never.drop()
        gate.set()
        for ticket in (*tickets, never):
            ticket.wait()
            assert ticket.is_over
        assert done == ["first", "third"]
    finally:
        gate.set()
        lane.close()


@pytest.mark.parametrize("clips", [True, False])
def test_the_host_redoes_in_one_phase_what_it_speculates_on_again(clips: bool) -> None:
    job, batches = job_for(1e-3), byte_batches(2, ROWS)
    with started(job, hand_written(job, replace(ON_HOST, speculates=True), chunk_bytes=8192)) as run:
        placed_of(run).updates.pace._most_clipped = 1.0 if clips else 0.0
        seen = labels_of(run)
        for batch in batches:
            run.step(batch)
        placed_of(run).residency.settle_all()
        assert bool(seen["finish"]) != clips


# ---------------------------------------------------------------------- what is expected of the next step


def test_a_run_that_clips_from_the_start_soon_waits_for_the_norm() -> None:
    pace = Pace()
    assert pace.may_speculate
    for _ in range(2):
        pace.note(clips=True, is_late=False)
    assert not pace.may_speculate
    for _ in range(RECENT_STEPS):
        pace.note(clips=False, is_late=False)
    assert pace.may_speculate


@pytest.mark.parametrize(
    ("share", "redone", "speculates"), [(0.5, 1.0, False), (0.5, 0.8, True), (0.1, 1.0, True), (0.9, 0.8, False)]
)
def test_the_first_step_is_what_the_plan_expects(share: float, redone: float, speculates: bool) -> None:
    job = job_for(1.0)
    plan = hand_written(job, replace(ON_HOST, speculates=True), chunk_bytes=8192)
    forecast = replace(plan.forecast, step_seconds=0.5, clipping=Clipping(0.7, redone, share))
    with started(job, replace(plan, forecast=forecast)) as run:
        assert placed_of(run).updates.pace.may_speculate == speculates
        seen = labels_of(run)
        run.step(byte_batches(1, ROWS)[0])
        placed_of(run).residency.settle_all()
        assert bool(seen["speculate"]) == speculates
    assert Placement() not in plan.chunks
