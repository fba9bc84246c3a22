"""Compiling as a choice of the plan: by what was measured of a block, compiled and eager, and by how long the run is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anyfit.planning import search
from anyfit.planning.compiling import compiled, worth_compiling
from anyfit.values.compiled import BlockFigures, BlockTime, CompiledFigures, PhaseTime
from anyfit.values.no_plan import NoPlan
from anyfit.values.profile import Profile
from tests.planning.profiles import MIB, block, one_pass, small_profile


def times(seconds: float, saved: int = 10 * MIB) -> BlockTime:
    """A third of it forward."""
    forward, backward = (PhaseTime(0.0, each, each) for each in (seconds / 3, 2 * seconds / 3))
    return BlockTime(forward, backward, saved, 0, 0)


def figures(eager: float = 0.030, code: float = 0.010, saved: int = 5 * MIB, compile_seconds: float = 10.0) -> BlockFigures:
    return BlockFigures("key", "Layer", 8, times(eager), times(code, saved), compile_seconds)


def profile_with(found: BlockFigures | None) -> Profile:
    return small_profile(passes=(one_pass(8, blocks=(block(figures=found),)),))


def test_blocks_are_compiled_where_the_run_is_long_enough_to_win_back_what_that_takes() -> None:
    profile = profile_with(figures())
    eager = search(replace(profile, passes=(one_pass(8),)))
    plan = search(profile, 10_000)
    assert plan.compiled == ("layers.0",)
    assert plan.forecast.step_seconds == pytest.approx(eager.forecast.step_seconds - 0.020)
    assert plan.decision("compile").choice == "1 block compiled"
    assert "pays after 500 steps" in plan.decision("compile").why
    short = search(profile, 499)
    assert short.compiled == ()
    assert short.forecast.step_seconds == pytest.approx(eager.forecast.step_seconds)
    assert "499 steps would not win back" in short.decision("compile").why
    assert search(profile, 501).compiled == ("layers.0",)
    assert "--steps" not in plan.decision("compile").why


def test_a_block_that_is_not_faster_or_cannot_be_compiled_stays_eager() -> None:
    slower = figures(code=0.031)
    cannot = replace(figures(), eager=None, compiled=None, why_not="it breaks the graph")
    for found in (None, slower, cannot):
        plan = search(profile_with(found), 10**9)
        assert plan.compiled == ()
        assert [each.name for each in plan.decisions if each.name == "compile"] == []


def test_what_compiled_code_saves_for_backward_is_its_own() -> None:
    profile = profile_with(figures(saved=4 * MIB))
    code = compiled(profile, worth_compiling(profile).blocks)
    cost = code.passes[0].blocks[0]
    assert cost.kept_bytes == cost.choices["keep"].kept_bytes == 4 * MIB
    assert cost.choices["offload"].moved_bytes == 4 * MIB
    assert cost.choices["recompute"].kept_bytes == 1 * MIB  # its inputs
    assert cost.choices["recompute"].seconds == pytest.approx(0.010 / 3)
    assert "selective" not in cost.choices  # one autograd node
    assert code.passes[0].peak_bytes == profile.passes[0].peak_bytes - 6 * MIB
    before, now = ([segment.work_bytes for segment in each.passes[0].segments] for each in (profile, code))
    assert now == [before[0], before[1] + 4 * 1_000_000]  # all gradients of the block wait for its end
    assert [segment.seconds for segment in code.passes[0].segments] == pytest.approx([0.010 / 3, 0.020 / 3])


def test_a_plan_that_fits_only_compiled_is_found() -> None:
    profile = profile_with(figures(saved=1 * MIB))
    needed = search(profile_with(None)).forecast.needed_bytes
    tight = replace(profile, device_limit_bytes=needed - 2 * MIB, host=None, chunks=())
    with pytest.raises(NoPlan):
        search(replace(tight, passes=(one_pass(8),)))
    plan = search(tight, 1)
    assert plan.compiled == ("layers.0",)
    assert "eager nothing fits" in plan.decision("compile").why


def test_sizes_that_were_not_measured_are_not_compiled() -> None:
    measured, unmeasured = one_pass(8, blocks=(block(figures=figures()),)), one_pass(4)
    profile = small_profile(passes=(measured, unmeasured))
    assert [each.micro_batch for each in compiled(profile, ("layers.0",)).passes] == [8]


def test_figures_of_the_same_block_take_the_place_of_those_before() -> None:
    known = CompiledFigures("machine").with_all([figures(), replace(figures(), key="other")])
    known = known.with_all([figures(code=0.020)])
    assert [each.key for each in known.blocks] == ["other", "key"]
    found = known.of("key")
    assert found is not None
    assert found.speedup == pytest.approx(1.5)
    assert CompiledFigures.from_json(known.to_json()) == known
