"""Random plans with state on the disk: their losses and weights are those of the host tier, and of plain PyTorch, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import anyfit
from anyfit.values.plan import Placement
from tests.conftest import FULL
from tests.models import Tangled, byte_batches, padded_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.placing.test_engine import OPTIMIZERS
from tests.placing.test_speculation import padded_batches
from tests.plans import chunk_count, hand_written, placed_of, random_delays, started
from tests.values.strategies import placements

ROWS, STEPS = 4, 10


def job_for(model: Any, **options: Any) -> anyfit.Job:
    return anyfit.Job(model=model, loss=padded_loss, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, **options)


def on_disk(placement: Placement) -> Placement:
    return placement if placement.optimizer == "device" else replace(placement, optimizer="disk")


def on_host(placement: Placement) -> Placement:
    return replace(placement, optimizer="host") if placement.optimizer == "disk" else placement


@hypothesis.settings(max_examples=150 if FULL else 12, phases=[hypothesis.Phase.reuse, hypothesis.Phase.generate])
@given(data=st.data())
def test_the_disk_gives_the_bits_of_the_host_tier(data: st.DataObject) -> None:
    """With tied weights, parameter groups, clipping, accumulation, padding and steps that are left out."""
    draw = data.draw
    optimizer, accumulation = (
        draw(st.sampled_from(sorted(OPTIMIZERS)), "optimizer"),
        draw(st.sampled_from([1, 2]), "accumulation"),
    )
    precision: Any = draw(st.sampled_from(["fp32", "bf16"]), "precision")
    clip_norm = draw(st.sampled_from([None, 0.3, 1.0, 1e6]), "clip_norm")
    if optimizer == "some" and precision == "bf16" and accumulation > 1:
        clip_norm = None  # as in test_engine
    job = job_for(
        draw(st.sampled_from([tiny_gpt, Tangled]), "model"),
        optimizer=OPTIMIZERS[optimizer],
        precision=precision,
        clip_norm=clip_norm,
    )
    left_out, batches = draw(st.sets(st.integers(0, STEPS - 1), max_size=3), "left out"), padded_batches(STEPS)
    chunk_bytes = draw(st.sampled_from([1, 2048, 8192, 2**26]), "chunk_bytes")
    count = chunk_count(job, chunk_bytes)
    chosen = draw(st.one_of(st.tuples(placements()), st.tuples(*[placements()] * count)), "chunks")
    kept = {
        "chunk_bytes": chunk_bytes, "accumulation": accumulation, "prefetch": draw(st.integers(0, 4), "prefetch"),
        "slots": count + 8 if chunk_bytes < 2**20 else 8,
    }  # fmt: skip
    delays = draw(st.none() | st.integers(0, 99), "delays")
    always = draw(st.booleans(), "always speculates")
    found = [
        trained(job, hand_written(job, *map(tier, chosen), **kept), batches, delays, left_out, always)
        for tier in (on_disk, on_host)
    ]
    assert found[0][0] == found[1][0]
    assert_bit_equal(found[0][1], found[1][1])
    assert_bit_equal(
        found[0][1], train_plainly(job, [each for step, each in enumerate(batches) if step not in left_out], accumulation)[1]
    )


def trained(
    job: anyfit.Job, plan: anyfit.Plan, batches: list[Tensor], delays: int | None, left_out: set[int], always: bool
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights; a gradient of each step that is to be left out is not finite."""
    with started(job, plan, None if delays is None else random_delays(delays)) as run:
        if always:
            placed_of(run).updates.pace._most_clipped = 1.0  # however many steps clip
        poisoned = [each for name, each in run.model.named_parameters() if "unused" not in name and "frozen" not in name]
        losses = []
        for step, batch in enumerate(batches):
            hook = (
                poisoned[step % len(poisoned)].register_hook(lambda gradient: gradient * float("nan"))
                if step in left_out
                else None
            )
            losses.append(float(run.step(batch)))
            if hook is not None:
                hook.remove()
        assert run.skipped == len(left_out)
        return losses, run.state_dict()


@pytest.mark.parametrize("speculates", [False, True])
def test_what_speculates_needs_room_for_a_second_generation_or_is_refused_with_its_bytes(speculates: bool) -> None:
    job = job_for(tiny_gpt, optimizer=OPTIMIZERS["adamw"], precision="bf16")
    placement = Placement(gradients="host", optimizer="disk", update="host")
    with started(job, hand_written(job, placement, chunk_bytes=8192)) as run:
        least = placed_of(run).disk_bytes
    plan = hand_written(job, replace(placement, speculates=speculates), chunk_bytes=8192, disk_bytes=least)
    if speculates:
        with pytest.raises(OSError, match=r"the plan's disk is .* for updates that speculate: with speculates=False it is"):
            started(job, plan)
    else:
        started(job, plan).close()
