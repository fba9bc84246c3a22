"""Runs that are planned with optimizer state on the disk: the bits of plain PyTorch, in the memory that was forecast."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anyfit
from anyfit import Machine, NoPlan
from anyfit.demo import GPT
from anyfit.values.plan import Plan
from tests.conftest import FULL
from tests.machines import small_disk, small_machine
from tests.models import byte_batches, next_byte_loss
from tests.oracle import assert_bit_equal, train_plainly

ROWS, STEPS = 8, 40 if FULL else 15
BATCHES = byte_batches(STEPS, ROWS)
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


def job_for(precision: Any = "bf16", optimizer: str = "adamw", layers: int = 6, **more: Any) -> anyfit.Job:
    return anyfit.Job(
        model=lambda: GPT(width=64, layers=layers, heads=4, length=16),
        loss=next_byte_loss,
        optimizer=OPTIMIZERS[optimizer],
        sample=BATCHES[0],
        batch_size=ROWS,
        precision=precision,
        clip_norm=1.0,
        **more,
    )


def tight(job: anyfit.Job, device_share: float, host_share: float) -> Machine:
    """With a share of the memory that it takes with no limit, and of what it then takes of the host; and a disk."""
    machine = replace(small_machine(), disk=small_disk())
    machine = machine.with_limits(device_memory=int(device_share * anyfit.plan(job, machine).forecast.needed_bytes))
    host = anyfit.plan(job, machine).forecast.peak_bytes["host"]
    return machine.with_limits(host_memory=int(host_share * host), disk="1GiB")


def on_disk(plan: Plan) -> int:
    return sum(each.route == "disk" for each in plan.chunks)


CASES = [
    pytest.param({}, 0.5, 0.8, id="weights on the device", marks=pytest.mark.full),
    pytest.param({}, 0.3, 0.8, id="weights on the host"),
    pytest.param({"micro_batch": 2, "layers": 12}, 0.5, 0.9, id="four micro-batches"),
    pytest.param({"precision": "fp32"}, 0.5, 0.9, id="fp32", marks=pytest.mark.full),
    pytest.param({"optimizer": "momentum"}, 0.4, 0.95, id="another optimizer", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("more", "device_share", "host_share"), CASES)
def test_a_planned_run_is_bit_equal_and_takes_what_was_forecast(
    more: dict[str, Any], device_share: float, host_share: float, tmp_path: Path
) -> None:
    job = job_for(**more)
    machine = tight(job, device_share, host_share)
    with anyfit.start(job, machine=machine, disk_folder=tmp_path) as run:
        plan = run.plan
        assert on_disk(plan) > 0
        losses = [float(run.step(batch)) for batch in BATCHES]
        weights = run.state_dict()  # when all is written
        measured, metrics = run.metrics.peak_bytes, run.metrics
    expected_losses, expected = train_plainly(job, BATCHES, plan.accumulation)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_bit_equal(weights, expected)
    assert metrics.clipped_share > 0
    assert plan.forecast.wear is not None
    written = metrics.disk_written_bytes / STEPS  # low halves when they were placed, too, and all in whole pages
    assert plan.forecast.wear.written_bytes <= written <= 1.25 * plan.forecast.wear.written_bytes
    forecast = plan.forecast
    if more.get("optimizer") is None:  # others make their state in the first step
        assert measured["disk"] == forecast.peak_bytes["disk"]
    assert measured["disk"] <= forecast.peak_bytes["disk"] <= machine.disk_limit_bytes
    assert measured["host"] <= forecast.peak_bytes["host"] + 4096 * 10 * len(plan.chunks)
    assert measured["host"] <= machine.host_limit_bytes
    assert measured["device"] == pytest.approx(forecast.peak_bytes["device"], rel=forecast.reserved_error)
    assert list(tmp_path.iterdir()) == []


def test_without_leave_nothing_lies_on_the_disk_and_the_verdict_offers_it() -> None:
    job = job_for()
    allowed = tight(job, 0.3, 0.8)
    machine = replace(allowed, limits=replace(allowed.limits, disk_bytes=None))
    with pytest.raises(NoPlan) as refused:
        anyfit.plan(job, machine)
    (offered,) = [change for change in refused.value.changes if "disk" in change.what]
    assert offered.note.startswith("with ")
    assert " written a step, " in offered.note
    again = eval(offered.what, {"machine": machine})  # as it is to be typed
    plan = anyfit.plan(job, again)
    assert on_disk(plan) > 0
    assert plan.forecast.step_seconds <= offered.step_seconds * (1 + 1e-9)
    assert plan.forecast.peak_bytes["disk"] <= again.disk_limit_bytes < allowed.disk_limit_bytes
