"""Clipped steps: what they take is simulated and weighed, and the plan says so."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfit.planning import search
from anyfit.planning.bound import least_seconds
from anyfit.planning.candidate import Candidate, Rates
from anyfit.planning.evaluation import Evaluation, mean, waiting
from anyfit.planning.fastest import fastest
from anyfit.planning.forecast import forecast_of, mean_seconds
from anyfit.planning.simulation import Simulated, redone_seconds, simulate
from anyfit.planning.space import Space
from anyfit.values.corrections import ClippedSteps
from anyfit.values.plan import Clipping, Forecast, Plan
from anyfit.values.profile import Profile
from anyfit.values.units import show_seconds
from tests.planning.profiles import candidates, small_profile
from tests.planning.test_simulate import EASY, profile_in_little, resident

NOTHING_SEEN = ClippedSteps("GPT2LMHeadModel", 3_780_000_000, "bf16", 1.0)
MANY = 10**9  # steps: a share as good as certain
SEEN = {share: replace(NOTHING_SEEN, steps=MANY, clipped=round(share * MANY), date="2026-11-17") for share in (0.0, 0.5, 1.0)}


def speculating(candidate: Candidate) -> Candidate:
    """All that may."""
    placements = tuple(replace(each, speculates=each.optimizer == "host") for each in candidate.placements)
    return replace(candidate, placements=placements)


# ---------------------------------------------------------------------- the simulator


@given(candidates())
def test_where_nothing_begins_before_the_norm_a_clipped_step_is_like_any_other(candidate: Candidate) -> None:
    waits = waiting(candidate)
    assert not any(each.speculates for each in waits.placements)
    step = simulate(waits, EASY).step_seconds
    assert redone_seconds(waits, EASY, step) == pytest.approx(step)
    assert waiting(waits) is waits


@given(candidates())
def test_a_clipped_step_among_others_takes_at_least_what_it_redoes(candidate: Candidate) -> None:
    """Of the host: what it had begun, once more. Nothing else has to be waited for twice."""
    guesses = speculating(candidate)
    step = simulate(guesses, EASY).step_seconds
    redone = redone_seconds(guesses, EASY, step)
    assert redone >= step
    pairs = zip(guesses.chunks, guesses.placements, strict=True)
    updated = [(chunk, placement) for chunk, placement in pairs if chunk.is_updated and chunk.gradient_bytes]
    if not any(placement.speculates for _, placement in updated):
        assert redone == pytest.approx(step)
    host = sum(chunk.elements for chunk, placement in updated if placement.route == "host") / 1e9
    state = sum(chunk.optimizer_bytes for chunk, placement in updated if placement.route == "streamed") / 1e9
    weights = sum(chunk.weights_bytes for chunk, _ in updated) / 1e9
    # At the worst all of it is redone, one thing after another, while nothing is computed, and the next steps begin as late.
    assert redone <= 2 * step + 2 * (host + 2 * state + 3 * weights)


@given(candidates(), st.floats(0, 1))
def test_no_mean_of_clipped_and_other_steps_is_under_its_bound(candidate: Candidate, share: float) -> None:
    guesses = speculating(candidate)
    seconds = mean(simulate(guesses, EASY).step_seconds, simulate(waiting(guesses), EASY).step_seconds, share)
    bound = mean(least_seconds(guesses, EASY), least_seconds(waiting(guesses), EASY), share)
    assert bound <= seconds * (1 + 1e-9)


@given(candidates())
def test_what_is_resident_takes_the_same_whether_it_clips_or_not(candidate: Candidate) -> None:
    stays = resident(candidate)
    step = simulate(stays, EASY).step_seconds
    assert redone_seconds(stays, EASY, step) == pytest.approx(step)


# ---------------------------------------------------------------------- the search


def profile_with(seen: ClippedSteps | None) -> Profile:
    """GPT-2 of 4 billion parameters in 24 GiB of an H200."""
    return replace(profile_in_little(), clipped_steps=seen)


@cache
def planned_with(seen: ClippedSteps | None) -> Plan:
    return search(profile_with(seen))


def clipping_of(forecast: Forecast) -> Clipping:
    assert forecast.clipping is not None
    return forecast.clipping


@pytest.mark.full
def test_a_job_that_does_not_clip_is_planned_as_if_none_did() -> None:
    plan, never = planned_with(None), planned_with(SEEN[0.0])
    assert plan.forecast.clipping is None
    assert plan.forecast.mean_step_seconds == plan.forecast.step_seconds
    assert "clipping" not in {each.name for each in plan.decisions}
    assert never.chunks == plan.chunks
    assert never.forecast.step_seconds == plan.forecast.step_seconds


@pytest.mark.full
def test_the_more_steps_clip_the_more_a_plan_is_made_for_them() -> None:
    never, even, always = (planned_with(SEEN[share]).forecast for share in (0.0, 0.5, 1.0))
    assert never.step_seconds <= even.step_seconds * 1.005
    assert even.step_seconds <= always.step_seconds * 1.005
    assert clipping_of(always).step_seconds <= clipping_of(even).step_seconds * 1.005
    assert clipping_of(even).step_seconds <= clipping_of(never).step_seconds * 1.005
    for forecast in (never, even, always):
        share = clipping_of(forecast).share
        others = [replace(other, clipping=replace(clipping_of(other), share=share)) for other in (never, even, always)]
        assert forecast.mean_step_seconds <= 1.005 * min(other.mean_step_seconds for other in others)


@pytest.mark.full
def test_an_even_chance_is_taken_where_nothing_was_seen() -> None:
    assert NOTHING_SEEN.share == 0.5
    plan = planned_with(NOTHING_SEEN)
    assert plan.forecast == replace(planned_with(SEEN[0.5]).forecast, clipping=clipping_of(plan.forecast))
    clipping = clipping_of(plan.forecast)
    assert clipping.share == 0.5
    assert plan.forecast.mean_step_seconds == pytest.approx((plan.forecast.step_seconds + clipping.step_seconds) / 2)


def test_forecasts_have_the_figures_of_the_simulator() -> None:
    found = fastest(profile_with(NOTHING_SEEN))
    assert found is not None
    space, offer = found.in_space
    rates = space.evaluation.rates
    forecast, clipping = forecast_of(space, offer), clipping_of(forecast_of(space, offer))
    assert forecast.step_seconds == pytest.approx(simulate(offer.candidate, rates).step_seconds)
    assert clipping.step_seconds == pytest.approx(simulate(waiting(offer.candidate), rates).step_seconds)
    assert clipping.redone_seconds == pytest.approx(redone_seconds(offer.candidate, rates, forecast.step_seconds))
    assert forecast.step_seconds < clipping.step_seconds < clipping.redone_seconds
    assert forecast.mean_step_seconds == pytest.approx(mean_seconds(space.profile, offer))
    assert offer.seconds == pytest.approx(forecast.mean_step_seconds)


def test_a_plan_says_what_clipped_steps_take_and_how_many_it_expects() -> None:
    plan = planned_with(NOTHING_SEEN)
    forecast, clipping = plan.forecast, clipping_of(plan.forecast)
    rows = dict(plan.rows())
    assert rows["step"].startswith(show_seconds(forecast.step_seconds))
    assert rows["clipped step"] == (
        f"{show_seconds(clipping.step_seconds)} where every step is, {show_seconds(clipping.redone_seconds)} for one among "
        f"others that are not; {show_seconds(forecast.mean_step_seconds)} on average, as many as are expected"
    )
    assert rows["clipping"] == ("50% of steps expected over the limit of 1: an even chance, as no run has shown how many are")
    seen = replace(NOTHING_SEEN, steps=100, clipped=0, date="2026-11-17")
    assert f"{seen.choice}: {seen.why}" == (
        "25% of steps expected over the limit of 1: up to 2026-11-17, 0 of 100 steps were; anyfit probe --forget drops it"
    )
    assert " on average and " in plan.decision("speculation").why
    later = next(each for each in plan.alternatives if each.decision == "speculation").step_seconds - forecast.mean_step_seconds
    assert f"{show_seconds(later)} more a step on average" in plan.decision("speculation").why


def test_where_all_is_on_the_device_clipped_steps_are_like_others_and_nothing_is_said() -> None:
    plan = search(small_profile(clipped_steps=NOTHING_SEEN))
    clipping = clipping_of(plan.forecast)
    assert clipping.step_seconds == clipping.redone_seconds == plan.forecast.step_seconds == plan.forecast.mean_step_seconds
    assert not {"clipped step", "clipping"} & {name for name, _ in plan.rows()}
    assert plan == replace(search(small_profile()), forecast=plan.forecast)


class Counting:
    count = 0

    def __call__(self, candidate: Candidate, rates: Rates) -> Simulated:
        self.count += 1
        return simulate(candidate, rates)


@pytest.mark.full
def test_a_search_that_weighs_clipped_steps_simulates_little_more(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for seen in (None, NOTHING_SEEN):
        played = Counting()
        monkeypatch.setattr("anyfit.planning.evaluation.simulate", played)
        fastest(profile_with(seen))
        counts.append(played.count)
    assert counts[1] <= 2 * counts[0]


@pytest.mark.parametrize(("step", "waits", "redone", "most"), [(0.5, 0.7, 1.0, 0.4), (0.5, 0.5, 0.5, 1.0), (0.5, 1.2, 1.0, 1.0)])
def test_speculation_pays_up_to_a_share_of_clipped_steps(step: float, waits: float, redone: float, most: float) -> None:
    forecast = replace(planned_with(None).forecast, step_seconds=step, clipping=Clipping(waits, redone, 0.5))
    assert forecast.most_clipped == pytest.approx(most)
    at = forecast.most_clipped
    if 0 < at < 1:
        assert (1 - at) * step + at * redone == pytest.approx(waits)
    assert planned_with(None).forecast.most_clipped == 0.5


def test_an_evaluation_looks_at_no_more_than_it_has_to() -> None:
    profile = profile_with(NOTHING_SEEN)
    space = Space(profile)
    evaluation: Evaluation = space.evaluation
    offer = space.local.best(8, starts=1)
    assert offer is not None
    assert offer.knobs is not None
    assert evaluation.is_under(offer.knobs, offer.seconds * 1.001)
    assert not evaluation.is_under(offer.knobs, offer.seconds)
    assert evaluation.bound(offer.knobs) <= offer.seconds
