"""What a plan says of itself, and of what would be otherwise, holds when it is planned and simulated so."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anyfit import NoPlan, Plan
from anyfit.planning import search
from anyfit.planning.answers import amount_beside, answered, at_limits, change_to, rounded_up, shortfall
from anyfit.planning.candidate import Candidate
from anyfit.planning.fastest import TIE, Found, fastest
from anyfit.planning.footprint import footprint_of
from anyfit.planning.forecast import forecast
from anyfit.planning.local_search import WORTH
from anyfit.planning.reasons import settled
from anyfit.planning.simulation import simulate
from anyfit.planning.space import WORTH_LEAVING, Space
from anyfit.values.answers import Refused, beside, ranked
from anyfit.values.prices import Price
from anyfit.values.profile import ChoiceCost, ChunkCost, HostRates, Layout, Pass, Profile, Segment, StateBytes, UpdateCost
from anyfit.values.units import parse_bytes, show_bytes, show_seconds

from .profiles import GIB, MIB, block, one_pass, small_profile

BLOCKS, CHUNKS_A_BLOCK, ELEMENTS = 6, 2, 20_000_000
GPU = HostRates(1e9, 20e9, 20e9, overlaps=True)
SLOW_HOST = HostRates(5e7, 20e9, 20e9, overlaps=True)
CPU = HostRates(1e9, 20e9, 20e9, overlaps=False)
NARROW = 560 * MIB


def chain_pass(size: int, *more: str) -> Pass:
    """Blocks that take 10 ms a sample and keep 100 MiB of it, with an embedding and a head around them; `more` choices for what
    they keep."""
    kept, seconds = 100 * MIB * size, 0.002 + 0.010 * size
    choices = {
        "keep": ChoiceCost(kept, 0, 0.0),
        "recompute": ChoiceCost(kept // 10, 0, seconds),
        "selective": ChoiceCost(kept // 2, 0, seconds / 4),
    }
    if "offload" in more:
        choices["offload"] = ChoiceCost(kept // 100, kept, 2 * kept / GPU.up_bytes_per_second)
    inner = block(seconds_forward=seconds, seconds_backward=2 * seconds, kept_bytes=kept, choices=choices)
    around = block("", seconds_forward=0.0, seconds_backward=0.0, kept_bytes=0, choices={})
    blocks = (*(replace(inner, name=f"layers.{index}") for index in range(BLOCKS)), around)
    forward = [Segment(index, "forward", seconds, kept + 20 * MIB) for index in range(BLOCKS)]
    backward = [Segment(index, "backward", 2 * seconds, kept + 40 * MIB) for index in reversed(range(BLOCKS))]
    peak = BLOCKS * kept + 40 * MIB + 2 * BLOCKS * CHUNKS_A_BLOCK * ELEMENTS
    return one_pass(
        size,
        blocks=blocks,
        segments=(*forward, *backward),
        peak_bytes=peak,
        peak_bytes_accumulating=peak - 2 * BLOCKS * CHUNKS_A_BLOCK * ELEMENTS,
    )


def layout(chunks_a_block: int) -> Layout:
    elements = ELEMENTS * CHUNKS_A_BLOCK // chunks_a_block
    chunk = ChunkCost(2 * elements, elements, True, 2 * elements, 10 * elements, True, (), is_split=True)
    chunks = tuple(replace(chunk, blocks=(index // chunks_a_block,)) for index in range(BLOCKS * chunks_a_block))
    return Layout(2 * elements, chunks)


def chain(device_bytes: int, host: HostRates = GPU, host_bytes: int = 16 * GIB, sizes: tuple[int, ...] = (4, 2, 1)) -> Profile:
    """Bf16 weights with masters and AdamW, in chunks, two of them a block, or one, or four."""
    usual, *others = (layout(count) for count in (CHUNKS_A_BLOCK, 2 * CHUNKS_A_BLOCK, CHUNKS_A_BLOCK // 2))
    whole = BLOCKS * CHUNKS_A_BLOCK * ELEMENTS
    return small_profile(
        precision="bf16",
        batch_size=4,
        parameters=whole,
        trainable=whole,
        passes=tuple(chain_pass(size) for size in sizes),
        blocks=BLOCKS + 1,
        state=StateBytes(2 * whole, 2 * whole, 8 * whole, 0, 0, gradients=2 * whole, accumulators=4 * whole),
        update=UpdateCost(seconds=0.02, scratch_bytes=0),
        chunks=usual.chunks,
        offload_chunk_bytes=usual.chunk_bytes,
        other_layouts=tuple(others),
        host=host,
        memory_bytes_per_second=1e12,
        device_limit_bytes=device_bytes,
        host_limit_bytes=host_bytes,
    )


def with_moves(profile: Profile) -> Profile:
    """The same where activations can move."""
    return replace(profile, passes=tuple(chain_pass(each.micro_batch, "offload") for each in profile.passes))


SLOW_COPIES = HostRates(1e9, 2e9, 2e9, overlaps=True)
PROFILES: dict[str, Callable[[], Profile]] = {
    "a GPU with room for all": lambda: chain(16 * GIB),
    "a GPU with room for two passes": lambda: chain(6 * GIB),
    "a GPU that lacks a little": lambda: chain(4 * GIB),
    "a GPU with half of the room": lambda: chain(5 * GIB // 2),
    "a GPU with little": lambda: chain(3 * GIB // 2),
    "a GPU with little, and a host that is short": lambda: chain(3 * GIB // 2, host_bytes=13 * GIB // 2),
    "a GPU beside a slow host": lambda: chain(2 * GIB, SLOW_HOST),
    "a GPU that is asked for small passes": lambda: chain(2 * GIB, sizes=(1,)),
    "a GPU with room for small chunks only": lambda: chain(NARROW),
    "a GPU for whose chunks there is one size": lambda: replace(chain(2 * GIB), other_layouts=()),
    "a GPU whose blocks are long for what they keep": lambda: with_moves(chain(2 * GIB)),
    "the same with little room": lambda: with_moves(chain(3 * GIB // 2)),
    "the same with slow copies": lambda: with_moves(chain(2 * GIB, SLOW_COPIES)),
    "the same with a host that is short": lambda: with_moves(chain(2 * GIB, host_bytes=13 * GIB // 2)),
    "a CPU where activations would move": lambda: with_moves(chain(4 * GIB, CPU)),
    "a CPU with room for all": lambda: chain(16 * GIB, CPU),
    "a CPU that lacks a little": lambda: chain(4 * GIB, CPU),
    "a CPU with little": lambda: chain(3 * GIB // 2, CPU),
    "without chunks": small_profile,
    "without chunks, and less room": lambda: small_profile(device_limit_bytes=int(1.5 * GIB)),
}


@pytest.fixture(scope="module", params=list(PROFILES))
def case(request: pytest.FixtureRequest) -> tuple[Profile, Found, Plan]:
    profile = PROFILES[request.param]()
    found = fastest(profile)
    assert found is not None
    found = settled(found)
    return profile, found, answered(found)


# ---------------------------------------------------------------------- each sentence of a why


def simulated(space: Space, candidate: Candidate) -> tuple[float, int]:
    """Seconds, and the device bytes that must be there, by the simulator and the scales alone."""
    reserved = space.evaluation.reserved_bytes(footprint_of(space.profile, candidate))
    needed = int(reserved * (1 + space.profile.offload_error))
    return simulate(candidate, space.evaluation.rates).step_seconds, needed


def candidate_of(profile: Profile, plan: Plan) -> Candidate:
    """What the plan says, as the simulator takes it."""
    (each,) = [each for each in profile.passes if each.micro_batch == plan.micro_batch]
    (stage,) = plan.stages
    activations = tuple(stage.activations.get(block.name, "keep") for block in each.blocks)
    chunks = {
        each.chunk_bytes: each.chunks for each in (Layout(profile.offload_chunk_bytes, profile.chunks), *profile.other_layouts)
    }
    placed = chunks[plan.chunk_bytes], plan.chunks, plan.slots, plan.prefetch
    return Candidate(each, plan.accumulation, activations, *placed, profile.rank_division)


def routes(candidate: Candidate) -> set[str]:
    return {placement.route for placement in candidate.placements}


def speculates(candidate: Candidate) -> bool:
    return any(placement.speculates for placement in candidate.placements)


def otherwise(space: Space, plan: Plan, choice: str) -> tuple[int, dict[str, Any], Callable[[Candidate], bool]]:
    """The micro-batch and the knobs of the neighbour that a sentence names, and whether a candidate is as the sentence says.
    `space` is in the plan's chunks."""
    size = plan.micro_batch
    last = space.candidates.last_rung(size)
    named: dict[str, tuple[dict[str, Any], Callable[[Candidate], bool]]] = {
        "none streamed": ({"streamed": 0.0}, lambda found: "streamed" not in routes(found)),
        "none on the host": ({"streamed": 1.0, "host_first": 0.0}, lambda found: "host" not in routes(found)),
        "updates that wait for the norm": ({"speculates": False}, lambda found: not speculates(found)),
        "updates before the norm is known": ({"speculates": True}, speculates),
        "all recomputed": (
            {"rung": last, "offloaded": 0},
            lambda found: not {"keep", "offload"} & set(found.activations[:BLOCKS]),
        ),
        "all kept": ({"rung": 0, "offloaded": 0}, lambda found: set(found.activations) == {"keep"}),
        "none offloaded": ({"offloaded": 0}, lambda found: "offload" not in found.activations),
        "all offloaded": ({"rung": 0, "offloaded": BLOCKS}, lambda found: set(found.activations[:BLOCKS]) == {"offload"}),
    }
    if choice in named:
        return (size, *named[choice])
    whole = re.fullmatch(r"(\d+) in one pass|(\d+) in each of (\d+) passes", choice)
    assert whole is not None, f"no test knows {choice!r}"
    size = int(whole[1] or whole[2])
    return size, {}, lambda found: found.micro_batch == size


def test_every_sentence_of_a_why_is_true_in_the_simulator(case: tuple[Profile, Found, Plan]) -> None:
    profile, found, plan = case
    assert plan == replace(search(profile), decisions=plan.decisions)
    check_sentences(profile, found, plan)


def check_sentences(profile: Profile, found: Found, plan: Plan) -> None:
    """Of one device, or one of several ranks."""
    forecasts = {each.micro_batch: forecast(profile, each) for each in profile.passes}
    seconds, needed = plan.forecast.step_seconds, plan.forecast.needed_bytes
    space: Space | None = None
    whole = f"all on the {'GPU' if profile.host is not None and profile.host.overlaps else 'device'}"
    if plan.chunks:
        mine = candidate_of(profile, plan)
        space = Space(profile).laid_out_like(mine)
        assert plan.decision("chunk size").choice == show_bytes(plan.chunk_bytes)
        assert seconds == pytest.approx(simulated(space, mine)[0])
        assert needed == simulated(space, mine)[1]
    for decision in plan.decisions:
        why = decision.why
        if decision.name.endswith(" limit"):
            continue  # has a test of its own
        if said := re.fullmatch(r"it fits, (.+) to spare after the safety margin", why):
            assert said[1] == show_bytes(profile.device_limit_bytes - needed)
        elif said := re.fullmatch(r"activations do not all fit \((\S+) (\S+ )?of (\S+ (\S+))\)", why):
            assert decision.choice.startswith("weights and optimizer on the ")
            assert {placement.optimizer for placement in plan.chunks} == {"device"}
            least = min(each.needed_bytes for each in forecasts.values())
            assert least > profile.device_limit_bytes
            assert (f"{said[1]} {(said[2] or said[4]).strip()}", said[3]) == (
                show_bytes(least),
                show_bytes(profile.device_limit_bytes),
            )
        elif said := re.fullmatch(rf"{whole}, with all activations kept, would need (.+), in passes of (\d+)", why):
            least = min(each.needed_bytes for each in forecasts.values())
            assert least > profile.device_limit_bytes
            assert (said[1], int(said[2])) == (show_bytes(least), min(forecasts))
        elif said := re.fullmatch(r"nothing on the host would (take|need) (.+?)(?: more a step|, in passes of \d+)", why):
            by_size = [[space.local.on_device(each.micro_batch) for each in profile.passes] for space in Space(profile).sizes]
            stays = next((each for each in by_size if any(each)), [])
            if said[1] == "take":
                assert said[2] == show_seconds(min(each.simulated.step_seconds for each in stays if each) - seconds)
                assert seconds <= (1 - WORTH_LEAVING) * min(each.simulated.step_seconds for each in stays if each)
            else:
                assert not any(stays)
        elif said := re.fullmatch(rf"{whole}, with all activations kept, would take (.+) more a step", why):
            fitting = [each for each in forecasts.values() if each.needed_bytes <= profile.device_limit_bytes]
            assert said[1] == show_seconds(min(each.step_seconds for each in fitting) - seconds)
        elif said := re.fullmatch(
            r"(?:the fewest passes; |the usual size; )?(.+) would take "
            r"(?:(.+) (?:more a step|less, too close to tell apart,)|as long,) and (?:(.+) (less|more)|as much) memory",
            why,
        ):
            other, bytes_needed = priced(profile, space, found, plan, forecasts, said[1])
            assert (said[2] or show_seconds(0.0)) == show_seconds(abs(other - seconds))
            assert "as long" in why or ("more a step" in why) == (other >= seconds)
            assert (said[3] or "0 B") == show_bytes(abs(needed - bytes_needed))
            assert said[4] == (None if needed == bytes_needed else "less" if needed > bytes_needed else "more")
        elif said := re.fullmatch(r"(.+) would be the same", why):
            other, bytes_needed = priced(profile, space, found, plan, forecasts, said[1])
            assert (show_seconds(abs(other - seconds)), bytes_needed) == (show_seconds(0.0), needed)
        elif said := re.fullmatch(r"(.+) would need (.+) and does not fit", why):
            bytes_needed = priced(profile, space, found, plan, forecasts, said[1])[1]
            assert bytes_needed > profile.device_limit_bytes
            assert said[2] == show_bytes(bytes_needed)
        elif said := re.fullmatch(r"(.+) would not fit", why):
            assert space is not None
            if said[1] in (others := spaces_of_other_chunks(profile)):
                assert others[said[1]].best(plan.micro_batch) is None
                continue
            size, knobs, _ = otherwise(space, plan, said[1])
            assert space.best(size, **knobs) is None
        elif why == "the only one asked for":
            assert len(profile.passes) == 1
        elif why == "other sizes make the same chunks":
            assert not profile.other_layouts
        elif why == "the gradients of several passes add up first":
            assert plan.accumulation > 1
            assert not any(placement.speculates for placement in plan.chunks)
        elif why == "a CPU has nothing to stream them through":
            assert profile.host is not None
            assert not profile.host.overlaps
            assert "streamed" not in {placement.route for placement in plan.chunks}
        else:
            raise AssertionError(f"no test knows the sentence {why!r}")


def spaces_of_other_chunks(profile: Profile) -> dict[str, Space]:
    """By what a sentence calls them."""
    return {f"chunks of {show_bytes(each.profile.offload_chunk_bytes)}": each for each in Space(profile).sizes}


def priced(
    profile: Profile, space: Space | None, found: Found, plan: Plan, forecasts: dict[int, Any], choice: str
) -> tuple[float, int]:
    """Seconds and device bytes of the neighbour with this choice, planned with that decision forced."""
    if space is None:
        size = int(choice.split()[0].rstrip(","))
        return forecasts[size].step_seconds, forecasts[size].needed_bytes
    if choice in (others := spaces_of_other_chunks(profile)):
        assert found.offer is not None
        offer = others[choice].best_like(found.offer)
        assert offer is not None
        assert others[choice].evaluation.fits(footprint_of(profile, offer.candidate))
        assert others[choice].profile.offload_chunk_bytes != plan.chunk_bytes
        return simulated(space, offer.candidate)
    size, knobs, is_so = otherwise(space, plan, choice)
    offer = space.best(size, starts=1, **knobs)
    assert offer is not None
    assert is_so(offer.candidate)
    assert offer.candidate != candidate_of(profile, plan)
    return simulated(space, offer.candidate)


def test_the_profiles_have_all_kinds_of_plans() -> None:
    """So that the test of the sentences above has seen them."""
    plans = [search(make()) for make in PROFILES.values()]
    assert len({plan.accumulation for plan in plans}) > 1
    assert {route for plan in plans for route in {each.route for each in plan.chunks}} == {"resident", "streamed", "host"}
    assert {"recompute", "selective", "offload"} <= {choice for plan in plans for choice in plan.activations.values()}
    assert any("host" in {each.weights for each in plan.chunks} for plan in plans)
    assert {any(each.speculates for each in plan.chunks) for plan in plans if plan.chunks} == {True, False}
    assert {plan.chunk_bytes for plan in plans if plan.chunks} == {2 * ELEMENTS, ELEMENTS}
    whys = [plan.decision("chunk size").why for plan in plans if plan.chunks]
    assert any(why.startswith("the usual size; ") for why in whys)
    assert any(" more a step" in why for why in whys)


def offloaded(profile: Profile) -> int:
    """Blocks."""
    return Counter(search(profile).activations.values())["offload"]


def test_activations_move_where_blocks_are_long_for_what_they_keep_and_copies_are_fast() -> None:
    fast = with_moves(chain(2 * GIB))
    plan = search(fast)
    assert offloaded(fast) == BLOCKS
    assert "offloaded to the host" in plan.decision("activations").choice
    assert plan.forecast.step_seconds < 0.95 * search(chain(2 * GIB)).forecast.step_seconds
    assert plan.forecast.peak_bytes["host"] <= fast.host_limit_bytes


def test_activations_do_not_move_where_copies_are_slow_or_the_host_is_short_or_the_same() -> None:
    assert offloaded(with_moves(chain(2 * GIB, SLOW_COPIES))) == 0
    assert offloaded(with_moves(chain(2 * GIB, CPU))) == 0
    assert offloaded(with_moves(chain(2 * GIB, host_bytes=13 * GIB // 2))) < offloaded(with_moves(chain(2 * GIB)))


def test_no_alternative_is_faster_than_the_plan_but_in_chunks_of_another_size_by_little(
    case: tuple[Profile, Found, Plan],
) -> None:
    profile, found, plan = case
    if found.offer is None:
        return
    usual = plan.chunk_bytes == profile.offload_chunk_bytes
    for other in plan.alternatives:
        tie = 1 - TIE if other.decision == "chunk size" and usual else 1
        assert other.step_seconds >= tie * plan.forecast.step_seconds
        if other.choice == f"chunks of {show_bytes(profile.offload_chunk_bytes)}":
            assert plan.forecast.step_seconds < (1 - TIE) * other.step_seconds


def test_chunks_of_another_size_are_taken_where_only_they_fit() -> None:
    profile = chain(NARROW)
    assert search(profile).chunk_bytes == ELEMENTS
    with pytest.raises(NoPlan):
        search(replace(profile, other_layouts=()))


# ---------------------------------------------------------------------- what more memory is worth


def test_more_memory_saves_what_is_said_by_a_search_with_that_much(case: tuple[Profile, Found, Plan]) -> None:
    profile, found, plan = case
    said = {decision.name: decision for decision in plan.decisions if decision.name.endswith(" limit")}
    assert ("device limit" in said) == bool(plan.chunks)
    for name, field in (("device limit", "device_limit_bytes"), ("host limit", "host_limit_bytes")):
        limit = getattr(profile, field)
        found_there = []
        for more in (amount_beside(limit), amount_beside(limit) // 2)[: 2 if name == "device limit" else 1]:
            there = fastest(replace(profile, **{field: limit + more}))
            assert there is not None
            found_there.append(plan.forecast.step_seconds - there.chosen.step_seconds)
        if name not in said:
            if plan.chunks:
                assert max(found_there) <= WORTH * plan.forecast.step_seconds
            continue
        size, _, memory = said[name].choice.partition(" more ")
        assert parse_bytes(size) == amount_beside(limit)
        assert memory == {"host limit": "host memory"}.get(name, "GPU memory" if found.space.is_gpu else "device memory")  # type: ignore[union-attr]
        if said[name].why == "no less a step":
            assert max(found_there) <= WORTH * plan.forecast.step_seconds
        else:
            assert said[name].why in [f"{show_seconds(less)} less a step" for less in found_there if less > 0]


def test_a_plan_never_gets_slower_with_more_memory() -> None:
    found = fastest(chain(3 * GIB // 2))
    assert found is not None
    seconds = found.chosen.step_seconds
    for more in (64 * MIB, 256 * MIB, GIB, 2 * GIB):
        other = at_limits(found, device_limit_bytes=found.profile.device_limit_bytes + more)
        assert other.chosen.step_seconds <= seconds
        assert other.chosen.needed_bytes <= other.profile.device_limit_bytes
        assert other.profile.device_limit_bytes == found.profile.device_limit_bytes + more


@pytest.mark.parametrize("limit", [1, 1000, 24 * GIB, int(23.6 * GIB), 80 * GIB, 141 * GIB])
def test_the_amount_is_a_power_of_two_near_an_eighth(limit: int) -> None:
    amount = amount_beside(limit)
    assert amount.bit_count() == 1
    assert amount == 1 or 1 / 1.42 <= amount / (limit / 8) <= 1.42


# ---------------------------------------------------------------------- when nothing fits


TOO_SMALL: dict[str, Callable[[], Profile]] = {
    "the device": lambda: chain(GIB // 4),
    "the host": lambda: chain(3 * GIB // 2, host_bytes=4 * GIB),
    "both": lambda: chain(GIB // 4, host_bytes=4 * GIB),
    "a CPU": lambda: chain(GIB // 4, CPU),
}


@pytest.mark.parametrize("which", TOO_SMALL)
def test_the_memory_that_is_offered_where_nothing_fits_is_enough_and_gives_the_step_that_is_said(which: str) -> None:
    profile = TOO_SMALL[which]()
    with pytest.raises(NoPlan) as raised:
        search(profile)
    verdict = raised.value
    assert verdict.tier == ("host" if which == "the host" else "device")
    assert verdict.changes
    for change in verdict.changes:
        limits = {
            f"{tier}_limit_bytes": parse_bytes(size) for tier, size in re.findall(r"(device|host)_memory='(.+?)'", change.what)
        }
        plan = search(replace(profile, **limits))  # type: ignore[arg-type]
        assert plan.forecast.step_seconds <= change.step_seconds * (1 + 1e-9)
        assert plan.forecast.step_seconds >= 0.9 * change.step_seconds
        assert f"\n  {change.what}: {show_seconds(change.step_seconds)} a step" in str(verdict)


@pytest.mark.parametrize("which", TOO_SMALL)
def test_a_byte_less_than_the_shortfall_is_too_little(which: str) -> None:
    profile = TOO_SMALL[which]()
    verdict = shortfall(profile)
    field = f"{verdict.tier}_limit_bytes"
    there = getattr(profile, field) + verdict.shortfall_bytes
    if which != "both":
        assert fastest(replace(profile, **{field: there})) is not None
    assert fastest(replace(profile, **{field: there - 1})) is None


def test_a_change_that_makes_nothing_fit_is_not_offered() -> None:
    assert change_to("as it is", chain(GIB // 4)) is None
    change = change_to("more", chain(2 * GIB))
    assert change is not None
    assert change.step_seconds == pytest.approx(search(chain(2 * GIB)).forecast.step_seconds, rel=0.05)


@pytest.mark.parametrize("size", [1, 1023, 1025, 10**6, 38_488_000_000, 1023 * GIB, 3 * 2**40 + 1])
def test_a_size_that_is_offered_can_be_typed_as_it_is_shown(size: int) -> None:
    assert size <= rounded_up(size) <= parse_bytes(show_bytes(rounded_up(size)).replace(" ", "")) <= 1.02 * size + 10


# ---------------------------------------------------------------------- side by side


def test_plans_side_by_side_show_what_differs_and_by_how_much() -> None:
    plans: dict[str, Plan | NoPlan] = {
        "now": search(chain(3 * GIB // 2)),
        "more": search(chain(16 * GIB)),
        "less": shortfall(chain(GIB // 4)),
    }
    now, more, less = plans.values()
    assert isinstance(now, Plan)
    assert isinstance(more, Plan)
    assert isinstance(less, NoPlan)
    rows = beside(plans)
    assert rows["step"] == [
        f"{show_seconds(now.forecast.step_seconds)} ± {now.forecast.step_error:.0%}",
        f"{show_seconds(more.forecast.step_seconds)} ± {more.forecast.step_error:.0%}",
        f"does not fit, {show_bytes(less.shortfall_bytes)} too little",
    ]
    saved = now.forecast.step_seconds - more.forecast.step_seconds
    rate = more.forecast.tokens_per_second / now.forecast.tokens_per_second - 1
    assert rows["difference"] == ["", f"{show_seconds(saved)} less a step, {rate:+.1%} tokens/s", ""]
    assert rows["model state"] == [now.decision("model state").choice, "all on the GPU", ""]
    assert rows["updates"][1:] == ["-", ""]
    assert rows["device memory"][1] == f"{show_bytes(more.forecast.reserved_bytes)} of 16.0 GiB"
    assert "model" not in rows
    assert "machine" not in rows


def test_machines_are_ranked_by_time_then_by_what_they_lack() -> None:
    outcomes: dict[str, Plan | NoPlan | Refused] = {
        "never": Refused("it does not compute in bfloat16"),
        "tiny": shortfall(chain(GIB // 8)),
        "slow": search(chain(3 * GIB // 2)),
        "small": shortfall(chain(GIB // 4)),
        "fast": search(chain(16 * GIB)),
    }
    found = ranked(outcomes, dict.fromkeys(outcomes, 2), 10**9, {"slow": Price(0.5, "a list", "2026-11-01")})
    assert [each.machine for each in found] == ["fast", "slow", "small", "tiny", "never"]
    assert [each.cost is None for each in found] == [True, False, True, True, True]
    assert {each.devices for each in found} == {2}
    slow = found[1]
    assert isinstance(slow.outcome, Plan)
    assert slow.seconds == pytest.approx(10**9 / slow.outcome.forecast.tokens_per_second)
    assert slow.cost == pytest.approx(0.5 * 10**9 / slow.outcome.forecast.tokens_per_second / 3600)
