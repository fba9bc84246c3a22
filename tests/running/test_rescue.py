"""Memory ends in the middle of a run: it is planned anew and goes on, with the losses and weights of one that had enough."""

from __future__ import annotations

import copy
import functools
import gc
import random
import re
import time
import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import anyfit
from anyfit.cli import app
from anyfit.demo import GPT
from anyfit.placing import place
from anyfit.planning import search
from anyfit.planning.forecast import forecast
from anyfit.probing.cache import corrections_of, keep_correction
from anyfit.profiling import traced
from anyfit.running import engine as engines
from anyfit.running.host_memory import HostWatch
from anyfit.running.launch import Launch, launched
from anyfit.running.rehearsal import Rehearsal
from anyfit.running.rescue import Rescue, let_go, said_of_device
from anyfit.running.run import Run
from anyfit.running.shortage import OverLimitError, Shortfall, module_at
from anyfit.running.step import Step
from anyfit.starting import rescue_for
from anyfit.values.corrections import Correction
from anyfit.values.profile import Profile
from tests.machines import small_machine
from tests.models import VOCABULARY, byte_batches, next_byte_loss
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import placed_of, random_delays

ROWS, LENGTH = 8, 33
AGREED = ("batch-norm-of-micro-batches", "mean-of-micro-batches")


class Dropping(nn.Module):
    """Dropout, running statistics, a buffer that is replaced and not changed, and Python's random numbers."""

    def __init__(self, width: int = 32, layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.2), nn.Linear(4 * width, width), nn.BatchNorm1d(width)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        for block in self.blocks:
            x = x + block(x).to(x.dtype)
        self.passes = self.passes + 1
        scale = random.random() if type(x) is Tensor and x.device.type == "cpu" else 1.0
        return self.head(x * scale).view(*ids.shape, -1)


def gpt() -> GPT:
    return GPT(width=32, layers=6, heads=2, length=300)


def wide_gpt() -> GPT:
    return GPT(width=128, layers=6, heads=2, length=300)


OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
}


@functools.cache
def job_for(model: Any = gpt, optimizer: str = "AdamW", **options: Any) -> anyfit.Job:
    options = {"clip_norm": 0.5, "micro_batch": ROWS, "precision": "fp32", "agree": AGREED} | options
    sample = byte_batches(1, ROWS, LENGTH)[0]
    return anyfit.Job(model, next_byte_loss, OPTIMIZERS[optimizer], sample=sample, batch_size=ROWS, **options)


def scheduled(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


@functools.cache
def profile_of(job: anyfit.Job) -> Profile:
    """Traced once, without a limit, and as if no run had shown anything."""
    return anyfit.profile(job, small_machine(cores=77))


def needed_bytes(profile: Profile) -> int:
    """By a step with everything on the device."""
    return forecast(profile, profile.passes[0]).peak_bytes["device"]


def with_error(job: anyfit.Job, machine: anyfit.Machine, error: float = 0.16) -> tuple[Profile, anyfit.Machine]:
    """The job's profile, with forecasts that are too small by this much of what its plan really takes; and the machine, with a
    limit that leaves such a plan no room but the forecast's margin."""
    profile = replace(profile_of(job), device_limit_bytes=machine.device_limit_bytes)
    plan = search(profile)
    roomy = replace(plan, limit_bytes={**plan.limit_bytes, "device": 2**33})
    torch.manual_seed(job.seed)
    with Run(job, roomy, place(job, roomy, job.build(), torch.device("cpu"))) as run:
        for batch in byte_batches(2, ROWS, LENGTH):
            run.step(batch)
        taken = run.metrics.peak_bytes["device"]
    expected = int(taken / (1 + error))
    missing = plan.forecast.peak_bytes["device"] - expected
    machine = machine.with_limits(device_memory=int(expected * (1 + profile.reserved_error)) + 1)
    profile = replace(profile, workspace_bytes=profile.workspace_bytes - missing, device_limit_bytes=machine.device_limit_bytes)
    return profile, machine


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run learns is of that test alone."""
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    import threading

    before = threading.active_count()
    yield
    gc.collect()
    assert threading.active_count() == before


def limited(job: anyfit.Job, share: float) -> anyfit.Machine:
    """A machine with this share of what the job would need on the device."""
    return small_machine(cores=77).with_limits(device_memory=int(share * needed_bytes(profile_of(job))))


def trained(run: Run, batches: list[Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    random.seed(1)
    with run:
        return [float(run.step(batch)) for batch in batches], run.state_dict()


def plainly(job: anyfit.Job, batches: list[Tensor], accumulation: int = 1) -> tuple[list[float], dict[str, Tensor]]:
    random.seed(1)
    return train_plainly(job, batches, accumulation)


VARIANTS: dict[str, tuple[anyfit.Job, float]] = {
    "fp32": (job_for(), 0.8),
    "fp32, little memory": (job_for(), 0.6),
    "bf16": (job_for(precision="bf16"), 0.7),
    "bf16, most on the host": (job_for(precision="bf16"), 0.5),
    "two passes": (job_for(micro_batch=ROWS // 2), 0.8),
    "bf16, two passes": (job_for(micro_batch=ROWS // 2, precision="bf16"), 0.7),
    "dropout": (job_for(Dropping), 0.8),
    "dropout, bf16, two passes": (job_for(Dropping, micro_batch=ROWS // 2, precision="bf16"), 0.8),
    "momentum, scheduled": (job_for(optimizer="momentum", scheduler=scheduled), 0.8),
    "no clipping": (job_for(clip_norm=None), 0.7),
}


OFTEN = ("fp32, little memory", "bf16, two passes", "dropout", "momentum, scheduled")


@pytest.mark.parametrize(
    "variant", [pytest.param(each, marks=[] if each in OFTEN else pytest.mark.full) for each in sorted(VARIANTS)]
)
def test_a_forecast_that_is_16_percent_too_small_is_survived_and_the_next_plan_has_the_margin(
    variant: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job, share = VARIANTS[variant]
    profile, machine = with_error(job, limited(job, share))
    batches = byte_batches(5, ROWS, LENGTH)
    run = anyfit.start(job, machine=machine, profile=profile)
    first, model, optimizer = run.plan, run.model, run.optimizer
    losses, weights = trained(run, batches)
    assert 1 <= run.rescues == run.metrics.rescues
    assert run.metrics.peak_bytes["device"] <= machine.device_limit_bytes
    assert (run.model, run.optimizer) == (model, optimizer)
    accumulation = ROWS // first.micro_batch
    expected_losses, expected = plainly(job, batches, accumulation)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_bit_equal(weights, expected)
    said = [line for line in capfd.readouterr().err.splitlines() if "planned anew" in line]
    assert len(said) == run.rescues
    assert re.match(r"after step [01]: \S+ MiB of memory were needed .* forecast; planned anew with a margin of \d+%", said[0])

    corrected = anyfit.profile(job, machine)
    assert corrected.reserved_error == run.plan.forecast.reserved_error > first.forecast.reserved_error + 0.05
    plan = anyfit.plan(job, machine)
    assert plan.forecast.reserved_error == corrected.reserved_error
    assert "were forecast; anyfit probe --forget drops it" in plan.decision("margin").why
    again = anyfit.start(job, machine=machine, profile=replace(corrected, workspace_bytes=profile.workspace_bytes))
    assert_bit_equal(trained(again, batches)[1], expected)
    assert again.rescues == 0  # the same error of the forecast, and room for it


class Remembering(nn.Module):
    """Whatever a forward may change: counters, averages, own generators, numpy's, a hidden teacher, an object, a list."""

    def __init__(self, width: int = 32, layers: int = 5) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)
        self.calls, self.average, self.history = 0, torch.zeros(width), [1.0]
        self.own, self.numpys = torch.Generator().manual_seed(3), np.random.default_rng(4)
        self.teacher = [nn.BatchNorm1d(width, affine=False)]
        self.holder = types.SimpleNamespace(temperature=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        if x.device.type != "meta" and type(x) is Tensor:
            flat = x.detach().flatten(0, 1)
            self.calls += 1
            self.average = 0.9 * self.average + flat.mean(0)
            self.holder.temperature *= 0.9
            self.history.append(self.holder.temperature)
            drawn = torch.rand((), generator=self.own) + self.numpys.random() + np.random.rand()
            x = (
                x * (drawn + sum(self.history) / self.calls)
                + self.average
                + self.teacher[0](flat).mean()
                + self.teacher[0].running_var
            )
        return self.head(x)


@pytest.mark.parametrize("share", [0.8, 0.6])
def test_all_that_the_failed_step_changed_is_put_back(share: float) -> None:
    job = job_for(Remembering)
    batches = byte_batches(5, ROWS, LENGTH)
    batches[2] = byte_batches(1, ROWS, LENGTH + 10, seed=2)[0]
    np.random.seed(3)
    run = run_of(job, limited(job, share))
    losses, weights = trained(run, batches)
    assert run.rescues
    np.random.seed(3)
    expected_losses, expected = plainly(job, batches)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_bit_equal(weights, expected)


class Iterating(Dropping):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = iter(range(10**6))

    def forward(self, ids: Tensor) -> Tensor:
        next(self.numbers)
        return super().forward(ids)


def test_a_step_that_cannot_be_made_again_is_the_error_and_says_so() -> None:
    job = job_for(Iterating)
    with run_of(job, limited(job, 0.6)) as run:
        run.step(byte_batches(1, ROWS, LENGTH)[0])
        with pytest.raises(MemoryError, match="are needed") as caught:
            run.step(byte_batches(1, ROWS, LENGTH + 15)[0])
    assert "numbers is an iterator, which does not go back" in caught.value.__notes__[0]


def test_a_rescue_goes_on_while_a_plan_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for()
    batches = byte_batches(3, ROWS, LENGTH)
    run = run_of(job, limited(job, 1.02))
    attempt, failures, reserved = Step.attempt, iter(range(5)), []

    def failing(self: Step, batch: Any) -> Tensor:
        reserved.append(self._engine.plan.forecast.reserved_bytes)
        if next(failures, None) is None:
            return attempt(self, batch)
        needed = int(self._engine.plan.forecast.reserved_bytes * (1 + self._engine.plan.forecast.reserved_error)) + 1
        raise OverLimitError(self._engine.plan, Shortfall("in blocks.1", needed, needed - 1))

    monkeypatch.setattr(Step, "attempt", failing)
    _, weights = trained(run, batches)
    assert run.rescues == 5
    assert reserved[:6] == sorted(set(reserved[:6]), reverse=True)
    assert_bit_equal(weights, plainly(job, batches)[1])


def test_a_margin_that_a_run_left_is_named_where_nothing_fits_with_it_and_can_be_dropped() -> None:
    job = job_for()
    machine = limited(job, 0.6)
    assert anyfit.plan(job, machine).fits
    keep_correction(machine, Correction("GPT", "in blocks.3", 2**21, 2**20, 9.0, "2026-01-01"))
    with pytest.raises(anyfit.NoPlan, match=r"margin of 900%: on 2026-01-01 a run needed .*anyfit probe --forget drops it"):
        anyfit.plan(job, machine)
    done = CliRunner().invoke(app, ["probe", "--forget"])
    assert "dropped GPT: a margin of 900% of its memory (2026-01-01)" in done.output
    assert anyfit.plan(job, machine).fits
    assert "nothing" in CliRunner().invoke(app, ["probe", "--forget"]).output


def test_micro_batches_whose_rest_the_model_does_not_run_are_passed_over() -> None:
    model = lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))  # noqa: E731
    job = anyfit.Job(
        model, lambda m, x: m(x).square().mean(), OPTIMIZERS["AdamW"], torch.randn(9, 6), 9, precision="fp32", agree=AGREED
    )
    assert [graph.micro_batch for graph in traced(job, "cpu")] == [9, 5, 3]  # not 2, which leaves one, nor 1


def run_of(job: anyfit.Job, machine: anyfit.Machine, delay: Any = None, watch: HostWatch | None = None) -> Run:
    """As `anyfit.start` makes it, with delays in every lane."""
    profile = replace(profile_of(job), device_limit_bytes=machine.device_limit_bytes)
    plan = search(profile)
    torch.manual_seed(job.seed)
    placed = place(job, plan, job.build(), torch.device("cpu"), delay)
    return Run(job, plan, placed, rescue_for(job, machine, profile, None, placed), watch)


@given(
    at=st.integers(0, 3),
    longer=st.integers(4, 12),
    share=st.sampled_from([0.4, 0.5, 0.6, 0.8, 1.02]),
    model=st.sampled_from([gpt, Dropping]),
    precision=st.sampled_from(["fp32", "bf16"]),
    accumulation=st.sampled_from([1, 2]),
)
def test_a_batch_that_needs_more_than_the_sample_may_come_at_any_step(
    at: int, longer: int, share: float, model: Any, precision: Any, accumulation: int
) -> None:
    job = job_for(model, precision=precision, micro_batch=ROWS // accumulation)
    batches = byte_batches(4, ROWS, LENGTH)
    batches[at] = byte_batches(1, ROWS, LENGTH + longer, seed=at)[0]
    try:
        run = run_of(job, limited(job, share), random_delays(at))
    except anyfit.NoPlan:
        return
    try:
        losses, weights = trained(run, batches)
    except MemoryError as error:
        if share > 0.4 or not any("nothing fits" in note for note in error.__notes__):
            raise  # at 0.4, about the least that has a plan, a longer batch may have none
        return
    expected_losses, expected = plainly(job, batches, accumulation)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_bit_equal(weights, expected)


@pytest.mark.parametrize("at", [0, 2])
def test_what_no_plan_has_room_for_is_the_error_it_was_once_and_the_last_step_stands(
    at: int, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_for(Dropping)
    machine = limited(job, 0.6)
    batches = byte_batches(5, ROWS, LENGTH)
    random.seed(1)
    with anyfit.start(job, machine=machine) as run:
        for index, batch in enumerate(batches):
            if index == at:
                with pytest.raises(MemoryError, match=r"of memory are needed .* are allowed") as caught:
                    run.step(byte_batches(1, ROWS, 300)[0])
                assert len(caught.value.__notes__) == 1
                assert re.search("nothing fits|times, and more was needed", caught.value.__notes__[0])
                assert run.steps == at
            run.step(batch)
        weights = run.state_dict()
    assert "Traceback" not in capfd.readouterr().err
    assert_bit_equal(weights, plainly(job, batches)[1])


def test_a_smaller_micro_batch_is_the_last_resort_and_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    job = job_for(micro_batch=None)
    batches = byte_batches(4, ROWS, LENGTH)
    long = byte_batches(1, ROWS, 49)[0]
    with run_of(job, limited(job, 0.3)) as run:
        first = run.plan.accumulation
        for batch in (*batches[:2], long, *batches[2:]):
            run.step(batch)
        last, weights = run.plan.accumulation, run.state_dict()
    assert run.rescues
    assert last > first
    assert f"in micro-batches of {ROWS // last} instead of {ROWS // first}" in capfd.readouterr().err
    expected = train_plainly(job, [*batches[:2], long, *batches[2:]], [first, first, last, last, last])[1]
    assert_bit_equal(weights, expected)


@pytest.mark.parametrize("at", [0, 2])
def test_a_plan_that_was_given_is_not_changed(at: int) -> None:
    job = job_for()
    machine = limited(job, 0.8)
    plan = anyfit.plan(job, machine)
    batches = byte_batches(4, ROWS, LENGTH)
    long = byte_batches(1, ROWS, 48)[0]
    with anyfit.start(job, plan, machine) as run:
        for index, batch in enumerate(batches):
            if index == at:
                with pytest.raises(MemoryError, match=r"are needed .* are allowed; the plan expected"):
                    run.step(long)
            run.step(batch)
        assert (run.rescues, replace(run.plan, rehearsed=False, loss=plan.loss)) == (0, plan)
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches)[1])
    assert corrections_of(machine).models == ()
    with pytest.raises(ValueError, match="a plan, a profile to make one from, or mesh= and layout="):
        anyfit.start(job, plan, machine, profile=profile_of(job))


def test_an_update_that_holds_too_much_is_made_and_the_run_is_planned_anew_for_the_next(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Resident weights are changed in place, and half a step would be left."""
    job = replace(job_for(precision="bf16"), sample=byte_batches(1, ROWS, 2)[0])
    batches = byte_batches(5, ROWS, 2)
    profile = replace(anyfit.profile(job, small_machine()), reserved_error=0.0)
    update = replace(profile.update, scratch_bytes=0)
    least = forecast(replace(profile, update=update), profile.passes[0])
    assert needed_bytes(profile) > least.needed_bytes, "the update is the peak"
    machine = small_machine().with_limits(device_memory=least.needed_bytes)
    profile = replace(profile, update=update, device_limit_bytes=machine.device_limit_bytes)
    with anyfit.start(job, machine=machine, profile=profile) as run:
        for batch in batches:
            run.step(batch)
        assert run.rescues
        assert run.steps == len(batches)
        weights = run.state_dict()
    assert "after step 1" in capfd.readouterr().err
    assert_bit_equal(weights, train_plainly(job, batches)[1])


@pytest.mark.parametrize("failures", [1, 2])
def test_a_plan_that_cannot_be_placed_leaves_the_run_or_at_least_the_weights(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_for()
    batches = byte_batches(4, ROWS, LENGTH)
    run = run_of(job, limited(job, 0.6))
    run.step(batches[0])
    tries = iter([True] * failures)

    def failing(*arguments: Any) -> Any:
        if next(tries, False):
            raise MemoryError("no more")
        return place(*arguments)

    monkeypatch.setattr(engines, "place", failing)
    with pytest.raises(MemoryError, match=r"are needed .* are allowed") as caught:
        run.step(byte_batches(1, ROWS, LENGTH + 15)[0])
    assert "could not be placed: no more" in caught.value.__notes__[0]
    assert run.is_closed == (failures == 2)
    for batch in batches[1:] if failures == 1 else []:
        run.step(batch)
    run.close()
    done = batches if failures == 1 else batches[:1]
    assert_bit_equal(run.model.state_dict(), train_plainly(job, done)[1])


def test_a_run_that_was_placed_anew_holds_nothing_of_the_placing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(Dropping)
    attempt, failures, placings = Step.attempt, iter(range(6)), []

    def failing(self: Step, batch: Any) -> Tensor:
        placings.append(weakref.ref(self._engine.placed.residency))
        gc.collect()
        assert [each() for each in placings[:-1]] == [None] * (len(placings) - 1)
        if next(failures, None) is None:
            return attempt(self, batch)
        needed = int(self._engine.plan.forecast.reserved_bytes * (1 + self._engine.plan.forecast.reserved_error)) + 1
        raise OverLimitError(self._engine.plan, Shortfall("in blocks.1", needed, needed - 1))

    monkeypatch.setattr(Step, "attempt", failing)
    with anyfit.start(job, machine=limited(job, 1.02)) as run:
        run.step(byte_batches(1, ROWS, LENGTH)[0])
        assert run.rescues >= 6
        assert "recompute" in run.plan.activations.values()


def test_a_new_plan_whose_rehearsal_runs_out_of_memory_gives_way_to_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(Dropping)
    batches = byte_batches(3, ROWS, LENGTH)
    profile, machine = with_error(job, limited(job, 1.02))
    of, reserved = Rehearsal.of, []

    def failing(self: Rehearsal, plan: Any, placed: Any) -> Any:
        reserved.append(plan.forecast.reserved_bytes)
        if len(reserved) == 2:  # the first is that of the start
            needed = int(plan.forecast.needed_bytes * 1.01)
            raise OverLimitError(plan, Shortfall("in blocks.1", needed, needed - 1))
        return of(self, plan, placed)

    monkeypatch.setattr(Rehearsal, "of", failing)
    run = anyfit.start(job, machine=machine, profile=profile)
    losses, weights = trained(run, batches)
    assert len(reserved) >= 3
    assert reserved[2] < reserved[1]
    expected_losses, expected = plainly(job, batches)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert_bit_equal(weights, expected)


def test_memory_that_others_took_is_no_fault_of_the_forecast() -> None:
    """On a GPU: the run needed no more than was forecast, and less was there."""
    job = job_for()
    machine = limited(job, 1.2)
    profile = replace(profile_of(job), device_limit_bytes=machine.device_limit_bytes)
    plan, kept = search(profile), list[Any]()
    there = int(0.7 * plan.forecast.reserved_bytes)
    rescue = Rescue(lambda: profile, search, kept.append)
    short = Shortfall("in blocks.3", there + 1, there)
    other = rescue.with_less_device(plan, short, 0)
    assert other.limit_bytes["device"] == there
    assert other.fits
    assert other.forecast.reserved_error == plan.forecast.reserved_error
    assert kept == []
    assert "planned anew for as much as is there" in said_of_device(3, short, plan, other)


@pytest.mark.parametrize("is_own_model", [False, True])
def test_a_run_that_was_resumed_is_profiled_when_it_has_to_be(tmp_path: Path, is_own_model: bool) -> None:
    """Its plan is that of the folder: nothing was traced for it."""
    torch.manual_seed(0)
    job = replace(job_for(), model=gpt() if is_own_model else gpt)
    machine = limited(job_for(), 0.6)
    batches = [*byte_batches(2, ROWS, LENGTH), byte_batches(1, ROWS, LENGTH + 15)[0]]
    expected = train_plainly(replace(job, model=lambda: copy.deepcopy(job.build())), batches)[1]
    with launched(Launch(tmp_path)) as launch, anyfit.start(job, machine=machine) as run:
        run.step(batches[0])
        launch.save(run)
        plan = run.plan
    del run, launch
    gc.collect()
    with launched(Launch(tmp_path, resume=True)), anyfit.start(job, machine=machine) as again:
        assert again.plan == plan
        again.step(batches[1])
        again.step(batches[2])
        assert again.rescues
        weights = again.state_dict()
    assert_bit_equal(weights, expected)


# ---------------------------------------------------------------------- host memory


class Free:
    """Host memory that is left, as a test says."""

    def __init__(self, left: float = 2**32) -> None:
        self.left = left
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return self.left

    def wait_for_a_look(self) -> None:
        seen = self.looks
        while self.looks < seen + 2:
            time.sleep(0.001)


@pytest.fixture
def free() -> Free:
    return Free()


def watch_of(free: Free) -> HostWatch:
    return HostWatch(free, limit_bytes=2**16, every_seconds=0.001)


def test_a_run_with_little_host_memory_left_has_less_there_from_the_next_step_on(
    free: Free, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_for(precision="bf16")
    batches = byte_batches(6, ROWS, LENGTH)
    watch = watch_of(free)
    with run_of(job, limited(job, 0.45), watch=watch) as run:
        before = placed_of(run).host_bytes
        for index, batch in enumerate(batches):
            if index == 2:
                free.left = watch.floor_bytes - 1
                free.wait_for_a_look()
            if index == 3:
                free.left = 2**32
            run.step(batch)
        after, weights = placed_of(run).host_bytes, run.state_dict()
    assert run.rescues == 1
    assert after <= before - watch.floor_bytes
    assert "of host memory are left; planned anew with" in capfd.readouterr().err
    assert_bit_equal(weights, train_plainly(job, batches)[1])


def test_a_start_takes_no_more_of_the_host_than_others_leave(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_for(wide_gpt, precision="bf16")  # the engine takes whole pages, of which so much does not show
    machine, batches = limited(job, 0.45), byte_batches(3, ROWS, LENGTH)
    with anyfit.start(job, machine=machine) as run:
        wanted = run.plan.forecast.peak_bytes["host"]
    assert "planning anew" not in capfd.readouterr().err
    left = int(0.95 * wanted)
    monkeypatch.setattr("anyfit.probing.host.left_memory_bytes", lambda: float(left))
    with anyfit.start(job, machine=machine) as run:
        assert 0 < run.plan.forecast.peak_bytes["host"] <= run.plan.limit_bytes["host"] == left
        for batch in batches:
            run.step(batch)
        weights = run.state_dict()
    assert "are free: planning anew" in capfd.readouterr().err
    assert_bit_equal(weights, train_plainly(job, batches)[1])
    monkeypatch.setattr("anyfit.probing.host.left_memory_bytes", lambda: 1000.0)
    with pytest.raises(anyfit.NoPlan, match="the machine has 1000 B"):
        anyfit.start(job, machine=machine)


def test_weights_that_are_there_already_count_as_free(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    of_a_maker = job_for(wide_gpt, precision="bf16")
    machine, model = limited(of_a_maker, 0.45), wide_gpt()
    wanted = anyfit.plan(of_a_maker, machine).forecast.peak_bytes["host"]
    kept = sum(each.nbytes for each in model.parameters())
    monkeypatch.setattr("anyfit.probing.host.left_memory_bytes", lambda: float(wanted - kept))
    with anyfit.start(replace(of_a_maker, model=model), machine=machine) as run:
        assert run.plan.forecast.peak_bytes["host"] == wanted
    assert "planning anew" not in capfd.readouterr().err


def test_a_shortage_that_passes_before_the_step_changes_nothing(free: Free) -> None:
    job = job_for()
    watch = watch_of(free)
    with run_of(job, limited(job, 0.5), watch=watch) as run:
        free.left = 0
        free.wait_for_a_look()
        free.left = 2**32
        run.step(byte_batches(1, ROWS, LENGTH)[0])
        assert run.rescues == 0


def test_where_nothing_on_the_host_can_be_spared_the_run_stops_and_stands(free: Free) -> None:
    job = job_for()
    batches = byte_batches(4, ROWS, LENGTH)
    with run_of(job, limited(job, 1.5), watch=watch_of(free)) as run:
        run.step(batches[0])
        free.left = 0
        free.wait_for_a_look()
        with pytest.raises(
            MemoryError, match=r"0 B of host memory are left after step 1.*run\.save keeps its state.*fewer workers"
        ):
            run.step(batches[1])
        free.left = 2**32
        for batch in batches[1:]:
            run.step(batch)
        assert (run.rescues, run.steps) == (0, 4)
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches)[1])


def test_under_anyfit_fit_it_saves_before_it_stops(free: Free, tmp_path: Path) -> None:
    job = job_for()
    machine = limited(job, 1.5)
    with launched(Launch(tmp_path)) as launch:
        run = run_of(job, machine, watch=watch_of(free))
        launch.follow(run, machine)
        run.step(byte_batches(1, ROWS, LENGTH)[0])
        free.left = 0
        free.wait_for_a_look()
        with pytest.raises(MemoryError, match=r"saved in .*00000001"):
            run.step(byte_batches(1, ROWS, LENGTH)[0])
        run.close()
        assert launch.newest_checkpoint() == tmp_path / "checkpoints" / "00000001"


def test_under_anyfit_fit_the_folder_has_the_plan_that_the_run_goes_on_with(tmp_path: Path) -> None:
    job = job_for()
    profile, machine = with_error(job, limited(job, 0.8))
    lines: list[str] = []
    with launched(Launch(tmp_path, say=lines.append)):
        with anyfit.start(job, machine=machine, profile=profile) as run:
            for batch in byte_batches(2, ROWS, LENGTH):
                run.step(batch)
        assert len(lines) == run.rescues >= 1
    assert anyfit.Plan.load(tmp_path / "plan.json") == run.plan


def test_what_a_failed_step_held_is_let_go_though_somebody_looked_at_its_frames() -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made = x * 2
            seen.append(weakref.ref(made))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    model = nn.Sequential(nn.Linear(2, 2), Failing())
    try:
        model(torch.ones(1, 2))
    except torch.OutOfMemoryError as error:
        failed = error
    assert module_at(model, failed.__traceback__) == "in 1"
    let_go(failed)
    gc.collect()
    assert seen[0]() is None
    assert failed.__traceback__ is not None, "it is still the whole error"
