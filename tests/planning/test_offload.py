"""Model state that does not fit: plans keep any limit, forecast their peak to the byte, and train as plain PyTorch does."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import anyfit
from anyfit import NoPlan
from anyfit.demo import GPT
from anyfit.planning import search
from anyfit.planning.candidate import Candidate
from anyfit.planning.footprint import footprint_of
from anyfit.planning.local_search import fullest
from anyfit.values.calibration import Calibration
from anyfit.values.plan import Placement
from tests.conftest import FULL
from tests.machines import small_machine
from tests.models import Tangled, byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly

ROWS = 8
MODELS: dict[str, Any] = {"gpt": tiny_gpt, "tangled": lambda: Tangled(64)}


OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "without state": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "factored": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-3),
}


def job_for(model: str, precision: Any, optimizer: str = "adamw") -> anyfit.Job:
    return anyfit.Job(
        model=MODELS[model],
        loss=next_byte_loss,
        optimizer=OPTIMIZERS[optimizer],
        sample=byte_batches(1, ROWS)[0],
        batch_size=ROWS,
        precision=precision,
        clip_norm=1.0,
    )


@given(
    model=st.sampled_from(sorted(MODELS)),
    precision=st.sampled_from(["fp32", "bf16"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    share=st.floats(0.05, 1.0),
)
def test_a_plan_under_any_limit_keeps_it_and_forecasts_its_peak(model: str, precision: Any, optimizer: str, share: float) -> None:
    machine, job = small_machine(), job_for(model, precision, optimizer)
    whole = anyfit.plan(job, machine).forecast.needed_bytes
    limit = int(share * whole)
    try:
        plan = anyfit.plan(job, machine.with_limits(device_memory=limit))
    except NoPlan as verdict:
        limit += verdict.shortfall_bytes  # fits, to the byte
        plan = anyfit.plan(job, machine.with_limits(device_memory=limit))
    batches = byte_batches(3, ROWS)
    with anyfit.start(job, plan, machine.with_limits(device_memory=limit)) as run:
        for batch in batches:
            run.step(batch)
        measured = run.metrics.peak_bytes
        weights = run.state_dict()
    assert measured["device"] <= limit
    forecast, error = plan.forecast.peak_bytes["device"], plan.forecast.peak_error
    assert measured["device"] <= (1 + error) * forecast
    # Less state leaves more of the rest's error, and what torch makes of it in the first step is that of the largest chunk.
    assert measured["device"] >= (1 - error if optimizer == "adamw" else 0.8) * forecast
    assert measured["host"] <= plan.forecast.peak_bytes["host"] + 4096 * 8 * len(plan.chunks or (1,))
    assert_bit_equal(weights, train_plainly(job, batches, plan.accumulation)[1])


BLOCKS = [f"blocks.{index}" for index in range(4)]
choices = st.sampled_from(["keep", "recompute", "selective", "offload", "offload"])


@settings(max_examples=20 if FULL else 6)
@given(
    activations=st.tuples(*(choices for _ in BLOCKS)), precision=st.sampled_from(["fp32", "bf16"]), accumulation=st.integers(1, 2)
)
def test_what_moved_activations_take_of_device_and_host_is_as_forecast(
    activations: Any, precision: Any, accumulation: int
) -> None:
    """With storages that are large enough to move, and a lane that is never late: what is on its way is on the device too."""
    batches = byte_batches(3, ROWS, length=129)
    job = replace(
        job_for("gpt", precision),
        model=lambda: GPT(width=128, layers=len(BLOCKS), heads=4, length=128),
        sample=batches[0],
        micro_batch=ROWS // accumulation,
    )
    machine = small_machine()
    plan, profile = anyfit.plan(job, machine), anyfit.profile(job, machine)
    (each,) = profile.passes
    of_block = dict(zip(BLOCKS, activations, strict=True))
    placements = (Placement(),) * len(profile.chunks)
    candidate = Candidate(
        each, accumulation, tuple(of_block.get(block.name, "keep") for block in each.blocks), profile.chunks, placements, 0, 0
    )
    footprint = footprint_of(profile, candidate)
    plan = replace(
        plan,
        stages=(replace(plan.stages[0], activations=of_block),),
        chunk_bytes=profile.offload_chunk_bytes,
        chunks=placements,
    )
    with anyfit.start(job, plan, machine) as run:
        for batch in batches:
            run.step(batch)
        measured = run.metrics.peak_bytes
    assert measured["host"] == footprint.host_bytes
    assert (footprint.host_bytes > 0) == ("offload" in activations)
    error = Calibration.of("cpu").offload_peak_error.value
    assert measured["device"] == pytest.approx(footprint.device_bytes, rel=error)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("passes", [1, 2, 4])
def test_what_fits_stays_on_the_device_however_many_passes_are_wanted(precision: Any, passes: int) -> None:
    plan = anyfit.plan(replace(job_for("gpt", precision), micro_batch=ROWS // passes), small_machine())
    assert plan.accumulation == passes
    assert plan.chunks == ()
    assert set(plan.activations.values()) <= {"keep"}


@pytest.mark.full
def test_the_less_memory_the_less_stays_on_the_device() -> None:
    profile = anyfit.profile(job_for("gpt", "fp32"), small_machine())
    least = search(profile).forecast.needed_bytes
    resident: list[int] = []
    for percent in range(100, 5, -3 if FULL else -9):
        try:
            plan = search(replace(profile, device_limit_bytes=least * percent // 100))
        except NoPlan:
            break
        chunks = plan.chunks or (None,)
        kept = sum(each is None or each.optimizer == "device" for each in chunks) / len(chunks)
        resident.append(int(100 * kept))
    assert resident[0] == 100
    assert resident[-1] == 0


def test_a_host_too_small_for_the_rest_is_no_plan() -> None:
    machine, job = small_machine(), job_for("gpt", "fp32")
    tight = machine.with_limits(device_memory=anyfit.plan(job, machine).forecast.needed_bytes // 3)
    assert anyfit.plan(job, tight).chunks
    with pytest.raises(NoPlan, match="host memory"):
        anyfit.plan(job, tight.with_limits(host_memory=4096))


@given(
    steps=st.lists(st.integers(0, 50) | st.just(7), max_size=60),
    first=st.integers(-500, 10),
)
def test_the_fullest_is_the_last_that_is_not_too_large(steps: list[int], first: int) -> None:
    excess = list(accumulate(steps, initial=first))
    expected = max((index for index, each in enumerate(excess) if each <= 0), default=0)
    assert fullest(len(steps), excess.__getitem__) == expected


@pytest.mark.parametrize("fitting", [1, 5, 700, 999])
def test_of_what_grows_evenly_the_fullest_is_found_at_once(fitting: int) -> None:
    asked: list[int] = []

    def excess(count: int) -> int:
        asked.append(count)
        return 1000 * (count - fitting) - 300

    assert fullest(1000, excess) == fitting
    assert len(asked) <= 4
