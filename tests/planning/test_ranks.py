"""Plans of many ranks: what they exchange by hand, the best of all divisions, and every sentence of a why."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfit import Machine, NoPlan, Plan
from anyfit.costing.links import Links
from anyfit.planning import search
from anyfit.planning.answers import answered
from anyfit.planning.bound import least_seconds
from anyfit.planning.candidate import Candidate, Rates
from anyfit.planning.fastest import RANKS_TIE, Found, described, fastest
from anyfit.planning.knobs import Knobs
from anyfit.planning.reasons import settled
from anyfit.planning.simulation import computation, simulate
from anyfit.planning.space import WORTH_LEAVING, Space
from anyfit.values.calibration import Calibration
from anyfit.values.mesh import AXES
from anyfit.values.plan import Placement
from anyfit.values.profile import Division, Exchange, HostRates, Profile
from anyfit.values.units import parse_bytes, show_bytes, show_seconds

from .profiles import DISK, GIB, MIB, candidates
from .test_answers import BLOCKS, chain, check_sentences, with_moves

CALIBRATION = Calibration.of("cuda")
EASY = Rates(
    HostRates(1e9, 1e9, 1e9, overlaps=True), norm_seconds=1e-12, update_seconds=1e-11, disk=DISK, calibration=CALIBRATION
)
NONE = Exchange(0.0, 0.0)


def over(profile: Profile, node: int, nodes: int = 1) -> Profile:
    """The same on so many H100s, each with the profile's memory and batch."""
    divisions = Links(Machine.load("h100-node"), node, nodes).divisions()
    return replace(profile, divisions=divisions, batch_size=profile.batch_size * node * nodes)


def slow_links(profile: Profile, times: float) -> Profile:
    def slower(each: Exchange) -> Exchange:
        return Exchange(each.latency_seconds, times * each.seconds_per_byte)

    divisions = tuple(replace(each, gather=slower(each.gather), reduce=slower(each.reduce)) for each in profile.divisions)
    return replace(profile, divisions=divisions)


PROFILES: dict[str, Callable[[], Profile]] = {
    "room for all on each": lambda: over(chain(16 * GIB), 8),
    "room where the optimizer is divided": lambda: over(chain(4 * GIB), 8),
    "half of the room": lambda: over(chain(5 * GIB // 2), 8),
    "little": lambda: over(chain(3 * GIB // 2), 2),
    "less": lambda: over(chain(GIB), 2),
    "little on two nodes": lambda: over(chain(3 * GIB // 2), 2, 2),
    "many nodes": lambda: over(chain(3 * GIB // 2), 8, 128),
    "slow links": lambda: slow_links(over(chain(5 * GIB // 2), 8, 2), 100),
    "blocks that are long for what they keep": lambda: over(with_moves(chain(GIB)), 2),
    "small passes": lambda: over(chain(2 * GIB, sizes=(1,)), 4),
}


@pytest.fixture(scope="module", params=list(PROFILES))
def case(request: pytest.FixtureRequest) -> tuple[Profile, Found, Plan]:
    profile = PROFILES[request.param]()
    found = fastest(profile)
    assert found is not None
    found = settled(found)
    return profile, found, answered(found)


def of_one(plan: Plan) -> Plan:
    """As one rank of it sees it."""
    whole = {"weight_shards": 1, "gradient_shards": 1, "optimizer_shards": 1}
    return replace(
        plan,
        batch_size=plan.share,
        mesh=dict.fromkeys(AXES, 1),
        chunks=tuple(replace(each, **whole) for each in plan.chunks),  # type: ignore[arg-type]
        decisions=tuple(each for each in plan.decisions if each.name != "ranks"),
    )


def test_every_sentence_of_a_why_is_true_in_the_simulator(case: tuple[Profile, Found, Plan]) -> None:
    profile, found, plan = case
    assert plan == replace(search(profile), decisions=plan.decisions)
    check_sentences(found.profile, found, of_one(plan))
    mine = found.profile.division
    assert mine is not None
    assert plan.decision("ranks").choice == f"{mine.ranks}: {described(mine)}"
    named = {described(each): each for each in profile.divisions}
    seconds, needed = plan.forecast.step_seconds, plan.forecast.needed_bytes
    for why in plan.decision("ranks").why.removeprefix("fewer moving parts; ").split("; "):
        if said := re.fullmatch(
            r"(.+) \((nothing|part of it) on the host\) would take (.+) "
            r"(more a step|less, too close to tell apart,) and (.+) (less|more) memory",
            why,
        ):
            assert named[said[1]] != mine
            other = planned(profile, named[said[1]], said[2])
            assert said[3] == show_seconds(abs(other.chosen.step_seconds - seconds))
            assert (said[4] == "more a step") == (other.chosen.step_seconds >= seconds)
            assert said[5] == show_bytes(abs(needed - other.chosen.needed_bytes))
            assert said[6] == ("less" if needed >= other.chosen.needed_bytes else "more")
        elif said := re.fullmatch(r"(.+) \(nothing on the host\) would need (.+) and does not fit", why):
            space = Space(profile.sharded(named[said[1]]))
            sizes = [each.micro_batch for each in space.profile.passes]
            assert not any(each.local.on_device(size) for each in space.sizes for size in sizes)
            least = space.least_needed_bytes()
            assert said[2] == show_bytes(least)
        elif why == "no other could take less":
            assert found.tried.keys() == {mine}
        else:
            raise AssertionError(f"no test knows the sentence {why!r}")


def planned(profile: Profile, division: Division, host: str) -> Found:
    """With that division, and nothing on the host where it says so."""
    if host == "nothing":
        space = Space(profile.sharded(division))
        offers = [space.local.on_device(each.micro_batch) for each in space.profile.passes]
        best = min((each for each in offers if each), key=lambda each: each.simulated.step_seconds)
        found = fastest(replace(profile, divisions=(division,), passes=(best.candidate.profile_pass,), host_limit_bytes=3 * GIB))
    else:
        found = fastest(replace(profile, divisions=(division,)))
    assert found is not None
    return found


def test_the_profiles_have_all_kinds_of_plans() -> None:
    found = [fastest(make()) for make in PROFILES.values()]
    divisions = [each.profile.division for each in found if each is not None]
    assert len(divisions) == len(PROFILES)
    assert {(each.gradients, each.weights) for each in divisions if each is not None} >= {(False, False), (True, True)}
    assert any(each is not None and 1 < each.shards < each.ranks for each in divisions)
    assert any(each is not None and each.shards == each.ranks for each in divisions)
    assert {each.offer.uses_host for each in found if each is not None and each.offer is not None} == {True, False}


@pytest.mark.full
@settings(max_examples=25)
@given(st.integers(700 * MIB, 6 * GIB), st.sampled_from([(2, 1), (8, 1), (2, 2), (8, 4)]), st.sampled_from([1.0, 30.0, 1000.0]))
def test_the_choice_is_the_best_of_all_divisions_and_keeps_every_limit(
    device_bytes: int, rank_grid: tuple[int, int], slowness: float
) -> None:
    """By seconds within a hundredth, of those with nothing on the host; or what fits, where only with the host something does."""
    profile = slow_links(over(chain(device_bytes), *rank_grid), slowness)
    stays: dict[Division, float] = {}
    for division in profile.divisions:
        space = Space(profile.sharded(division))
        offers = [space.local.on_device(each.micro_batch) for each in space.profile.passes]
        stays |= {division: min(each.simulated.step_seconds for each in offers if each)} if any(offers) else {}
    try:
        plan = search(profile)
    except NoPlan:
        assert not stays
        return
    assert plan.forecast.needed_bytes <= device_bytes
    assert plan.forecast.peak_bytes["host"] <= profile.host_limit_bytes
    assert plan.ranks == rank_grid[0] * rank_grid[1]
    assert plan.batch_size == profile.batch_size
    if plan.forecast.peak_bytes["host"] and stays:
        assert plan.forecast.step_seconds <= (1 - WORTH_LEAVING) * min(stays.values()) * (1 + 1e-9)
    elif stays:
        assert plan.forecast.step_seconds <= (1 + RANKS_TIE) * min(stays.values()) * (1 + 1e-9)


def test_the_fewest_moving_parts_are_taken_of_those_that_are_not_told_apart() -> None:
    free = over(chain(64 * GIB), 8)
    free = replace(free, divisions=tuple(replace(each, gather=NONE, reduce=NONE, norm_seconds=0.0) for each in free.divisions))
    free = replace(free, memory_bytes_per_second=1e15, update=replace(free.update, seconds=0.0))
    plan = search(free)  # updates take no time either: nothing is gained
    assert {each.optimizer_shards for each in plan.chunks} == {1}
    assert plan.decision("ranks").why.startswith("fewer moving parts; ") or " more a step" in plan.decision("ranks").why
    assert set(plan.activations.values()) == set()


def test_a_batch_that_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="it must be a multiple of the 8 ranks"):
        search(replace(over(chain(4 * GIB), 8), batch_size=12))


def test_where_nothing_fits_the_verdict_is_of_the_most_divided() -> None:
    with pytest.raises(NoPlan, match="over 2 ranks does not fit") as raised:
        search(over(chain(GIB // 4), 2))
    assert raised.value.changes


# ---------------------------------------------------------------------- the simulator


def resident(level: int, accumulation: int, gather: Exchange, reduce: Exchange) -> Candidate:
    """All on the device, a chunk a block, over two ranks, with slots for two chunks."""
    profile = chain(64 * GIB, sizes=(1,))
    division = Division(2, 2, level > 1, level > 2, gather, reduce, 0.0, False)
    profile = replace(profile, batch_size=accumulation, division=division).laid_out(profile.other_layouts[1])
    candidate = Space(profile).candidates.of(Knobs(1, resident=len(profile.chunks)))
    return replace(candidate, slots=2 if level > 2 else 0, prefetch=1 if level > 2 else 0)


def work(candidate: Candidate) -> float:
    return CALIBRATION.overlap_slowdown.value * candidate.accumulation * candidate.profile_pass.seconds


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_exchanges_that_take_no_time_leave_the_computation_alone(level: int, accumulation: int) -> None:
    simulated = simulate(resident(level, accumulation, NONE, NONE), EASY)
    assert simulated.exchange_seconds == 0
    assert sum(simulated.waits_seconds.values()) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("accumulation", [1, 3, 7])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_each_level_exchanges_what_it_says(level: int, accumulation: int) -> None:
    """A chunk is reduced once a step, or for every micro-batch; all-gathered once a step, or for forward and backward."""
    gather, reduce = 1e-5, 1e-3
    candidate = resident(level, accumulation, Exchange(gather, 0.0), Exchange(reduce, 0.0))
    simulated = simulate(candidate, EASY)
    reduces = BLOCKS * (accumulation if level > 1 else 1)
    # the two chunks at the end of forward are there for backward, and the first two for the next micro-batch's forward
    gathers = BLOCKS if level < 3 else accumulation * 2 * (BLOCKS - 1) + 1
    assert simulated.exchange_seconds == pytest.approx(reduces * reduce + gathers * gather, rel=0.02)
    assert simulated.step_seconds >= work(candidate)


def test_a_link_that_is_slower_than_the_computation_sets_the_pace() -> None:
    """Nothing but the link counts, the more the slower it is."""
    for level in (1, 2, 3):
        candidate = resident(level, 2, Exchange(10.0, 0.0), Exchange(10.0, 0.0))
        simulated = simulate(candidate, EASY)
        assert simulated.step_seconds == pytest.approx(simulated.exchange_seconds, rel=0.05)


def test_the_last_reduction_of_a_step_hides_behind_nothing() -> None:
    candidate = resident(1, 1, NONE, Exchange(1e-3, 0.0))
    simulated = simulate(candidate, EASY)
    assert simulated.waits_seconds["exchange"] == pytest.approx(1e-3)


def test_copies_and_exchanges_on_one_link_are_slower_together() -> None:
    base = resident(3, 1, Exchange(2e-3, 0.0), Exchange(2e-3, 0.0))
    placements = (Placement(gradients="host", optimizer="host", update="host"),) * len(base.chunks)
    apart = replace(base, placements=placements)
    together = replace(apart, division=replace(apart.division, shares_copies=True))
    rates = replace(EASY, host=HostRates(1e12, 1e9, 1e9, overlaps=True))
    assert simulate(together, rates).step_seconds > 1.01 * simulate(apart, rates).step_seconds


def test_many_micro_batches_are_played_as_if_all_were(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = resident(3, 9, Exchange(2e-3, 0.0), Exchange(4e-3, 0.0))
    few = simulate(candidate, EASY)
    monkeypatch.setattr(computation, "RANK_PASSES", 99)
    monkeypatch.setattr(computation, "RANK_STEPS", 5)
    assert few.step_seconds == pytest.approx(simulate(candidate, EASY).step_seconds)


exchanges = st.builds(Exchange, st.floats(0, 1e-2), st.floats(0, 1e-8))
divisions = st.builds(
    lambda shards, level, gather, reduce, shares: Division(8, shards, level > 1, level > 2, gather, reduce, 1e-5, shares),
    st.sampled_from([2, 8]),
    st.integers(1, 3),
    exchanges,
    exchanges,
    st.booleans(),
)


@given(candidates(), divisions, st.booleans())
def test_no_step_of_a_rank_is_under_its_bound_and_each_is_its_parts(
    candidate: Candidate, division: Division, overlaps: bool
) -> None:
    slots = max(candidate.slots, 2)
    candidate = replace(candidate, division=division, slots=slots)
    rates = replace(EASY, host=replace(EASY.host, overlaps=overlaps))
    simulated = simulate(candidate, rates)
    assert least_seconds(candidate, rates) <= simulated.step_seconds * (1 + 1e-9)
    if overlaps:
        handed_out = CALIBRATION.update_launch_seconds.value * sum(each.route != "resident" for each in candidate.placements)
        parts = simulated.compute_seconds + simulated.recompute_seconds + simulated.update_seconds + handed_out
        assert simulated.step_seconds == pytest.approx(parts + sum(simulated.waits_seconds.values()))


def test_what_more_memory_saves_is_said_by_a_search_with_that_much(case: tuple[Profile, Found, Plan]) -> None:
    profile, found, plan = case
    said = [each for each in plan.decisions if each.name.endswith(" limit")]
    assert found.offer is not None
    assert bool(said) == (not found.offer.uses_host and bool(plan.activations))
    assert found.profile.division is not None
    for each in said:
        limit = profile.device_limit_bytes + parse_bytes(each.choice.partition(" more ")[0])
        there = fastest(replace(profile, divisions=(found.profile.division,), device_limit_bytes=limit))
        assert there is not None
        saved = plan.forecast.step_seconds - there.chosen.step_seconds
        assert each.why == (f"{show_seconds(saved)} less a step" if saved > 0 else "no less a step")
