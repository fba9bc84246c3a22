"""A GPU's memory ends in the middle of a run: it is planned anew, its state moves, and the same step is made again."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit.planning import search
from anyfit.probing.cache import corrections_of
from anyfit.values.profile import Profile
from tests.models import VOCABULARY, byte_batches, next_byte_loss
from tests.oracle import assert_close
from tests.plans import placed_of

pytestmark = pytest.mark.gpu
ROWS, LENGTH, STEPS = 8, 1025, 5
MIB = 2**20


class Dropping(nn.Module):
    """Half a gigabyte of state, and four times as much that forward leaves for backward."""

    def __init__(self, width: int = 1024, layers: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def batches() -> list[Tensor]:
    return byte_batches(STEPS, ROWS, LENGTH)


@functools.cache
def job_for(precision: Any) -> anyfit.Job:
    return anyfit.Job(
        Dropping,
        next_byte_loss,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample=batches()[0],
        batch_size=ROWS,
        micro_batch=ROWS,
        clip_norm=1.0,
        precision=precision,
    )


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The cache is this test's, sums are added up in one order, and no limit stays."""
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


@functools.cache
def machine() -> anyfit.Machine:
    """Some GPU, which is planned for and whose limits are set; its rates do not matter here."""
    return anyfit.Machine.load("h200")


CONTEXT_BYTES = int(machine().device.context_bytes.value)  # as it is forecast


def trained(run: anyfit.Run) -> tuple[list[float], dict[str, Tensor]]:
    with run:
        return [float(run.step(batch)) for batch in batches()], run.state_dict()


@functools.cache
def with_room(precision: Any) -> tuple[list[float], dict[str, Tensor], int]:
    """Losses, weights, and what a step takes on the device, with the context, by a run that had enough."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()  # by others
    losses, peaks = [], []
    with anyfit.start(job_for(precision), machine=machine()) as run:
        assert run.plan.chunks == ()
        for batch in batches():
            torch.cuda.reset_peak_memory_stats()
            losses.append(float(run.step(batch)))
            peaks.append(torch.cuda.max_memory_allocated())
        weights = run.state_dict()
    torch.cuda.empty_cache()
    return losses, weights, min(peaks[1:]) - before + CONTEXT_BYTES


def short_of(precision: Any, error: float = 0.08) -> tuple[Profile, anyfit.Machine]:
    """A profile whose forecasts are too small, with their margin, by this share, and a machine with no more than they want."""
    profile = anyfit.profile(job_for(precision), machine())
    there = int(with_room(precision)[2] / (1 + error))
    missing = search(profile).forecast.reserved_bytes - int(there / (1 + profile.reserved_error))
    limited = machine().with_limits(device_memory=there + MIB)
    passes = tuple(replace(each, reserved_bytes=max(each.reserved_bytes - missing, 0)) for each in profile.passes)
    workspace_bytes = profile.workspace_bytes - missing
    limit = limited.device_limit_bytes
    return replace(profile, passes=passes, workspace_bytes=workspace_bytes, device_limit_bytes=limit), limited


def roomy(precision: Any) -> tuple[Profile, anyfit.Machine]:
    """The profile as it is, and a machine with a little more than its plan wants and its run takes."""
    profile = anyfit.profile(job_for(precision), machine())
    least = max(search(profile).forecast.needed_bytes, with_room(precision)[2])
    limited = machine().with_limits(device_memory=int(1.02 * least))
    return replace(profile, device_limit_bytes=limited.device_limit_bytes), limited


def check(losses: list[float], weights: dict[str, Tensor], precision: Any) -> None:
    expected_losses, expected, _ = with_room(precision)
    assert losses == pytest.approx(expected_losses, rel=2e-3 if precision == "bf16" else 1e-4)
    matrices = {name for name, tensor in expected.items() if tensor.dim() > 1}
    mine, theirs = ({name: each[name] for name in matrices} for each in (weights, expected))
    assert_close(mine, theirs, 2e-2 if precision == "bf16" else 1e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_forecast_that_is_8_percent_too_small_is_survived_and_the_next_plan_has_the_margin(
    precision: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    profile, limited = short_of(precision)
    job = job_for(precision)
    run = anyfit.start(job, machine=limited, profile=profile)
    first, model, optimizer = run.plan, run.model, run.optimizer
    losses, weights = trained(run)
    assert run.rescues >= 1
    assert (run.model, run.optimizer) == (model, optimizer)
    check(losses, weights, precision)
    assert capfd.readouterr().err.count("planned anew with a margin of") == run.rescues
    margin = run.plan.forecast.reserved_error
    assert margin > first.forecast.reserved_error
    assert anyfit.plan(job, limited).forecast.reserved_error == margin
    del run, model, optimizer  # what is closed keeps its weights, on the device
    again = anyfit.start(job, machine=limited, profile=profile.corrected(corrections_of(limited).of(profile.model)))
    check(*trained(again), precision)
    assert again.rescues == 0


@pytest.mark.parametrize("at", [0, 2, 4])
def test_memory_that_goes_in_the_middle_of_a_run_is_made_up_for(at: int) -> None:
    """A ballast takes a sixth of a step's room, and everything that was to spare."""
    precision = "bf16"
    profile, limited = roomy(precision)
    taken = with_room(precision)[2]
    to_spare = limited.device_limit_bytes - taken
    losses = []
    with anyfit.start(job_for(precision), machine=limited, profile=profile) as run:
        for index, batch in enumerate(batches()):
            if index == at:
                torch.cuda.empty_cache()
                ballast = torch.empty(to_spare + (taken - CONTEXT_BYTES) // 6, dtype=torch.uint8, device="cuda")
            losses.append(float(run.step(batch)))
        assert run.rescues >= 1
        weights = run.state_dict()
        held = torch.cuda.memory_allocated() - ballast.nbytes
        assert held < placed_of(run).device_bytes + 256 * MIB  # nothing of the placing before
    check(losses, weights, precision)


def test_what_no_plan_has_room_for_is_the_error_it_was_and_the_last_step_stands() -> None:
    precision = "bf16"
    profile, limited = roomy(precision)
    losses = []
    with anyfit.start(job_for(precision), machine=limited, profile=profile) as run:
        for index, batch in enumerate(batches()):
            if index == 2:
                with pytest.raises(torch.OutOfMemoryError) as caught:
                    run.step(byte_batches(1, ROWS, 40 * LENGTH)[0])
                notes = " ".join(caught.value.__notes__)
                assert "nothing fits" in notes or "more was needed each time" in notes
                assert run.steps == 2
            losses.append(float(run.step(batch)))
        weights = run.state_dict()
    check(losses, weights, precision)
