"""The phases of a chunk's update, as docs/architecture.md draws them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import anyfit
from anyfit.placing.chunks import UpdatePhase
from anyfit.placing.lanes import Ended, Label, Track
from anyfit.placing.updates.route import Integrity
from anyfit.values.plan import Placement
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.plans import ON_HOST, RESIDENT, STREAMED, hand_written, placed_of, started

ROWS, ONE_CHUNK = 4, 2**26


class Failing(torch.optim.SGD):
    """Raises at its next step, if it is to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if Failing.fails:
            Failing.fails = False
            raise ArithmeticError("the update broke")
        return super().step(closure)


def run_of(placement: Placement, optimizer: Any = torch.optim.AdamW, clip_norm: float = 1e9) -> anyfit.Run:
    job = anyfit.Job(
        model=tiny_gpt, loss=next_byte_loss, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, clip_norm=clip_norm,
        optimizer=lambda model: optimizer(model.parameters(), lr=1e-3), precision="bf16",
    )  # fmt: skip
    return started(job, hand_written(job, placement, chunk_bytes=ONE_CHUNK))


def phases(run: anyfit.Run) -> set[UpdatePhase]:
    return {chunk.update.phase for chunk in placed_of(run).updates.chunks}


@contextmanager
def held_before(track: Track, label: str) -> Iterator[None]:
    """The track does nothing whose label begins so until the end of this."""
    gate = threading.Event()

    def mark(what: Label) -> Ended:
        if str(what).startswith(label):
            gate.wait()
        return lambda _times: None

    track.mark = mark
    try:
        yield
    finally:
        gate.set()
        track.mark = None


def test_a_resident_chunk_is_settled_after_its_step() -> None:
    with run_of(RESIDENT) as run:
        assert phases(run) == {UpdatePhase.SETTLED}
        run.step(byte_batches(1, ROWS)[0])
        assert phases(run) == {UpdatePhase.SETTLED}


@pytest.mark.parametrize("placement", [ON_HOST, STREAMED])
def test_a_chunk_is_updating_until_its_weights_are_asked_for(placement: Placement) -> None:
    with run_of(placement) as run:
        lanes = placed_of(run).lanes
        with held_before((lanes.host if placement is ON_HOST else lanes.streamed).tracks[0], ""):
            run.step(byte_batches(1, ROWS)[0])
            assert phases(run) == {UpdatePhase.UPDATING}
        placed_of(run).residency.settle_all()
        assert phases(run) == {UpdatePhase.SETTLED}


def test_a_chunk_of_a_two_phase_update_is_finishing_while_its_moments_are_pending() -> None:
    with run_of(ON_HOST) as run:
        with held_before(placed_of(run).lanes.host.tracks[0], "finish"):
            run.step(byte_batches(1, ROWS)[0])
            placed_of(run).residency.settle_weights()
            assert phases(run) == {UpdatePhase.FINISHING}
        placed_of(run).residency.settle_all()
        assert phases(run) == {UpdatePhase.SETTLED}


@pytest.mark.parametrize("is_clipped", [False, True])
@pytest.mark.parametrize("update", ["host", "device"])
def test_a_chunk_is_speculated_on_before_the_norm_or_lifted_where_steps_clip(update: Any, is_clipped: bool) -> None:
    placement = Placement(gradients="host", optimizer="host", update=update, speculates=True)
    lifted = UpdatePhase.LIFTED if update == "device" else UpdatePhase.SETTLED
    with run_of(placement, clip_norm=1e-3 if is_clipped else 1e9) as run:
        updates: Any = placed_of(run).updates
        apply, seen = updates.apply, list[set[UpdatePhase]]()

        def watched(factor: float | None) -> None:
            seen.append(phases(run))
            apply(factor)

        updates.apply = watched
        for batch in byte_batches(10, ROWS):
            run.step(batch)
            placed_of(run).residency.settle_all()
        assert seen[0] == {UpdatePhase.SPECULATED}
        assert seen[-1] == {lifted if is_clipped else UpdatePhase.SPECULATED}
        assert phases(run) == {UpdatePhase.SETTLED}


def test_a_failed_update_is_started_again_by_whoever_asks_next() -> None:
    batches = byte_batches(2, ROWS)
    with run_of(ON_HOST, Failing) as run:
        run.step(batches[0])
        placed_of(run).residency.settle_all()
        Failing.fails = True
        run.step(batches[1])
        with pytest.raises(ArithmeticError):
            placed_of(run).residency.settle_all()
        assert phases(run) == {UpdatePhase.FAILED}
        placed_of(run).residency.settle_all()
        assert phases(run) == {UpdatePhase.SETTLED}


def test_a_failure_on_a_lane_is_kept_by_a_step_that_goes_well() -> None:
    integrity = Integrity()
    with integrity.stepping():
        pass
    integrity.check()
    with integrity.stepping():
        integrity.broken = "the moments of chunk 3 are half-way"
    with pytest.raises(RuntimeError, match="chunk 3"):
        integrity.check()


def test_a_step_that_is_broken_off_leaves_no_whole_state() -> None:
    integrity = Integrity()
    with pytest.raises(KeyboardInterrupt), integrity.stepping():
        raise KeyboardInterrupt
    with pytest.raises(RuntimeError, match="broken off half-way"):
        integrity.check()
