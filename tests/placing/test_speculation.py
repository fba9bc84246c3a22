"""Speculation where a step has several micro-batches: it begins in the last backward, when a chunk's sums are final."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit.placing.chunks import UpdatePhase
from anyfit.placing.lanes import Ended, Label
from anyfit.values.plan import Placement
from tests.conftest import FULL
from tests.models import Tangled, byte_batches, next_byte_loss, padded_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import ALL_ON_DISK, AWAY, AWAY_STREAMED, ON_HOST, STREAMED, hand_written, placed_of, random_delays, started

ROWS = 4
ROUTES = {
    "host": ON_HOST, "away": AWAY, "streamed": STREAMED, "away and streamed": AWAY_STREAMED,
    "streamed, gradients on the host": replace(STREAMED, gradients="host"), **ALL_ON_DISK,
}  # fmt: skip
PRECISIONS = ("bf16", "fp32")
CASES = list(product(ROUTES, PRECISIONS)) if FULL else [(route, PRECISIONS[index % 2]) for index, route in enumerate(ROUTES)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def job_for(model: Any = tiny_gpt, loss: Any = next_byte_loss, **options: Any) -> anyfit.Job:
    options = {"optimizer": adamw, "precision": "bf16", "clip_norm": 1e9} | options
    return anyfit.Job(model=model, loss=loss, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, **options)


def padded_batches(count: int) -> list[Tensor]:
    """Whose samples have very different numbers of bytes that count."""
    batches = byte_batches(count, ROWS)
    for batch in batches:
        for row, ids in enumerate(batch):
            ids[3 + 4 * row :] = 0
    return batches


def phases_at_the_norm(run: anyfit.Run) -> list[set[UpdatePhase]]:
    """A list that every step adds to: the phases of chunks when the norm is known."""
    updates: Any = placed_of(run).updates
    apply, seen = updates.apply, list[set[UpdatePhase]]()

    def watched(factor: float | None) -> None:
        seen.append({chunk.update.phase for chunk in updates.chunks})
        apply(factor)

    updates.apply = watched
    return seen


@pytest.mark.parametrize(("route", "precision"), CASES)
def test_it_begins_in_the_last_backward_and_not_before(route: str, precision: Any) -> None:
    job, passes, seen = job_for(precision=precision), 3, []
    plan = hand_written(job, replace(ROUTES[route], speculates=True), chunk_bytes=8192, slots=8, accumulation=passes + 1)
    begun = threading.Event()

    def mark(label: Label) -> Ended:
        if label.kind == "speculate":
            begun.set()
        return lambda _times: None

    def reached(_gradient: Tensor) -> None:
        """Backward has come to the first block: the gradients of those after it are final if it is the last."""
        seen.append(begun.wait(30 if len(seen) == passes else 0))

    with started(job, plan) as run:
        lanes = placed_of(run).lanes
        for track in (*lanes.host.tracks, *lanes.streamed.tracks):
            track.mark = mark
        run.model.blocks[0].register_forward_hook(lambda _module, _inputs, output: output.register_hook(reached) and None)
        run.step(byte_batches(1, ROWS)[0])
    assert seen == [False] * passes + [True]


@pytest.mark.parametrize(("route", "precision"), CASES)
def test_sums_that_a_weight_divides_are_speculated_on_with_the_weight_of_all_micro_batches(route: str, precision: Any) -> None:
    job, batches = job_for(loss=padded_loss, precision=precision), padded_batches(8)
    plan = hand_written(job, replace(ROUTES[route], speculates=True), chunk_bytes=8192, slots=8, accumulation=4)
    with started(job, plan, random_delays(1)) as run:
        seen = phases_at_the_norm(run)
        losses = [float(run.step(batch)) for batch in batches]
        assert placed_of(run).updates.pace.clipped_share == 0  # all of it was taken over
        weights = run.state_dict()
    assert {phase for phases in seen for phase in phases} == {UpdatePhase.SPECULATED}
    plain_losses, plain_weights = train_plainly(job, batches, 4)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)


def test_a_batch_of_no_weight_is_left_out_whatever_was_speculated_on() -> None:
    job, batches = job_for(loss=padded_loss), padded_batches(6)
    batches[2][:, 1:] = 0
    with started(job, hand_written(job, replace(AWAY, speculates=True), chunk_bytes=8192, slots=8, accumulation=2)) as run:
        for batch in batches:
            run.step(batch)
        assert run.skipped == 1
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, [*batches[:2], *batches[3:]], 2)[1])


@pytest.mark.parametrize("route", ROUTES)
def test_a_loop_of_ones_own_speculates_in_its_last_backward(route: str) -> None:
    job, batches = job_for(Tangled, clip_norm=None), byte_batches(5, ROWS)
    with started(job, hand_written(job, replace(ROUTES[route], speculates=True), chunk_bytes=1, slots=16, accumulation=2)) as run:
        seen = phases_at_the_norm(run)
        for batch in batches:
            for part in batch.chunk(2):
                run.backward(run.loss(part))
            run.update()
        weights = run.state_dict()
    assert all(UpdatePhase.SPECULATED in phases for phases in seen)
    assert_bit_equal(weights, train_plainly(job, batches, 2)[1])


class Ways(nn.Module):
    """Some of a chunk's layers are used by some samples alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Embedding(256, 256) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        if int(ids[0, 0]) % 2:
            x = x + self.second(ids)
        if int(ids[0, 1]) % 2:
            x = x + self.third(ids)
        return x


@pytest.mark.parametrize("placement", [Placement(optimizer="host"), AWAY, replace(STREAMED, gradients="host")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_only_some_micro_batches_use_is_updated_with_all_of_it(placement: Placement, precision: Any) -> None:
    job, batches = job_for(Ways, precision=precision), byte_batches(12, ROWS)
    plan = hand_written(job, replace(placement, speculates=True), chunk_bytes=2**20, slots=4, accumulation=4)
    with started(job, plan, random_delays(3)) as run:
        seen = phases_at_the_norm(run)
        for batch in batches:
            run.step(batch)
        weights = run.state_dict()
    assert {UpdatePhase.SPECULATED} in seen  # the last used all
    assert {UpdatePhase.SETTLED} in seen  # it did not, and nobody could know that no more would come
    assert_bit_equal(weights, train_plainly(job, batches, 4)[1])


def test_what_one_backward_made_is_not_taken_over_where_another_brings_a_weight() -> None:
    """A plan for one micro-batch, and a loop that goes in two parts: the second layer is used in the first part alone."""
    job, batches = job_for(Ways, loss=padded_loss, precision="fp32"), padded_batches(6)
    for batch in batches:
        batch[0, 0], batch[2, 0] = 1, 2
    with started(job, hand_written(job, replace(AWAY, speculates=True), chunk_bytes=1, slots=8)) as run:
        for batch in batches:
            for part in batch.chunk(2):
                run.backward(run.loss(part))
            run.update()
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches, 2)[1])
