"""Optimizer state on the disk, in plans: what the simulation of it holds to, and when the search takes it."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfit.planning import search
from anyfit.planning.answers import answered
from anyfit.planning.bound import least_seconds
from anyfit.planning.candidate import Candidate, Rates
from anyfit.planning.fastest import fastest
from anyfit.planning.footprint import footprint_of
from anyfit.planning.knobs import ON_DISK, Knobs
from anyfit.planning.local_search import WORTH
from anyfit.planning.simulation import simulate
from anyfit.planning.simulation.clock import Clock, SharedServer, Signal
from anyfit.planning.space import Space
from anyfit.values.calibration import Calibration
from anyfit.values.engine import DISK_DEPTH
from anyfit.values.plan import Placement
from anyfit.values.profile import ChunkCost, DiskRates, HostRates, Profile, Segment
from anyfit.values.units import show_bytes
from tests.conftest import FULL
from tests.planning.chains import MICRO_BATCH, narrowed, random_profile, with_disk
from tests.planning.profiles import block, candidates, one_pass
from tests.planning.test_answers import chain
from tests.planning.test_exhaustive import ROUNDING, Plans

GIB = 2**30
DISK = DiskRates(2e9, 1e9, 1.2e9, 0.1, 1000 * GIB, 600 * 10**12, "made up")
seeds = st.integers(0, 2**32 - 1)


# ---------------------------------------------------------------------- the simulation


def ends(*asked: tuple[str, float]) -> list[float]:
    """When each of these is through, all of them asked for at once."""
    clock, over, left = Clock(), Signal(), len(asked)
    server, found = SharedServer(clock, DISK), [0.0] * left

    def end(index: int) -> None:
        nonlocal left
        found[index], left = clock.now, left - 1
        if not left:
            over.fire()

    for index, (way, size) in enumerate(asked):
        server.add(way, size, lambda index=index: end(index))  # type: ignore[misc]
    clock.run(over)
    return found


def test_reads_and_writes_share_the_rate_and_one_alone_has_its_own() -> None:
    assert ends(("read", 2e9)) == pytest.approx([1.0])
    assert ends(("write", 2e9)) == pytest.approx([2.0])
    assert ends(("read", 2e9), ("read", 2e9)) == pytest.approx([1.0, 2.0])
    assert ends(("read", 0.6e9), ("write", 0.6e9)) == pytest.approx([1.0, 1.0])  # 1.2 GB/s together
    # Until the write is over each has 0.6 GB/s; the read's last 1.4 GB then have 2.
    assert ends(("read", 2e9), ("write", 0.6e9)) == pytest.approx([1.7, 1.0])


@given(st.lists(st.tuples(st.sampled_from(["read", "write"]), st.floats(1.0, 1e10)), min_size=1, max_size=12))
def test_a_disk_is_never_faster_than_what_it_does_together_nor_slower_than_one_way_after_the_other(
    asked: list[tuple[str, float]],
) -> None:
    last = max(ends(*asked))
    read, write = (sum(size for way, size in asked if way == each) for each in ("read", "write"))
    assert last >= max(read / 2e9, write / 1e9) * (1 - 1e-9)
    assert last <= (read + write) / 1e9 * (1 + 1e-9)  # the slowest of its rates


def rates(*, overlaps: bool, updates: float = 1e9, disk: DiskRates = DISK) -> Rates:
    host = HostRates(updates, 1e9, 1e9, overlaps=overlaps)
    calibration = Calibration.of("cuda" if overlaps else "cpu")
    return Rates(host, norm_seconds=0.0, update_seconds=0.0, disk=disk, calibration=calibration)


def one_chunk(placement: Placement, elements: int = 100_000_000, seconds: float = 0.5) -> Candidate:
    inner = block(choices={}, kept_bytes=0)
    segments = (Segment(0, "forward", seconds, 0), Segment(0, "backward", seconds, 0))
    each = one_pass(4, blocks=(inner,), segments=segments)
    chunk = ChunkCost(2 * elements, elements, True, 2 * elements, 10 * elements, True, (0,), is_split=True)
    return Candidate(each, 1, ("keep",), (chunk,), (placement,), 0, 0)


def test_a_step_of_one_chunk_is_what_one_counts_by_hand() -> None:
    """Norm, read 1 GB, update 0.1 G parameters, write 1 GB, weights up 0.2 GB; forward and backward, gradients down 0.2 GB."""
    easy, candidate = rates(overlaps=True), one_chunk(ON_DISK[False])
    slowed = 2 * 0.5 * candidate.slowness(easy)
    update = 100_000_000 / easy.host.updates_per_second
    read, write = 1e9 / DISK.read_bytes_per_second, 1e9 / DISK.write_bytes_per_second
    simulated = simulate(candidate, easy)
    sent = 0.2e9 / easy.host.down_bytes_per_second  # while the chunk is read
    expected = slowed + max(read, sent) + update + write + 0.2e9 / easy.host.up_bytes_per_second
    assert simulated.step_seconds == pytest.approx(expected, rel=0.01)
    assert simulated.waits_seconds["disk"] == pytest.approx(expected - slowed, rel=0.01)


def test_where_cores_are_shared_they_update_while_they_wait_for_the_disk() -> None:
    slow = rates(overlaps=False, updates=1e8)
    simulated = simulate(one_chunk(ON_DISK[False]), slow)
    copies = 2 * 0.2  # gradients and weights, a second a GB
    assert simulated.step_seconds == pytest.approx(1.0 + copies + 1e9 / 2e9 + max(1e9 / 1e9, 1.0), rel=0.01)


@given(candidates(), st.floats(1.0, 100.0), st.booleans())
def test_a_faster_disk_makes_no_step_longer_than_by_another_order_of_updates(
    candidate: Candidate, times: float, overlaps: bool
) -> None:
    fast = replace(
        DISK,
        read_bytes_per_second=times * DISK.read_bytes_per_second,
        write_bytes_per_second=times * DISK.write_bytes_per_second,
        both_bytes_per_second=times * DISK.both_bytes_per_second,
    )
    slow_step = simulate(candidate, rates(overlaps=overlaps)).step_seconds
    assert simulate(candidate, rates(overlaps=overlaps, disk=fast)).step_seconds <= 1.02 * slow_step
    moved = sum(
        chunk.optimizer_bytes
        for chunk, placement in zip(candidate.chunks, candidate.placements, strict=True)
        if placement.route == "disk" and chunk.is_updated and chunk.gradient_bytes
    )
    assert slow_step >= max(moved / DISK.read_bytes_per_second, moved / DISK.write_bytes_per_second) * (1 - 1e-9)


# ---------------------------------------------------------------------- the search


@st.composite
def plans_beside_a_disk(draw: st.DrawFn) -> tuple[Plans, Candidate]:
    random = Random(draw(seeds))
    plans = Plans(with_disk(random, random_profile(random, draw(st.integers(1, 6)))))
    placements = tuple(random.choice(each) for each in plans.placements)
    return plans, plans.candidate(placements, tuple(random.choice(each) for each in plans.choices))


@settings(max_examples=2000 if FULL else 150)
@given(plans_beside_a_disk())
def test_no_simulation_is_under_its_bound(drawn: tuple[Plans, Candidate]) -> None:
    plans, candidate = drawn
    assert least_seconds(candidate, plans.rates) <= plans.seconds(candidate) * ROUNDING


@settings(max_examples=500 if FULL else 50)
@given(plans_beside_a_disk(), st.integers(0, 8))
def test_a_part_of_a_plan_neither_weighs_more_nor_has_a_higher_bound(drawn: tuple[Plans, Candidate], placed: int) -> None:
    plans, whole = drawn
    part = plans.candidate(whole.placements[:placed], whole.activations)
    less, more = (footprint_of(plans.space.profile, each) for each in (part, whole))
    assert less.pool_bytes <= more.pool_bytes
    assert less.host_bytes <= more.host_bytes
    assert less.disk_bytes <= more.disk_bytes
    assert least_seconds(part, plans.rates) <= least_seconds(whole, plans.rates) * ROUNDING


@settings(max_examples=60 if FULL else 8)
@given(st.integers(1, 5), seeds)
def test_the_search_finds_the_best_of_all_plans_and_never_goes_over_a_limit(blocks: int, seed: int) -> None:
    random = Random(seed)
    plans = Plans(narrowed(random, with_disk(random, random_profile(random, blocks)), 2000))
    best = min(map(plans.seconds, plans.one_by_one()), default=None)
    offer = plans.space.best(MICRO_BATCH)
    assert (offer is None) == (best is None)
    if offer is not None and best is not None:
        assert plans.fits(offer.candidate)
        assert offer.simulated.step_seconds <= 1.01 * best


@settings(max_examples=100 if FULL else 3)
@given(st.integers(1, 4), seeds)
def test_a_plan_that_needs_no_disk_is_the_same_where_one_is_allowed(blocks: int, seed: int) -> None:
    random = Random(seed)
    allowed = with_disk(random, random_profile(random, blocks))
    without = Space(replace(allowed, disk_limit_bytes=0)).best(MICRO_BATCH)
    offer = Space(allowed).best(MICRO_BATCH)
    if without is None or offer is None:
        assert offer is not None or without is None
    elif offer.uses_disk:
        assert offer.seconds < (1 - WORTH) * without.seconds
    else:
        assert offer.candidate == without.candidate


def beside_disk(device_bytes: int, host_bytes: int, disk_bytes: int = 1000 * GIB, disk: DiskRates = DISK) -> Profile:
    """A GPU with 2.4 GB of model state in bf16, of which 1.9 GB may lie on the disk."""
    return replace(chain(device_bytes, host_bytes=host_bytes), disk=disk, disk_limit_bytes=disk_bytes)


def seconds_of(profile: Profile) -> float:
    found = fastest(profile)
    return math.inf if found is None else found.chosen.step_seconds


MEMORY = {"device": 3 * GIB // 2, "host": 4 * GIB, "disk": 4 * GIB}  # where one of them is not asked about


@pytest.mark.parametrize(("tier", "least", "most"), [("device", 18, 34), ("host", 64, 112), ("disk", 0, 64)])
def test_more_memory_of_any_tier_is_never_slower(tier: str, least: int, most: int) -> None:
    """In sixteenths of a GiB. In chunks of one size: the usual one is kept where others are faster by a little."""
    sizes = [GIB * share // 16 for share in range(least, most + 1, (most - least) // (8 if FULL else 2))]
    found = [seconds_of(replace(beside_disk(*(MEMORY | {tier: size}).values()), other_layouts=())) for size in sizes]
    for fewer, more in itertools.pairwise(found):
        assert more <= fewer * (1 + WORTH)
    assert found[-1] < found[0]


def test_the_disk_has_the_last_chunks_and_no_more_than_the_host_lacks() -> None:
    plan = search(beside_disk(3 * GIB // 2, 7 * GIB // 2))
    on_disk = [index for index, each in enumerate(plan.chunks) if each.optimizer == "disk"]
    assert on_disk
    assert on_disk == list(range(on_disk[0], len(plan.chunks)))
    assert plan.limit_bytes["disk"] == 1000 * GIB
    roomier = search(beside_disk(3 * GIB // 2, 4 * GIB))
    assert 0 < sum(each.optimizer == "disk" for each in roomier.chunks) < len(on_disk)
    assert plan.forecast.split_seconds["exposed disk"] > roomier.forecast.split_seconds["exposed disk"] > 0


def test_what_a_plan_says_of_the_disk_is_true() -> None:
    """What it saves of the host, what it writes, and what a larger batch is worth."""
    profile = beside_disk(3 * GIB // 2, 4 * GIB)
    found = fastest(profile)
    assert found is not None
    plan = answered(found)
    forecast, wear = plan.forecast, plan.forecast.wear
    assert wear is not None
    space, offer = found.in_space
    on_disk = [
        chunk for chunk, each in zip(offer.candidate.chunks, offer.candidate.placements, strict=True) if each.optimizer == "disk"
    ]
    assert wear.written_bytes == sum(chunk.optimizer_bytes for chunk in on_disk)
    assert wear.days(forecast.step_seconds) == pytest.approx(600e12 / wear.written_bytes * forecast.step_seconds / 86400)
    assert plan.decision("wear").choice.startswith(f"{show_bytes(wear.written_bytes)} written a step, ")
    assert forecast.step_error > profile.calibration.offload_time_error.value  # the disk's own comes on top

    said = re.fullmatch(
        r"nothing there would need (\S+ \S+) of host memory, of which 4.00 GiB may be used", plan.decision("disk").why
    )
    assert said is not None
    least = min(size for each in space.micro_batches if (size := space.without_disk.least_host_bytes(each)) is not None)
    assert said[1] == show_bytes(least)
    assert fastest(replace(profile, disk_limit_bytes=0, host_limit_bytes=least - 1)) is None

    batch, gain = plan.decision("batch").choice, float(plan.decision("batch").why.split()[0])
    size = int(batch.split()[1])
    own = tuple(each for each in profile.passes if each.micro_batch == plan.micro_batch)
    larger = fastest(replace(profile, batch_size=size, passes=own))
    assert larger is not None
    measured = larger.chosen.samples_per_second / forecast.samples_per_second
    assert gain >= 1.2
    assert 0.9 * measured - 0.1 <= gain <= measured + 0.1  # it was looked for quickly


def test_chunks_much_larger_than_others_go_to_the_disk_last() -> None:
    profile = beside_disk(3 * GIB // 2, 7 * GIB // 2)
    *others, last = profile.chunks
    elements = 5 * last.elements
    head = replace(
        last, weights_bytes=2 * elements, elements=elements, gradient_bytes=2 * elements, optimizer_bytes=10 * elements
    )
    candidates = Space(replace(profile, chunks=(*others, head), other_layouts=())).candidates
    assert candidates.to_disk(0)[0] == len(others) - 1
    assert candidates.to_disk(0)[-1] == len(others)
    assert candidates.few_to_disk(0) == len(others)
    few = candidates.of(Knobs(MICRO_BATCH, on_disk=len(others)))
    assert few.placements[-1].optimizer == "host"
    all_there, almost = (footprint_of(profile, each) for each in (candidates.of(Knobs(4, on_disk=len(others) + 1)), few))
    assert all_there.disk_bytes - almost.disk_bytes > (1 + DISK_DEPTH) * 10 * elements - 12 * last.elements * DISK_DEPTH
    assert all_there.host_bytes > almost.host_bytes  # its carriers take more than its state leaves


def test_state_that_is_not_so_much_for_each_element_stays_off_the_disk() -> None:
    chunk = ChunkCost(200, 100, True, 200, 10 * 100, True, (0,), is_split=True)
    assert sorted(chunk.state_parts) == [200, 400, 400]
    assert replace(chunk, optimizer_bytes=210).state_parts == ()  # a factored second moment
    assert replace(chunk, weights_bytes=400, is_split=False, optimizer_bytes=400).state_parts == (400,)
    assert replace(chunk, is_updated=False, optimizer_bytes=0).state_parts == ()
