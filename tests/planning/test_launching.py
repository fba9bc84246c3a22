"""The host that launches ops, as the simulator has it: a stretch of ops is three figures, and the device waits where the host is
behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfit.costing.times import lengthened, timing_of
from anyfit.planning.bound import least_seconds
from anyfit.planning.candidate import Candidate, Rates
from anyfit.planning.simulation import simulate
from anyfit.planning.simulation.clock import Clock, Resources
from anyfit.planning.simulation.launching import QUEUE, Launching
from anyfit.values.calibration import Calibration
from anyfit.values.plan import Placement
from anyfit.values.profile import ChoiceCost, ChunkCost, HostRates, LaunchCosts, Segment, Timing
from tests.planning.profiles import DISK, block, candidates, one_pass

CALIBRATION = Calibration.of("cuda")
COSTS = LaunchCosts(
    beside_updates=1.3,
    beside_copies=1.1,
    beside_both=1.5,
    watched_seconds=2e-5,
    gradient_seconds=3e-5,
    fetch_seconds=2e-4,
    bind_seconds=1e-5,
)
GPU = Rates(
    HostRates(1e9, 1e9, 1e9, overlaps=True, launching=COSTS),
    norm_seconds=1e-12,
    update_seconds=1e-11,
    disk=DISK,
    calibration=CALIBRATION,
)
CPU = replace(GPU, host=replace(GPU.host, overlaps=False))
NEARLY = 1 + 1e-9
Stretch = list[tuple[float, float]]  # of ops: seconds of the host, and of the device

seconds = st.floats(0, 1e-2)
ops = st.lists(st.tuples(seconds, seconds), min_size=1, max_size=12)


def played(host: float, device: float, stretch: Stretch) -> tuple[float, float]:
    """Op by op: when the host has launched the last, and when the device is through with it."""
    for launch, busy in stretch:
        host += launch
        device = max(device, host) + busy
    return host, device


@given(st.lists(ops, min_size=1, max_size=5), st.floats(0, 0.1), st.floats(0, 0.1))
def test_three_figures_of_a_stretch_say_what_playing_its_ops_does(stretches: list[Stretch], host: float, device: float) -> None:
    every = [op for stretch in stretches for op in stretch]
    expected = played(host, device, every)
    for stretch in stretches:
        timing = timing_of(stretch)
        host, device = host + timing.launch_seconds, max(device + timing.device_seconds, host + timing.alone_seconds)
    assert (host, device) == pytest.approx(expected)


@given(ops, ops)
def test_two_stretches_are_one(first: Stretch, second: Stretch) -> None:
    one, both = timing_of(first).then(timing_of(second)), timing_of([*first, *second])
    assert one.launches == both.launches
    for name in ("launch_seconds", "device_seconds", "alone_seconds"):
        assert getattr(one, name) == pytest.approx(getattr(both, name))


@given(ops, st.floats(1, 4), st.floats(1, 4))
def test_a_slowed_stretch_takes_no_less_than_its_ops(stretch: Stretch, host: float, device: float) -> None:
    slowed = timing_of(stretch).slowed(host, device)
    exact = timing_of([(host * launch, device * busy) for launch, busy in stretch])
    assert slowed.launch_seconds == pytest.approx(exact.launch_seconds)
    assert slowed.device_seconds == pytest.approx(exact.device_seconds)
    assert slowed.alone_seconds * NEARLY >= exact.alone_seconds
    alike = timing_of(stretch).slowed(host, host)
    assert alike.alone_seconds == pytest.approx(host * timing_of(stretch).alone_seconds)


@given(ops)
def test_a_pass_with_nothing_beside_it_takes_what_its_stretch_takes_alone(stretch: Stretch) -> None:
    assert sum(lengthened(stretch)) == pytest.approx(timing_of(stretch).alone_seconds)


@st.composite
def launched(draw: st.DrawFn) -> Candidate:
    """A candidate whose ops have to be launched: now the host takes longer for them, and now the device."""
    candidate = draw(candidates())
    share = st.floats(0, 3)

    def timing(device: float) -> Timing:
        each = [(draw(share) * device / 4, device / 4) for _ in range(4)]
        return timing_of(each)

    def segment(each: Segment) -> Segment:
        return replace(each, timing=timing(each.seconds))

    def choice(each: ChoiceCost) -> ChoiceCost:
        return each if each.moved_bytes else replace(each, timing=timing(each.seconds))

    one = candidate.profile_pass
    blocks = tuple(replace(each, choices={name: choice(cost) for name, cost in each.choices.items()}) for each in one.blocks)
    chunks = tuple(replace(each, tensors=draw(st.integers(1, 12))) for each in candidate.chunks)
    return replace(candidate, chunks=chunks, profile_pass=replace(one, blocks=blocks, segments=tuple(map(segment, one.segments))))


@given(launched())
def test_no_step_is_shorter_than_its_launches_or_its_bound(candidate: Candidate) -> None:
    step = simulate(candidate, GPU).step_seconds * NEARLY
    assert step >= candidate.accumulation * candidate.launch_seconds
    assert step >= least_seconds(candidate, GPU)


@given(launched())
def test_a_launched_step_is_its_parts(candidate: Candidate) -> None:
    simulated = simulate(candidate, GPU)
    elements = (each.elements for each, at in zip(candidate.chunks, candidate.placements, strict=True) if is_resident(each, at))
    resident = GPU.update_seconds * sum(elements)
    parts = simulated.compute_seconds + simulated.recompute_seconds + simulated.update_seconds
    parts += candidate.ending_seconds(resident, GPU) - resident + sum(simulated.waits_seconds.values())
    assert simulated.step_seconds == pytest.approx(parts)
    assert simulated.waits_seconds["launch"] >= -1e-12


def is_resident(chunk: ChunkCost, placement: Placement) -> bool:
    return placement.route == "resident" and chunk.is_updated


@given(launched(), st.floats(1, 4))
def test_a_slower_host_never_shortens_a_step_of_a_device_that_holds_all(candidate: Candidate, slowdown: float) -> None:
    candidate = resident(candidate)
    one = candidate.profile_pass
    segments = tuple(replace(each, timing=each.played.slowed(slowdown, 1.0)) for each in one.segments)
    slower = replace(candidate, profile_pass=replace(one, segments=segments))
    assert simulate(slower, GPU).step_seconds * NEARLY >= simulate(candidate, GPU).step_seconds


def resident(candidate: Candidate) -> Candidate:
    kept = ("keep",) * len(candidate.activations)
    return replace(candidate, placements=(Placement(),) * len(candidate.chunks), activations=kept)


@given(launched())
def test_a_cpu_waits_for_no_launches(candidate: Candidate) -> None:
    """Its own seconds are those of its ops, and the engine's work on it is not told apart."""
    cheap = replace(GPU.host, overlaps=False, launching=LaunchCosts())
    simulated = simulate(candidate, CPU)
    assert simulated.waits_seconds["launch"] == 0
    assert simulated == simulate(candidate, replace(CPU, host=cheap))


def launching(costs: LaunchCosts = COSTS) -> tuple[Clock, Resources, Launching]:
    clock = Clock()
    rates = replace(GPU, host=replace(GPU.host, launching=costs))
    resources = Resources(clock, rates, shares_copies=False)
    return clock, resources, Launching(clock, resources, rates)


def test_the_host_runs_ahead_while_the_device_is_at_work_and_is_waited_for_when_it_is_not() -> None:
    clock, _, host = launching()
    large, small = timing_of([(1e-5, 1e-3)] * 10), timing_of([(1e-5, 1e-6)] * 10)
    took, waited = host.run(large, 1.0)
    assert (took, waited) == (pytest.approx(1e-5 + 1e-2), pytest.approx(1e-5))
    clock.now += took
    took, waited = host.run(small, 1.0)  # all launched while the device was busy
    assert (took, waited) == (pytest.approx(1e-5), pytest.approx(0.0, abs=1e-12))
    clock.now += took
    host.wait()
    took, waited = host.run(small, 1.0)
    assert took == pytest.approx(10 * 1e-5 + 1e-6)
    assert waited == pytest.approx(took - 1e-5)


def test_the_host_is_no_further_ahead_than_the_driver_s_queue() -> None:
    clock, _, host = launching()
    large, small = timing_of([(1e-6, 1e-3)] * QUEUE), timing_of([(1e-5, 1e-6)] * QUEUE)
    took, _ = host.run(large, 1.0)
    clock.now += took
    took, waited = host.run(small, 1.0)
    assert waited == pytest.approx(0.0, abs=1e-12)
    clock.now += took
    took, waited = host.run(small, 1.0)  # not launched before the large ones were done
    assert waited > 0.4 * took


@pytest.mark.parametrize(
    ("updates", "copies", "times"), [(False, 0, 1.0), (True, 0, 1.3), (False, 2, 1.1), (True, 2, 1.5), (True, 1, 1.4)]
)
def test_launches_are_slower_beside_updates_and_copies(updates: bool, copies: int, times: float) -> None:
    _, resources, host = launching()
    if updates:
        resources.use("host", "update", 1e9, lambda: None)
    for way in ("up", "down")[:copies]:
        resources.use(way, "activations", 1e9, lambda: None)
    took, _ = host.run(timing_of([(1e-5, 0.0)] * 100), 1.0)
    assert took == pytest.approx(times * 1e-3)


def test_what_the_engine_does_lengthens_a_step_that_waits_for_launches() -> None:
    watched = Placement(weights="host", gradients="host", optimizer="host", update="host")
    candidate = replace(one_block(), placements=(watched,), slots=2)
    free = simulate(candidate, replace(GPU, host=replace(GPU.host, launching=LaunchCosts())))
    told = replace(LaunchCosts(), watched_seconds=1e-4, gradient_seconds=2e-4, fetch_seconds=1e-3, bind_seconds=1e-4)
    costs = simulate(candidate, replace(GPU, host=replace(GPU.host, launching=told)))
    tensors = candidate.chunks[0].tensors
    # Forward and backward fetch what two slots hold: once a step, after the update.
    expected = tensors * (1e-4 + 2e-4) + 1e-3 + tensors * 1e-4
    assert costs.step_seconds - free.step_seconds == pytest.approx(expected, rel=0.02)


def one_block() -> Candidate:
    """A block of ops that take the device next to nothing, with its parameters in one chunk."""
    timing = timing_of([(1e-5, 1e-7)] * 1000)
    segments = (Segment(0, "forward", 0.01, 1, timing=timing), Segment(0, "backward", 0.01, 1, timing=timing))
    chunk = ChunkCost(2000, 1000, True, 2000, 10_000, True, (0,), is_split=True, tensors=10)
    return Candidate(one_pass(4, blocks=(block(),), segments=segments), 1, ("keep",), (chunk,), (Placement(),), 2, 1)
