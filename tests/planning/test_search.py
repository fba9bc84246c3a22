"""The search over made-up profiles: the fastest that fits, an exact shortfall when nothing does, and reasons that are true."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import assume, given

from anyfit import NoPlan, Plan
from anyfit.planning import search
from anyfit.planning.fastest import TIE
from anyfit.values.corrections import Correction, Pace
from anyfit.values.profile import Pass, Profile
from anyfit.values.units import parse_bytes, show_bytes, show_count, show_seconds

from .profiles import MIB, profiles, small_profile

CLOSE = 1 + 1e-9


def seconds_of(profile: Profile, each: Pass) -> float:
    passes = -(-profile.batch_size // each.micro_batch)
    added = passes * profile.trainable * 8 / profile.memory_bytes_per_second if passes > 1 else 0.0
    return profile.batch_size / each.micro_batch * each.seconds + added + profile.update.seconds


def reserved_by(profile: Profile, each: Pass) -> int:
    """Counted by hand: the state, and the worse of a pass and the update, as the allocator takes it."""
    state, update = profile.state, profile.update
    peak = state.parameters + state.masters + state.optimizer + state.buffers + state.scratch + profile.workspace_bytes
    if each.micro_batch == profile.batch_size:
        peak += max(each.peak_bytes, state.gradients + update.scratch_bytes)
    else:
        peak += state.accumulators + max(each.peak_bytes_accumulating, update.scratch_bytes)
    return max(peak, each.reserved_bytes) + profile.context_bytes


def needed_by(profile: Profile, each: Pass) -> int:
    return int(reserved_by(profile, each) * (1 + profile.reserved_error))


def found(profile: Profile) -> Plan | None:
    try:
        return search(profile)
    except NoPlan:
        return None


def with_room_for_one(profile: Profile) -> Profile:
    """The same with enough memory for its smallest micro-batch at least."""
    least = min(needed_by(profile, each) for each in profile.passes)
    return replace(profile, device_limit_bytes=max(profile.device_limit_bytes, least))


@given(profiles())
def test_the_plan_is_the_fastest_micro_batch_that_fits_with_its_margin(profile: Profile) -> None:
    borders = {needed_by(profile, each) for each in profile.passes}
    for limit in {profile.device_limit_bytes, *borders, *(border - 1 for border in borders)}:
        profile = replace(profile, device_limit_bytes=limit)
        fitting = [each for each in profile.passes if needed_by(profile, each) <= limit]
        plan = found(profile)
        assert (plan is None) == (not fitting)
        if plan is not None:
            (chosen,) = [each for each in fitting if each.micro_batch == plan.micro_batch]
            assert plan.fits
            assert plan.forecast.reserved_bytes == reserved_by(profile, chosen)
            assert plan.forecast.step_seconds == pytest.approx(seconds_of(profile, chosen))
            as_fast = (1 + TIE) * min(seconds_of(profile, each) for each in fitting)
            assert seconds_of(profile, chosen) <= as_fast * CLOSE
            larger = [each for each in fitting if each.micro_batch > plan.micro_batch]
            assert all(seconds_of(profile, each) >= as_fast / CLOSE for each in larger)


@given(profiles())
def test_the_shortfall_is_exact_to_the_byte(profile: Profile) -> None:
    profile = replace(profile, device_limit_bytes=1)
    assume(all(needed_by(profile, each) > 1 for each in profile.passes))
    with pytest.raises(NoPlan) as verdict:
        search(profile)
    shortfall = verdict.value.shortfall_bytes
    assert found(replace(profile, device_limit_bytes=1 + shortfall)) is not None
    assert found(replace(profile, device_limit_bytes=1 + shortfall - 1)) is None


@given(profiles())
def test_what_no_plan_says_to_type_fits_and_its_figures_are_true(profile: Profile) -> None:
    assume(found(profile) is None)
    with pytest.raises(NoPlan) as verdict:
        search(profile)
    message = str(verdict.value)
    assert f"{show_bytes(verdict.value.shortfall_bytes)} too little" in message
    assert f"the machine has {show_bytes(profile.device_limit_bytes)}: " in message
    assert message.startswith(f"{profile.described} does not fit: it needs ")
    assert f"Net ({show_count(profile.parameters)} parameters" in message
    assert f"{show_bytes(profile.state.resident)} of that is model state" in message
    smallest = min(profile.passes, key=lambda each: needed_by(profile, each))
    assert f"in micro-batches of {smallest.micro_batch} " in message
    assert f"the peak is at {smallest.peak_at}" in message
    assert f"it needs {show_bytes(needed_by(profile, smallest))} of device memory" in message
    (change,) = verdict.value.changes
    typed = re.fullmatch(r"machine\.as_if\(device_memory='(\w[\w.]*)'\)", change.what)
    assert typed is not None
    assert f"\n  {change.what}: {show_seconds(change.step_seconds)} a step" in message
    plan = found(replace(profile, device_limit_bytes=parse_bytes(typed[1])))
    assert plan is not None
    assert plan.forecast.step_seconds == pytest.approx(change.step_seconds)
    assert parse_bytes(typed[1]) <= 1.01 * needed_by(profile, smallest) + 1


@given(profiles())
def test_every_other_micro_batch_is_kept_as_an_alternative_with_its_true_price(profile: Profile) -> None:
    profile = with_room_for_one(profile)
    plan = search(profile)
    others = [each for each in profile.passes if each.micro_batch != plan.micro_batch]
    assert len(plan.alternatives) == len(others)
    for each, other in zip(others, plan.alternatives, strict=True):
        assert other.decision == "micro-batch"
        assert other.choice == choice_of(profile, each)
        assert other.step_seconds == pytest.approx(seconds_of(profile, each))
        assert other.device_bytes == needed_by(profile, each)
        assert other.fits == (needed_by(profile, each) <= profile.device_limit_bytes)


def choice_of(profile: Profile, each: Pass) -> str:
    if each.micro_batch == profile.batch_size:
        return f"{profile.batch_size} in one pass"
    return f"{each.micro_batch} in each of {-(-profile.batch_size // each.micro_batch)} passes"


@given(profiles())
def test_every_figure_in_the_reasons_is_true(profile: Profile) -> None:
    profile = with_room_for_one(profile)
    plan = search(profile)
    passes = {choice_of(profile, each): each for each in profile.passes}
    chosen = passes.pop(plan.decision("micro-batch").choice)
    assert chosen.micro_batch == plan.micro_batch
    spare = show_bytes(profile.device_limit_bytes - needed_by(profile, chosen))
    assert plan.decision("model state").why == f"it fits, {spare} to spare after the safety margin"

    why = plan.decision("micro-batch").why
    fitting = [each for each in passes.values() if needed_by(profile, each) <= profile.device_limit_bytes]
    if not passes:
        assert why == "the only one asked for"
    elif fitting:
        memory = r"(?:(.+) (less|more)|as much) memory"
        closer = rf"the fewest passes; (.+) would take (.+) (less), too close to tell apart, and {memory}"
        later = rf"(.+) would take (?:(.+) (more) a step|as long,) and {memory}"
        said = re.fullmatch(closer, why) or re.fullmatch(later, why)
        assert said is not None
        neighbour = passes[said[1]]
        assert seconds_of(profile, neighbour) == pytest.approx(min(seconds_of(profile, each) for each in fitting))
        more = plan.alternatives[list(passes).index(said[1])].step_seconds - plan.forecast.step_seconds
        assert (said[2] or show_seconds(0.0)) == show_seconds(abs(more))
        assert said[3] in (None, "more" if more >= 0 else "less")
        room = needed_by(profile, chosen) - needed_by(profile, neighbour)
        assert (said[4] or "0 B") == show_bytes(abs(room))
        assert said[5] == (None if not room else "less" if room > 0 else "more")
    else:
        said = re.fullmatch(r"(.+) would need (.+) and does not fit", why)
        assert said is not None
        assert said[2] == show_bytes(needed_by(profile, passes[said[1]]))


@given(profiles())
def test_the_parts_of_a_step_add_up_and_its_rates_follow_from_it(profile: Profile) -> None:
    plan = search(with_room_for_one(profile))
    forecast = plan.forecast
    (each,) = [each for each in profile.passes if each.micro_batch == plan.micro_batch]
    passes = plan.batch_size / plan.micro_batch
    assert sum(forecast.split_seconds.values()) == pytest.approx(forecast.step_seconds)
    assert forecast.split_seconds["recompute"] == pytest.approx(passes * each.seconds_recompute)
    assert forecast.samples_per_second == pytest.approx(plan.batch_size / forecast.step_seconds)
    assert forecast.tokens_per_second == pytest.approx(passes * each.tokens / forecast.step_seconds)
    share = passes * each.flops / forecast.step_seconds / profile.peak_flops_per_second
    assert forecast.compute_share == pytest.approx(share)


def test_the_plan_carries_what_it_was_made_for() -> None:
    profile = small_profile()
    plan = search(profile)
    assert (plan.model, plan.machine, plan.precision, plan.batch_size) == ("Net", "small", "fp32", 8)
    assert plan.limit_bytes == {"device": profile.device_limit_bytes, "host": profile.host_limit_bytes, "disk": 0}
    plan.refuse_unless_made_for("model-1", "machine-1")
    assert (plan.forecast.step_error, plan.forecast.peak_error) == (profile.time_error, profile.memory_error)


def test_less_memory_gives_more_passes_and_then_none() -> None:
    profile = small_profile()
    accumulations = []
    for each in profile.passes:
        plan = found(replace(profile, device_limit_bytes=needed_by(profile, each)))
        accumulations.append(plan.accumulation if plan else None)
    assert accumulations == [1, 2, 4, 8]
    assert found(replace(profile, device_limit_bytes=needed_by(profile, profile.passes[-1]) - 1)) is None


def test_a_margin_that_a_run_has_shown_to_be_needed_is_kept_and_said() -> None:
    profile = small_profile()
    correction = Correction(profile.model, "in blocks.1", 108 * MIB, 100 * MIB, error=0.12, date="2026-01-01")
    plan = search(profile.corrected(correction))
    assert plan.forecast.reserved_error == 0.12
    assert plan.decision("margin").choice == "12%"
    assert "needed 108 MiB in blocks.1 where 100 MiB were forecast" in plan.decision("margin").why
    smaller = replace(correction, error=profile.reserved_error / 2)
    assert profile.corrected(smaller) == profile
    assert profile.corrected(None) == profile


def test_passes_take_what_a_check_has_measured_and_the_plan_says_so() -> None:
    profile = small_profile()
    pace = Pace(profile.model, profile.parameters, profile.precision, 0.3, 0.2, date="2026-01-01")
    plain, plan = search(profile).forecast, search(profile.paced(pace))
    split = plan.forecast.split_seconds
    assert split["compute"] == pytest.approx(1.5 * plain.split_seconds["compute"])
    assert split["update"] == plain.split_seconds["update"]
    assert plan.forecast.peak_bytes == plain.peak_bytes
    assert plan.decision("pace").choice == "measured 50% slower than forecast"
    assert plan.decision("pace").why.startswith("on 2026-01-01 a check measured 300 ms a step where 200 ms were forecast")
    slower = replace(pace, measured_seconds=0.4)
    again = search(profile.paced(pace).paced(slower)).forecast  # takes its place: scales are not multiplied
    assert again.split_seconds["compute"] == pytest.approx(2 * plain.split_seconds["compute"])
    assert profile.paced(None) == profile
