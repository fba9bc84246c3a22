"""The simulator and the scales: against steps that were measured on a GPU, and against what holds of any candidate."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfit.costing import cost
from anyfit.costing.memory import chunk_costs, chunks_of
from anyfit.planning import search
from anyfit.planning.candidate import Candidate, Rates
from anyfit.planning.footprint import Footprint, footprint_of
from anyfit.planning.forecast import start_seconds
from anyfit.planning.simulation import Simulated, computation, simulate
from anyfit.planning.space import Space
from anyfit.tracing import trace
from anyfit.values.calibration import Calibration
from anyfit.values.plan import Placement
from anyfit.values.profile import HostRates, LoadedRates, Profile
from anyfit.values.units import show_seconds
from benchmarks import mixed, peers, record
from tests.planning.profiles import DISK, candidates

RECORDED = {f"{each.name} {row['job']}": (each, row) for each in record.recordings("mixed") for row in each.rows}
ROWS = {name: row for name, (_, row) in RECORDED.items()}
# Of that box, as benchmarks/results/host-update/2026-11-15-h200-82c8ed8.json has it.
CALIBRATION = Calibration.of("cuda")
H200 = Rates(
    HostRates(5.25e9, 48.5e9, 50.4e9, overlaps=True, loaded=LoadedRates(3.44e9, 29.3e9, 46.8e9)),
    norm_seconds=2.2e-3 / 3.78e9,
    update_seconds=30 / 4e12,
    calibration=CALIBRATION,
)
EASY = Rates(
    HostRates(1e9, 1e9, 1e9, overlaps=True), norm_seconds=1e-12, update_seconds=1e-11, disk=DISK, calibration=CALIBRATION
)


@cache
def predicted(name: str) -> tuple[Footprint, Simulated]:
    recording, row = RECORDED[name]
    job = peers.JOBS[row["job"]]
    configuration = mixed.Configuration(**row["configuration"])
    graph = trace(mixed.job_of(job), job.batch, "cuda")
    profile = cost([graph], recording.machine, job.batch)
    layout = chunks_of(graph, configuration.chunk_mib * 2**20)
    each = profile.passes[0]

    def candidate(**changes: Any) -> Candidate:
        placements = mixed.placements(replace(configuration, **changes), list(layout))
        choices = tuple("recompute" if "recompute" in block.choices else "keep" for block in each.blocks)
        chunks = chunk_costs(graph, layout)
        return Candidate(each, 1, choices, chunks, tuple(placements), configuration.slots, configuration.prefetch)

    # Where every step clips, the engine waits for the norm.
    waits = {"speculates": 0} if row["clipped_share"] == 1 else {}
    return footprint_of(profile, candidate()), simulate(candidate(**waits), H200)


@pytest.mark.parametrize("job", ROWS)
def test_measured_peaks_are_forecast_within_three_percent_and_without_the_pools_within_five(job: str) -> None:
    footprint, _ = predicted(job)
    measured = ROWS[job]["allocated_bytes"]
    assert footprint.device_bytes == pytest.approx(measured, rel=0.03)
    assert footprint.live_bytes == pytest.approx(measured - footprint.pool_bytes, rel=0.05)
    assert footprint.host_bytes == pytest.approx(ROWS[job]["host_bytes"], rel=1e-4)  # but for pages


def test_measured_steps_are_simulated_with_their_order() -> None:
    off = {job: predicted(job)[1].step_seconds / row["step_seconds"] - 1 for job, row in ROWS.items()}
    assert statistics.median(map(abs, off.values())) < 0.08, off
    assert max(map(abs, off.values())) < 0.25, off


def resident(candidate: Candidate) -> Candidate:
    return replace(candidate, placements=(Placement(),) * len(candidate.chunks))


@given(candidates())
def test_a_step_is_its_parts(candidate: Candidate) -> None:
    simulated = simulate(candidate, EASY)
    pairs = zip(candidate.chunks, candidate.placements, strict=True)
    resident = sum(chunk.elements for chunk, placement in pairs if placement.route == "resident" and chunk.is_updated)
    handed_out = CALIBRATION.update_launch_seconds.value * sum(
        placement.route != "resident" for placement in candidate.placements
    )
    waited = max(handed_out - EASY.update_seconds * resident / candidate.shards, 0.0)
    parts = simulated.compute_seconds + simulated.recompute_seconds + simulated.update_seconds + waited
    assert simulated.step_seconds == pytest.approx(parts + sum(simulated.waits_seconds.values()))
    assert simulate(candidate, EASY) == simulated


@given(candidates())
def test_a_step_like_the_last_need_not_be_played(candidate: Candidate) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computation, "ALIKE", -1.0)  # none is
        in_full = simulate(candidate, EASY)
    assert simulate(candidate, EASY).step_seconds == pytest.approx(in_full.step_seconds, rel=1e-6)


@given(candidates())
def test_nothing_is_waited_for_where_all_is_on_the_device(candidate: Candidate) -> None:
    assert not any(
        seconds for kind, seconds in simulate(resident(candidate), EASY).waits_seconds.items() if kind != "activations"
    )


def loads(candidate: Candidate) -> Iterator[float]:
    """Seconds that each of host, up and down is busy in a step, at least."""
    pairs = list(zip(candidate.chunks, candidate.placements, strict=True))
    updated = [(chunk, placement) for chunk, placement in pairs if chunk.is_updated and chunk.gradient_bytes]
    yield sum(chunk.elements for chunk, placement in updated if placement.update == "host") / 1e9
    streamed = sum(chunk.optimizer_bytes for chunk, placement in updated if placement.route == "streamed")
    fresh = sum(
        chunk.weights_bytes for chunk, placement in updated if placement.update == "host" and placement.weights == "device"
    )
    yield (streamed + fresh) / 1e9
    sent = candidate.accumulation * sum(chunk.gradient_bytes for chunk, placement in pairs if placement.gradients == "host")
    yield (streamed + sent) / 1e9


@given(candidates())
def test_no_step_is_shorter_than_what_any_lane_has_to_do(candidate: Candidate) -> None:
    assert simulate(candidate, EASY).step_seconds * (1 + 1e-9) >= max(loads(candidate))


@given(candidates(), st.floats(1.0, 10.0))
def test_where_host_and_device_share_cores_all_adds_up(candidate: Candidate, slowness: float) -> None:
    shared = Rates(
        HostRates(1e9 / slowness, 1e9, 1e9, overlaps=False),
        norm_seconds=1e-12,
        update_seconds=1e-11,
        disk=DISK,
        calibration=CALIBRATION,
    )
    simulated = simulate(candidate, shared)
    alone = simulated.compute_seconds + simulated.recompute_seconds + simulated.update_seconds
    host, up, down = loads(candidate)
    assert simulated.step_seconds * (1 + 1e-9) >= alone + host * slowness + up + down


@cache
def profile_in_little() -> Profile:
    """GPT-2 of 4 billion parameters in 24 GiB."""
    job = peers.JOBS["4b batch 8 cap 24"]
    machine = record.recordings("profiler")[0].machine.with_limits(device_memory=24 * 2**30)
    return cost([trace(mixed.job_of(job), job.batch, "cuda")], machine, job.batch)


FORCED: dict[str, dict[str, float]] = {
    "none streamed": {"streamed": 0.0},
    "none on the host": {"streamed": 1.0, "host_first": 0.0},
    "updates that wait for the norm": {"speculates": False},
    "all recomputed": {"rung": -1, "offloaded": 0},
    "all offloaded": {"rung": 0, "offloaded": -1},
}


def test_what_a_plan_says_of_its_neighbours_is_what_they_cost_when_planned() -> None:
    profile = profile_in_little()
    plan, space = search(profile), Space(profile)
    names = {"model state", "updates", "speculation", "activations", "chunk size", "micro-batch"}
    assert names == {each.name for each in plan.decisions}
    assert {other.choice for other in plan.alternatives if other.decision != "chunk size"} <= set(FORCED)
    assert {"updates", "speculation"} <= {other.decision for other in plan.alternatives}
    for other in plan.alternatives:
        if other.decision == "chunk size":  # tests/planning/test_answers.py
            continue
        most = {"rung": space.candidates.last_rung(8), "offloaded": len(space.candidates.offloadable(8))}
        forced = {knob: most[knob] if value == -1 else value for knob, value in FORCED[other.choice].items()}
        offer = space.best(8, starts=1, **forced)
        assert offer is not None
        assert offer.simulated.step_seconds == pytest.approx(other.step_seconds)
        assert offer.simulated.step_seconds >= 0.98 * plan.forecast.step_seconds
        assert space.evaluation.fits(offer.footprint)
        later = f"{show_seconds(other.step_seconds - plan.forecast.step_seconds)} more a step"
        best = min((each for each in plan.alternatives if each.decision == other.decision), key=lambda each: each.step_seconds)
        assert (f"{other.choice} would take {later}" in plan.decision(other.decision).why) == (other is best)


def test_a_plan_in_little_memory_holds_what_it_says_and_keeps_both_limits() -> None:
    profile = profile_in_little()
    plan = search(profile)
    assert plan.forecast.needed_bytes <= 24 * 2**30
    assert plan.forecast.peak_bytes["host"] <= profile.host_limit_bytes
    assert 0.45 < plan.forecast.step_seconds < 0.75  # by hand it took 0.64 s
    assert sum(plan.forecast.split_seconds.values()) == pytest.approx(plan.forecast.step_seconds)


@pytest.mark.parametrize("job", ROWS)
def test_starting_takes_about_as_long_as_is_forecast(job: str) -> None:
    profile = replace(profile_in_little(), parameters=ROWS[job]["parameters"])
    assert start_seconds(profile, ROWS[job]["host_bytes"]) == pytest.approx(ROWS[job]["start_seconds"], rel=0.2)


@given(candidates(), st.integers(5, 24), st.sampled_from([1.0, 0.03, 0.001]))
def test_passes_that_are_alike_are_played_once_and_counted_as_often_as_they_are(
    candidate: Candidate, count: int, speed: float
) -> None:
    """Also where the host falls behind by more in every pass, and no two are alike."""
    many, host = replace(candidate, accumulation=count), EASY.host
    host = replace(
        host,
        updates_per_second=speed * host.updates_per_second,
        up_bytes_per_second=speed**0.5 * host.up_bytes_per_second,
        down_bytes_per_second=speed**0.5 * host.down_bytes_per_second,
    )
    rates = replace(EASY, host=host)
    with pytest.MonkeyPatch.context() as patch:
        found = simulate(many, rates)
        patch.setattr(computation, "PASSES_ALIKE", -1.0)  # none is
        whole = simulate(many, rates)
    assert found.step_seconds == pytest.approx(whole.step_seconds, rel=1e-5)
    assert found.waits_seconds == pytest.approx(whole.waits_seconds, rel=1e-4, abs=1e-5 * whole.step_seconds)
