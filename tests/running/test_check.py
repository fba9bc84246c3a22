"""Checks: what is measured is what the run did, a smaller model stands for the whole one, and later plans use what was found."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit import Job, Machine, Plan, cli
from anyfit.demo import GPT
from anyfit.planning import search
from anyfit.probing import cache
from anyfit.running import check as checking
from anyfit.running import parity
from anyfit.running.check import check
from anyfit.tracing.blocks import kinds_of
from anyfit.values.check import Check
from anyfit.values.machine import Curve
from anyfit.values.plan import Activations, Placement
from anyfit.values.profile import Profile
from tests.machines import GIB, small_machine
from tests.models import VOCABULARY, Tangled, byte_batches, next_byte_loss
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written

kinds = kinds_of
LAYERS = 10


def job_of(model: Any, batch_size: int = 8, precision: str = "fp32", **options: Any) -> Job:
    return Job(
        model=model,
        loss=next_byte_loss,
        optimizer=lambda model: torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3),
        sample=byte_batches(1, batch_size)[0],
        batch_size=batch_size,
        precision=precision,
        **options,
    )


def deep() -> GPT:
    return GPT(width=32, layers=LAYERS, heads=2, length=16)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is found here is not for other tests; the machine is as they have measured it."""
    anyfit.probe()
    own = shutil.copytree(os.environ["ANYFIT_CACHE"], tmp_path / "cache")
    for found in own.glob("corrections-*"):
        found.unlink()
    monkeypatch.setenv("ANYFIT_CACHE", str(own))
    return own


def profile_of(job: Job, device_bytes: int = 8 * GIB) -> Profile:
    return anyfit.profile(job, small_machine(device_bytes=device_bytes))


def case_of(job: Job, plan: Plan, device_bytes: int) -> parity.Case | str:
    return parity.case_of(job, plan, profile_of(job, device_bytes), job.build(), kinds)


# ---------------------------------------------------------------------- what was measured


def test_a_check_has_the_step_its_split_and_the_peaks_and_leaves_the_users_model_as_it_is(own_cache: Path) -> None:
    model = deep()
    before = copy.deepcopy(model.state_dict())
    job, machine = job_of(model), small_machine()
    profile = anyfit.profile(job, machine)
    found = check(job, search(profile), profile, machine, 3, kinds)
    assert sum(found.split_seconds.values()) == pytest.approx(found.step_seconds)
    assert found.split_seconds["compute"] > found.split_seconds["update"] > 0
    assert found.split_seconds["exposed update"] == found.split_seconds["exposed offload"] == 0.0
    assert found.peak_bytes["device"] == pytest.approx(found.forecast.peak_bytes["device"], rel=found.forecast.peak_error)
    assert found.peak_bytes["host"] == 0
    assert found.parity is not None
    assert found.parity.compared == "the whole model"
    assert found.parity.agrees
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert Check.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_where_the_host_works_beside_a_cpu_its_peak_is_told_but_nothing_of_what_cannot_be_told_apart(own_cache: Path) -> None:
    job, machine = job_of(deep), small_machine()
    profile = anyfit.profile(job, machine)
    plan = hand_written(job, ON_HOST, activations={"blocks.0": "recompute"})
    found = check(job, plan, profile, machine, 3, kinds)
    assert found.split_seconds == {}
    assert found.peak_bytes["host"] > 8 * profile.parameters  # moments
    assert found.pace is None
    assert found.no_pace is not None
    assert "cannot be told apart" in found.no_pace
    assert found.correction is None  # a plan written by hand forecasts nothing


def test_the_parts_of_a_step_are_read_from_its_timeline() -> None:
    def span(row: int, kind: str, seconds: float) -> dict[str, Any]:
        return {"ph": "X", "pid": 0, "tid": row, "name": f"{kind} x", "cat": kind, "ts": 0.0, "dur": seconds * 1e6}

    rows = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}
        for row, name in enumerate(("steps", "compute", "host"))
    ]
    spans = [span(1, "forward", 2.0), span(1, "norm", 0.5), span(1, "update", 0.5), span(1, "wait", 2.0), span(2, "update", 9.0)]
    waits = {"fetch": 0.05, "return": 0.05, "update": 0.06, "gradients": 0.04}
    document = {"traceEvents": rows + spans, "metadata": {"steps": [4, 5], "step_seconds": 5.0, "waits": waits}}
    assert checking.shares_of(document) == pytest.approx(
        {"compute": 0.7, "update": 0.1, "exposed update": 0.1, "exposed offload": 0.1}
    )


def test_a_sample_or_a_plan_of_another_batch_is_refused(own_cache: Path) -> None:
    job, machine = job_of(deep), small_machine()
    profile = anyfit.profile(job, machine)
    plan = search(profile)
    with pytest.raises(ValueError, match="check trains on Job"):
        check(replace(job, sample=job.sample[:3]), plan, profile, machine, 3, kinds)
    with pytest.raises(ValueError, match="the plan is for batch_size 8 in fp32, the job is 4 in fp32; plan again"):
        check(replace(job, sample=job.sample[:4], batch_size=4), plan, profile, machine, 3, kinds)


# ---------------------------------------------------------------------- beside plain PyTorch

SPECULATES = Placement(gradients="host", optimizer="host", update="host", speculates=True)
ALL_KINDS = (RESIDENT, STREAMED, ON_HOST, AWAY, AWAY_STREAMED, SPECULATES)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_model_too_large_for_plain_pytorch_is_compared_in_small_with_every_choice_of_its_plan(
    precision: str, accumulation: int
) -> None:
    job = job_of(deep, precision=precision, clip_norm=0.1)
    chosen: list[Activations] = ["recompute"] * 4 + ["selective"] * 3 + ["offload"] * 1 + ["keep"] * 2
    activations = {f"blocks.{index}": choice for index, choice in enumerate(chosen)}
    placements = ALL_KINDS if accumulation == 1 else ALL_KINDS[:-1]
    plan = hand_written(job, *placements, chunk_bytes=2**20, activations=activations, accumulation=accumulation)
    case = case_of(job, plan, device_bytes=3_500_000)
    assert isinstance(case, parity.Case)
    assert case.compared == f"8 of 10 blocks and {2 * accumulation} of 8 samples"
    assert len(case.model.get_submodule("blocks")) == 8
    assert [case.plan.activations.get(f"blocks.{index}") for index in (0, 2, 4, 6)] == [
        "recompute", "selective", "offload", None,
    ]  # fmt: skip
    assert tuple(dict.fromkeys(case.plan.chunks)) == placements
    assert len(case.plan.chunks) >= 3 * len(placements)
    assert case.plan.accumulation == accumulation
    found = parity.compare(case, torch.device("cpu"))
    assert not isinstance(found, str)
    assert found.agrees
    assert found.steps == 2


def test_the_model_that_is_cut_is_whole_afterwards() -> None:
    job = job_of(deep)
    model = job.build()
    names = [name for name, _ in model.named_parameters()]
    case = parity.case_of(job, hand_written(job), profile_of(job, 2**20), model, kinds)
    assert isinstance(case, parity.Case)
    assert len(case.model.get_submodule("blocks")) == 3
    assert [name for name, _ in model.named_parameters()] == names
    assert case.model.get_submodule("blocks.0").state_dict().keys() == model.get_submodule("blocks.0").state_dict().keys()


def test_where_memory_is_short_one_block_of_each_choice_is_left() -> None:
    job = job_of(deep)
    case = case_of(job, hand_written(job, activations={"blocks.7": "recompute"}), 900_000)
    assert isinstance(case, parity.Case)
    assert case.compared == "2 of 10 blocks and 2 of 8 samples"
    assert dict(case.plan.activations) == {"blocks.1": "recompute"}


class Alternating(nn.Module):
    """Two kinds of block that take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        widths = [16, 32] * 6
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, each), nn.GELU(), nn.Linear(each, 16)) for each in widths))
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(ids)))


def test_blocks_that_take_turns_are_cut_by_turns() -> None:
    job = job_of(Alternating)
    case = case_of(job, hand_written(job, activations={f"blocks.{index}": "recompute" for index in range(1, 12, 2)}), 600_000)
    assert isinstance(case, parity.Case)
    assert case.compared == "6 of 12 blocks and 2 of 8 samples"
    assert dict(case.plan.activations) == {f"blocks.{index}": "recompute" for index in (1, 3, 5)}
    found = parity.compare(case, torch.device("cpu"))
    assert not isinstance(found, str)
    assert found.agrees


class Counting(GPT):
    """Counts on all its blocks."""

    def __init__(self) -> None:
        super().__init__(width=32, layers=LAYERS, heads=2, length=16)

    def forward(self, ids: Tensor) -> Tensor:
        self.get_submodule(f"blocks.{LAYERS - 1}")
        return super().forward(ids)


def optimizer_of_the_last(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.blocks[LAYERS - 1].parameters(), lr=0.1)


REASONS: Mapping[str, tuple[Job, int, str]] = {
    "counts": (job_of(Counting), 2**20, "plain PyTorch cannot run it: AttributeError"),
    "optimizer": (replace(job_of(deep), optimizer=optimizer_of_the_last), 2**20, "fewer blocks it cannot be made: IndexError"),
    "no blocks": (job_of(Tangled, 2), 2**12, "neither its blocks nor its samples can be fewer"),
    "too large": (job_of(deep), 2**12, "with 1 of 10 blocks and 2 of 8 samples it still takes"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_why_nothing_was_compared_is_said(reason: str) -> None:
    job, device_bytes, says = REASONS[reason]
    case = case_of(job, hand_written(job), device_bytes)
    found = case if isinstance(case, str) else parity.compare(case, torch.device("cpu"))
    assert isinstance(found, str)
    assert says in found


def test_a_step_that_is_not_plain_pytorchs_is_told(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, machine = job_of(deep), small_machine()
    profile = anyfit.profile(job, machine)

    steps, evaluate = parity._plain_steps, Job.evaluate

    def of_another_loss(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Job, "evaluate", lambda *given: (1.01 * evaluate(*given)[0], None))
            return steps(*arguments)

    monkeypatch.setattr(parity, "_plain_steps", of_another_loss)
    found = check(job, search(profile), profile, machine, 3, kinds)
    assert found.parity is not None
    assert found.parity.loss_difference == pytest.approx(0.01, rel=0.1)
    assert not found.parity.agrees


class Whimsical(GPT):
    """Adds nothing but chance, to one weight's gradient or to the loss."""

    def __init__(self, chance: float) -> None:
        super().__init__(width=32, layers=2, heads=2, length=16)
        self.chance = chance
        self.moved = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor) -> Tensor:
        whim = random.SystemRandom().random()
        return super().forward(ids) * (1 + self.chance * whim) + whim * (self.moved - self.moved.detach())


class Attending(nn.Module):
    """The gradient of the bias of its keys is nothing but rounding: a softmax does not change with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.queries, self.keys, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head((self.queries(x) @ self.keys(x).transpose(1, 2)).softmax(-1) @ x)


def test_a_gradient_that_is_only_rounding_is_told_from_others() -> None:
    job, model, batch = job_of(Attending), Attending(), byte_batches(1, 8)[0]
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    _, plain = parity._plain_steps(job, copy.deepcopy(model), [8], batch, torch.device("cpu"))
    _, nudged = parity._plain_steps(job, parity._nudged(copy.deepcopy(model)), [8], batch, torch.device("cpu"))
    apart = parity._differences(before, nudged, plain)
    assert apart.pop("keys.bias") > 1e-3
    assert max(apart.values()) < 1e-4


@pytest.mark.parametrize(("chance", "is_compared"), [(0.0, True), (1.0, False)])
def test_what_plain_pytorch_does_otherwise_each_time_says_nothing(chance: float, is_compared: bool) -> None:
    job = job_of(lambda: Whimsical(chance), clip_norm=None)
    job = replace(job, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    case = case_of(job, hand_written(job, ON_HOST), 8 * GIB)
    assert isinstance(case, parity.Case)
    found = parity.compare(case, torch.device("cpu"))
    if is_compared:
        assert not isinstance(found, str)
        assert found.agrees
    else:
        assert found == "plain PyTorch itself takes other steps each time, from the same weights and random numbers"


# ---------------------------------------------------------------------- what later plans make of it


def with_rates(machine: Machine, times: float) -> Machine:
    """The same machine, said to be so many times as fast."""

    def faster(curve: Curve) -> Curve:
        return replace(curve, points=tuple((size, rate * times) for size, rate in curve.points))

    device = machine.device
    of_dtypes = ("matmul", "matmul_unaligned", "attention", "attention_backward", "convolution")
    curves: dict[str, Any] = {
        name: {dtype: faster(curve) for dtype, curve in getattr(device, name).items()} for name in of_dtypes
    }
    operations = {name: faster(curve) for name, curve in device.operations.items()}
    return replace(machine, device=replace(device, memory=faster(device.memory), operations=operations, **curves))


JOBS = """
from dataclasses import replace
from anyfit import demo

def job():
    return replace(demo.job(batch_size=8, precision="fp32"), micro_batch=8)
"""


@pytest.mark.full
def test_a_machine_whose_rates_are_wrong_is_forecast_right_after_a_check_and_a_second_is_not_put_on_top(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_rates(anyfit.probe(), 4.0).save(cache.machine_file("quick"))
    (tmp_path / "jobs.py").write_text(JOBS)

    def run(verb: str, *options: str) -> Any:
        monkeypatch.setattr("sys.argv", ["anyfit", verb, f"{tmp_path}/jobs.py:job", *options, "--json"])
        with pytest.raises(SystemExit) as end:
            cli.main()
        assert end.value.code == 0
        return json.loads(capsys.readouterr().out)

    first = Check.from_json(run("check", "--steps", "5"))
    assert first.pace is not None
    assert first.pace.forecast_seconds == pytest.approx(first.forecast.split_seconds["compute"])
    plan = Plan.from_json(run("plan"))
    assert plan.decision("pace").choice == first.pace.choice
    assert plan.forecast.split_seconds["compute"] == pytest.approx(first.pace.measured_seconds)
    assert 1 / 1.6 < plan.forecast.step_seconds / first.step_seconds < 1.6
    again = Check.from_json(run("check", "--steps", "5"))
    assert again.forecast.step_seconds == pytest.approx(plan.forecast.step_seconds)
    assert again.pace is not None
    assert again.pace.forecast_seconds == pytest.approx(first.pace.forecast_seconds)  # of the rates, not of the first check


def test_more_memory_than_the_band_has_widens_the_margin_and_less_changes_nothing(own_cache: Path) -> None:
    job, machine = job_of(deep), small_machine()
    profile = anyfit.profile(job, machine)
    plan = search(profile)
    for times, is_kept in ((0.5, True), (2.0, False)):
        peaks = {tier: int(size * times) for tier, size in plan.forecast.peak_bytes.items()}
        wrong = replace(plan, forecast=replace(plan.forecast, peak_bytes=peaks))
        correction = check(job, wrong, profile, machine, 3, kinds).correction
        assert (correction is not None) == is_kept
        if correction is not None:
            assert correction.error == pytest.approx(1.04, abs=0.1)
            cache.keep_correction(machine, correction)
    margin = anyfit.plan(job, machine).decision("margin")
    assert "in a check" in margin.why
