"""Plans that were measured on a GPU (benchmarks/planned.py), against what is forecast for them today."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from anyfit import profiling
from anyfit.costing import cost
from anyfit.planning import search
from anyfit.planning.candidate import Candidate, Rates
from anyfit.planning.evaluation import waiting
from anyfit.planning.fastest import fastest
from anyfit.planning.footprint import footprint_of
from anyfit.planning.forecast import forecast
from anyfit.planning.launch_bound import is_launch_bound
from anyfit.planning.simulation import redone_seconds, simulate
from anyfit.planning.space import Space
from anyfit.values.calibration import Calibration
from anyfit.values.engine import staging_bytes
from anyfit.values.graph import Graph
from anyfit.values.profile import LaunchCosts, Profile
from benchmarks import planned, record
from benchmarks.peers import CONTEXT_BYTES, GIB
from benchmarks.record import Recording

Row = dict[str, Any]
RECORDINGS = record.recordings("planned", "regret")
CALIBRATION = Calibration.of("cuda")
FULL = 0.97  # of what the allocator may take
# How near forecasts come to a recording that does not say otherwise, under "held_to": benchmarks/record.py.
USUAL: dict[str, dict[str, float]] = {
    "forecast": {"median": 0.06, "worst": CALIBRATION.offload_time_error.value},
    "planned": {"median": 0.06, "worst": 0.12},
    "resident": {"worst": 0.06},
    "named": {"outside": 0},
}
USUAL_SLOWDOWN = 1.05


def rows_of(recording: Recording, *, in_chunks: bool = True) -> list[Row]:
    """Those whose chunks are placed one by one; or those that have everything on the device."""
    return [row for row in recording.rows if bool(row["about"]["chunks"]) == in_chunks]


def held_to(recording: Recording, question: str) -> dict[str, Any]:
    return USUAL[question] | recording.held_to.get(question, {})


def late(recording: Recording, case: Any) -> Any:
    """The first recordings, of an engine that has changed most since, are looked at in the full tier alone."""
    return case if recording.about["date"] > "2026-11-15" else pytest.param(case, marks=pytest.mark.full)


def those_with(has: Callable[[Recording], object]) -> pytest.MarkDecorator:
    """The recordings that have rows of a kind: one case each, and an error where none has."""
    found = [each for each in RECORDINGS if has(each)]
    assert found
    return pytest.mark.parametrize("recording", [late(each, each) for each in found], ids=lambda each: each.name)


def counted_in(recording: Recording) -> list[Row]:
    """Those that forecasts are held to."""
    return [row for row in rows_of(recording) if "excluded" not in row]


RECORDS = [(each, row) for each in RECORDINGS for row in counted_in(each)]
IDS = [f"{each.name}-{row['job']}-{row['plan']}" for each, row in RECORDS]
INDICES = [late(each, index) for index, (each, _) in enumerate(RECORDS)]


@cache
def traced(case: str, batch: int, micro_batch: int) -> Graph:
    return profiling.traced(replace(planned.Job(case, batch).training(), micro_batch=micro_batch), "cuda")[0]


@cache
def profiled(recording: Recording, case: str, batch: int, micro_batch: int) -> Profile:
    return cost([traced(case, batch, micro_batch)], recording.machine, batch)


def more_staging_bytes(candidate: Candidate) -> int:
    """Of staging buffers that are all as large as the largest chunk."""
    pairs = zip(candidate.chunks, candidate.placements, strict=True)
    sizes = staging_bytes(chunk.weights_bytes for chunk, placement in pairs if placement.gradients == "host" and chunk.trainable)
    return len(sizes) * max(sizes, default=0) - sum(sizes)


@cache
def predicted(index: int) -> dict[str, float]:
    recording, row = RECORDS[index]
    job, about = planned.JOBS[row["job"]], row["about"]
    profile = profiled(recording, job.case, job.batch, about["micro_batch"])
    candidate = planned.candidate_of(about, traced(job.case, job.batch, about["micro_batch"]), profile.passes[0])
    footprint = footprint_of(profile, candidate)
    if recording.then.get("staging") == "alike":
        footprint = replace(footprint, pool_bytes=footprint.pool_bytes + more_staging_bytes(candidate))
    evaluation = Space(profile).evaluation
    return {
        "step_seconds": simulate(candidate, evaluation.rates).step_seconds,
        "device_bytes": footprint.device_bytes,
        "live_bytes": footprint.live_bytes,
        "pool_bytes": footprint.pool_bytes,
        "host_bytes": footprint.host_bytes,
        "reserved_bytes": evaluation.reserved_bytes(footprint) - profile.context_bytes,
    }


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_memory_is_as_forecast(index: int) -> None:
    expected, (_, row) = predicted(index), RECORDS[index]
    measured = row["measured"]
    assert expected["device_bytes"] == pytest.approx(measured["allocated_bytes"], rel=0.025 if row["plan"] == "planned" else 0.03)
    live = measured["allocated_bytes"] - expected["pool_bytes"]
    assert expected["live_bytes"] == pytest.approx(live, rel=0.05 if row["plan"] == "planned" else 0.08)
    assert expected["host_bytes"] == pytest.approx(measured["host_bytes"], rel=1e-3)
    cap = planned.JOBS[row["job"]].cap_gib
    assert cap is not None
    reserved, allowed = measured["reserved_bytes"], cap * GIB - CONTEXT_BYTES
    assert reserved <= allowed
    if reserved < FULL * allowed:  # beyond that the allocator gives back what it keeps, and what it keeps means little
        added = reserved - measured["allocated_bytes"]
        most = row.get("fragmentation_allowed", CALIBRATION.fragmentation.value)
        assert added <= most * (measured["allocated_bytes"] - measured["pool_bytes"])


@pytest.mark.parametrize("index", INDICES, ids=IDS)
def test_a_step_takes_what_is_forecast_within_its_band(index: int) -> None:
    measured = RECORDS[index][1]["measured"]["step_seconds"]
    assert predicted(index)["step_seconds"] == pytest.approx(measured, rel=CALIBRATION.offload_time_error.value)


@those_with(counted_in)
def test_steps_are_forecast_well(recording: Recording) -> None:
    off, held = off_by(recording, ""), held_to(recording, "forecast")
    assert statistics.median(off.values()) <= held["median"], off
    assert max(off.values()) <= held["worst"], off


@those_with(counted_in)
def test_steps_that_were_planned_are_forecast_well(recording: Recording) -> None:
    off, held = off_by(recording, "-planned"), held_to(recording, "planned")
    assert len(off) == held.get("rows", len(off))
    assert statistics.median(off.values()) <= held["median"], off
    assert max(off.values()) <= held["worst"], off


@those_with(lambda each: rows_of(each, in_chunks=False))
def test_steps_with_everything_on_the_device_are_forecast_well(recording: Recording) -> None:
    """In one pass and in several; of a transformer, and of a convolutional network, whose steps wait for the host."""
    off, held = {}, held_to(recording, "resident")
    for row in rows_of(recording, in_chunks=False):
        job = planned.JOBS[row["job"]]
        profile = profiled(recording, job.case, job.batch, row["about"]["micro_batch"])
        off[row["job"]] = abs(forecast(profile, profile.passes[0]).step_seconds / row["measured"]["step_seconds"] - 1)
    assert len(off) == held.get("rows", len(off))
    assert max(off.values()) <= held["worst"], off


LAUNCH_BOUND = [(each, row) for each in RECORDINGS for row in rows_of(each) if row.get("waits_for") == "launches"]


@pytest.mark.parametrize(("recording", "row"), LAUNCH_BOUND, ids=[f"{each.name}-{row['job']}" for each, row in LAUNCH_BOUND])
def test_steps_that_wait_for_launches_are_forecast_so(recording: Recording, row: Row) -> None:
    """None was part of a fit. As if the host had nothing else to do, they would be forecast 25 to 44 % too fast."""
    job, about, measured = planned.JOBS[row["job"]], row["about"], row["measured"]["step_seconds"]
    profile = profiled(recording, job.case, job.batch, about["micro_batch"])
    candidate = planned.candidate_of(about, traced(job.case, job.batch, about["micro_batch"]), profile.passes[0])
    rates = Space(profile).evaluation.rates
    simulated = simulate(candidate, rates)
    assert simulated.step_seconds == pytest.approx(measured, rel=0.21)
    assert is_launch_bound(simulated.waits_seconds["launch"], simulated.step_seconds)
    idle = replace(rates, host=replace(rates.host, launching=LaunchCosts()))
    assert simulate(candidate, idle).step_seconds < 0.76 * measured


def off_by(recording: Recording, ending: str) -> dict[tuple[str, int], float]:
    return {
        (IDS[index], index): abs(predicted(index)["step_seconds"] / row["measured"]["step_seconds"] - 1)
        for index, (of, row) in enumerate(RECORDS)
        if of == recording and IDS[index].endswith(ending)
    }


def named_in(recording: Recording) -> list[Row]:
    """The plans that another's reasons name."""
    return [row for row in rows_of(recording) if row["plan"].startswith(planned.WHY)]


@those_with(named_in)
def test_what_reasons_name_costs_what_they_say(recording: Recording) -> None:
    """Within the stated band of what was forecast then, measured beside the plan they belong to."""
    named, held = named_in(recording), held_to(recording, "named")
    assert len(named) == held.get("rows", len(named))
    off = [row for row in named if abs(_then(row) / row["measured"]["step_seconds"] - 1) > CALIBRATION.offload_time_error.value]
    assert len(off) == held["outside"]
    assert all("excluded" in row for row in off)


def _then(row: Row) -> float:
    return float(row["predicted_then"]["step_seconds"])


def compared(recording: Recording) -> dict[str, dict[str, float]]:
    """By job that other plans were measured for as well, the seconds of each."""
    jobs = dict.fromkeys(row["job"] for row in rows_of(recording))
    seconds = {job: planned.seconds_of([row for row in rows_of(recording) if row["job"] == job]) for job in jobs}
    return {job: plans for job, plans in seconds.items() if len(plans) > 1}


COMPARED = [(each, job) for each in RECORDINGS for job in compared(each)]


@pytest.mark.parametrize(("recording", "job"), COMPARED, ids=[f"{each.name}-{job}" for each, job in COMPARED])
def test_no_plan_of_many_was_much_faster_than_the_planner_s(recording: Recording, job: str) -> None:
    seconds, held = compared(recording)[job], recording.held_to.get("regret", {}).get(job, {})
    assert len(seconds) == held.get("plans", len(seconds))
    assert seconds["planned"] <= held.get("slowdown", USUAL_SLOWDOWN) * min(seconds.values()), seconds


@those_with(lambda each: "planned_today" in each.held_to)
def test_what_is_planned_today_was_measured_close_to_the_best(recording: Recording) -> None:
    """A plan of today, beside many of one pass that were measured on the same machine."""
    for name, held in recording.held_to["planned_today"].items():
        job = planned.JOBS[name]
        assert job.cap_gib is not None
        machine = recording.machine.with_limits(device_memory=int(job.cap_gib * GIB))
        profile = cost([traced(job.case, job.batch, job.batch)], machine, job.batch)
        routes = Counter(placement.route for placement in search(profile).chunks)
        measured = [row for of, row in RECORDS if of == recording and row["job"] == name]
        best = min(row["measured"]["step_seconds"] for row in measured)
        nearest = min((row for row in measured if row["about"]["speculates"]), key=lambda row: chunks_apart(row, routes))
        assert chunks_apart(nearest, routes) <= held["chunks_apart"]
        assert nearest["measured"]["step_seconds"] <= held["slowdown"] * best


def chunks_apart(row: Row, routes: Counter[str]) -> int:
    there = Counter(placement.route for placement in planned.placements_of(row["about"]))
    return sum(abs(there[route] - routes[route]) for route in ("resident", "streamed", "host"))


@pytest.mark.full
def test_the_plans_that_are_compared_are_different_and_fit() -> None:
    job = planned.JOBS["llama-1b batch 4 cap 12"]
    found = planned.plans_of(job, RECORDINGS[0].machine, 4)
    assert isinstance(found, list)
    assert found[0][0] == "planned"
    again = [plan for name, plan in found if name == planned.AGAIN]
    assert again == [found[0][1]]
    assert len({(plan.chunk_bytes, plan.chunks, str(plan.stages)) for _, plan in found}) == len(found) - len(again) >= 5
    for _, plan in found:
        assert plan.forecast.peak_bytes["device"] < 12 * GIB
        placements = planned.placements_of(planned.about(plan))
        assert [each.route for each in placements] == [each.route for each in plan.chunks]
        assert [each.weights for each in placements] == [each.weights for each in plan.chunks]


BEFORE_TWO_PHASES = Recording(record.RESULTS / "planned" / "2026-11-16-h200-b1d785c.json")


# Every step of these is clipped; a run waits for the norm after some.
CLIPPED = [(each, row) for each in RECORDINGS for row in rows_of(each) if planned.JOBS[row["job"]].clips]
ONE_PHASE_THEN = ("22b0d5b", "4f96e90", "037b87e", "b1d785c")  # recorded before the host updated in two phases
REDONE = slice(1, 6)  # steps of these that were redone: the first has no clipped one before it


def clipped_candidate(recording: Recording, row: Row) -> tuple[Candidate, Rates]:
    job, about = planned.JOBS[row["job"]], row["about"]
    profile = profiled(recording, job.case, job.batch, about["micro_batch"])
    candidate = planned.candidate_of(about, traced(job.case, job.batch, about["micro_batch"]), profile.passes[0])
    return candidate, Space(profile).evaluation.rates


def test_clipped_steps_are_forecast_as_well_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    off = {}
    for recording, row in CLIPPED:
        with monkeypatch.context() as patch:
            if recording.name.endswith(ONE_PHASE_THEN):
                patch.setattr("anyfit.planning.simulation.updates.two_phase_share", lambda *_given: 0.0)
            candidate, rates = clipped_candidate(recording, row)
            clipped = simulate(waiting(candidate), rates)
        assert any(each.speculates for each in candidate.placements)
        off[recording.name, row["job"]] = clipped.step_seconds / row["measured"]["step_seconds"] - 1
    assert len(off) >= 8
    assert statistics.median(map(abs, off.values())) <= 0.08, off
    assert max(map(abs, off.values())) <= CALIBRATION.offload_time_error.value, off


def test_steps_that_are_redone_take_what_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured when updates that had not begun were still made, and the host redid in one phase."""
    monkeypatch.setattr("anyfit.planning.simulation.updates.Updates._is_taken_back", lambda *_given: False)
    off = {}
    for recording, row in CLIPPED:
        if recording.name.endswith(ONE_PHASE_THEN) and planned.JOBS[row["job"]].batch == 8:
            candidate, rates = clipped_candidate(recording, row)
            redone = redone_seconds(candidate, rates, simulate(candidate, rates).step_seconds)
            off[recording.name] = redone / statistics.median(row["measured"]["step_seconds_all"][REDONE]) - 1
    assert len(off) == 4
    assert statistics.median(map(abs, off.values())) <= 0.09, off
    assert max(map(abs, off.values())) <= CALIBRATION.offload_time_error.value, off


def test_to_drop_what_has_not_begun_shortens_a_step_that_is_redone(monkeypatch: pytest.MonkeyPatch) -> None:
    for recording, row in CLIPPED:
        if planned.JOBS[row["job"]].batch == 8:
            candidate, rates = clipped_candidate(recording, row)
            step = simulate(candidate, rates).step_seconds
            dropped = redone_seconds(candidate, rates, step)
            with monkeypatch.context() as patch:
                patch.setattr("anyfit.planning.simulation.updates.Updates._is_taken_back", lambda *_given: False)
                assert dropped < 0.9 * redone_seconds(candidate, rates, step)


def test_updates_in_two_parts_shorten_a_step_that_waits_for_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecast for a plan that was measured with every step clipped, when updates were not parted: 0.81 s."""
    (row,) = [row for row in rows_of(BEFORE_TWO_PHASES) if row["job"] == "4b batch 8 cap 24 clipping"]
    job, about = planned.JOBS[row["job"]], row["about"]
    profile = profiled(BEFORE_TWO_PHASES, job.case, job.batch, about["micro_batch"])
    candidate = planned.candidate_of(about, traced(job.case, job.batch, about["micro_batch"]), profile.passes[0])
    candidate, rates = waiting(candidate), Space(profile).evaluation.rates
    parted = simulate(candidate, rates).step_seconds
    monkeypatch.setattr("anyfit.planning.simulation.updates.two_phase_share", lambda *_given: 0.0)
    at_once = simulate(candidate, rates).step_seconds
    assert at_once == pytest.approx(row["measured"]["step_seconds"], rel=0.06)
    assert parted < 0.9 * at_once


@pytest.mark.full
def test_more_host_memory_is_never_slower() -> None:
    """GPT-2 of 10 billion parameters with 16 samples on an H200 held to 24 GiB, whose host has just enough."""
    machine, graph = BEFORE_TWO_PHASES.machine, traced("10b", 16, 16)
    found = []
    for host in (123.5, 124.5, 125.5):
        best = fastest(cost([graph], machine.with_limits(device_memory=24 * GIB, host_memory=int(host * GIB)), 16))
        assert best is not None
        assert best.offer is not None
        found.append(best.offer.simulated.step_seconds)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.95 * found[0]
