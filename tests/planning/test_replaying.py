"""Blocks as CUDA graphs: planned where a step would wait for launches, and counted in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit.planning import polish, search
from anyfit.planning.fastest import fastest
from anyfit.planning.footprint import footprint_of
from anyfit.planning.replaying import with_recordings
from anyfit.profiling import profile_of
from anyfit.values.profile import Profile

WIDTH, LAYERS, ROWS = 512, 24, 64


class Many(nn.Module):
    """Of many small ops."""

    def __init__(self, ops: int) -> None:
        super().__init__()
        self.norm, self.mix, self.ops = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), ops

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mix(self.norm(x))
        for _ in range(self.ops):
            hidden = torch.tanh(hidden) + 0.1 * hidden
        return x + hidden


class Chain(nn.Module):
    def __init__(self, ops: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Many(ops) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def job_for(ops: int, length: int, layers: int = LAYERS, **options: object) -> anyfit.Job:
    return anyfit.Job(
        model=lambda: Chain(ops, layers),
        loss=lambda model, batch: model(batch).float().square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        sample=torch.randn(1, length, WIDTH),
        batch_size=ROWS,
        micro_batch=ROWS,
        **options,  # type: ignore[arg-type]
    )


@cache
def profiled(ops: int, length: int, share: float) -> Profile:
    """For a GPU that has room for a share of what the job needs with all on it."""
    machine = anyfit.Machine.load("h200")
    job = job_for(ops, length)
    whole = search(profile_of(job, machine, (1, 1))).forecast.needed_bytes
    return profile_of(job, machine.with_limits(device_memory=int(share * whole)), (1, 1))


def test_a_step_that_waits_for_launches_replays_its_blocks() -> None:
    profile = profiled(20, 64, 0.6)
    plan, without = search(profile), search(profile.launched_op_by_op([block.name for block in profile.passes[0].blocks]))
    assert without.replayed == ()
    assert {"keep", "recompute"} == {plan.activations.get(name, "keep") for name in plan.replayed}
    assert set(plan.replayed) == {f"blocks.{index}" for index in range(1, LAYERS)}  # the first waits for the batch
    assert plan.forecast.step_seconds < without.forecast.step_seconds
    assert plan.fits
    decision = plan.decision("replay")
    assert "launched at once, as CUDA graphs" in decision.choice
    assert "launched op by op a step may take" in decision.why


def test_a_step_that_computes_all_the_time_is_launched_op_by_op() -> None:
    plan = search(profiled(2, 16384, 0.6))
    assert plan.activations
    assert plan.replayed == ()


@pytest.mark.parametrize("options", [{"replay": False}, {"max_sample": torch.randn(1, 80, WIDTH)}], ids=["off", "sizes vary"])
def test_nothing_is_replayed_where_the_job_says_so_or_sizes_vary(options: dict[str, Any]) -> None:
    machine = anyfit.Machine.load("h200")
    job = job_for(20, 64, **options)
    whole = anyfit.plan(job, machine).forecast.needed_bytes
    plan = anyfit.plan(job, machine.with_limits(device_memory=int(0.6 * whole)))
    assert plan.activations
    assert plan.replayed == ()


def test_with_room_for_all_kept_blocks_are_replayed() -> None:
    plan = anyfit.plan(job_for(20, 64), anyfit.Machine.load("h200"))
    without = anyfit.plan(job_for(20, 64, replay=False), anyfit.Machine.load("h200"))
    assert plan.activations == {}
    assert len(plan.replayed) == LAYERS - 1
    assert plan.forecast.step_seconds < without.forecast.step_seconds
    more = plan.forecast.peak_bytes["device"] - without.forecast.peak_bytes["device"]
    assert more > 0


def test_memory_of_recordings_is_counted() -> None:
    profile = profiled(20, 64, 0.6)
    found = fastest(profile)
    assert found is not None
    candidate = found.in_space[1].candidate
    recorded = with_recordings(profile)
    blocks = next(each for each in recorded.passes if each.micro_batch == candidate.micro_batch)
    replaying = replace(candidate, profile_pass=blocks)
    replays = [each for each in replaying.replays if each is not None]
    assert replays
    more = footprint_of(recorded, replaying).pool_bytes - footprint_of(profile, candidate).pool_bytes
    assert more == replays[0].fixed_bytes + max(each.running_bytes for each in replays)  # all blocks are alike
    kept = max(block.choices["keep"].kept_bytes for block, each in zip(blocks.blocks, replaying.replays, strict=True) if each)
    assert replays[0].running_bytes > kept


@pytest.mark.full
def test_trees_of_all_plans_end_however_many_blocks_could_be_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve of them make 4096 trees, and only the first are worth their time."""
    job, machine = job_for(20, 16, layers=12), anyfit.Machine.load("h200")
    whole = anyfit.plan(job, machine).forecast.needed_bytes
    profile = profile_of(job, machine.with_limits(device_memory=int(0.85 * whole)), (1, 1))
    trees = 0
    made = polish.Bounds.__init__

    def counted(self: polish.Bounds, *args: Any) -> None:
        nonlocal trees
        trees += 1
        made(self, *args)

    monkeypatch.setattr(polish.Bounds, "__init__", counted)
    assert search(profile).activations
    most = (polish.MOST_BRANCHES + polish.MOST_MOVING_BRANCHES) // polish.TREE_BRANCHES + 2
    assert 0 < trees <= (1 + len(profile.other_layouts)) * most


def test_what_a_job_may_say_of_replaying() -> None:
    with pytest.raises(TypeError, match=r"Job\(replay=\) must be True or False"):
        job_for(1, 4, replay="yes")
