"""Plans that were measured on a GPU (benchmarks/planned.py), against what is forecast for them today."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from anyfit import profiling
from anyfit.costing import cost
from anyfit.planning import search
from anyfit.planning.fastest import fastest
from anyfit.planning.footprint import footprint_of
from anyfit.planning.forecast import forecast
from anyfit.planning.simulation import simulate
from anyfit.planning.space import Space
from anyfit.values.calibration import Calibration
from anyfit.values.graph import Graph
from anyfit.values.machine import Machine
from anyfit.values.profile import Profile
from benchmarks import planned
from benchmarks.peers import CONTEXT_BYTES, GIB

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
CALIBRATION = Calibration.of("cuda")
FULL = 0.97  # of what the allocator may take
# In place of the usual fragmentation, of plans measured beside the planner's; and of the planner's where ten others had been
# placed in the process before, whose segments are not all given back: the same was 0.17 in another.
MOST_KEPT = {"planned-fifth-llama": 0.33, "planned-seventh": 0.37, "planned-eighth": 0.43}
MOST_KEPT_AFTER_OTHERS = {("planned-eighth", "llama-1b batch 4 cap 12"): 0.24}


def rows_of(name: str, *, in_chunks: bool = True) -> list[Row]:
    """Those whose chunks are placed one by one; or those that have everything on the device."""
    rows: list[Row] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["figures"]["rows"]
    return [row for row in rows if bool(row["about"]["chunks"]) == in_chunks]


# A plan does not know that every step will clip. Up to the sixth, steps of several passes were measured before the norm of what
# the host adds up came with the adding: it was read once more, in the sixth slowly, and updates were made in two parts where the
# host had no time for it. The oldest waited for the copy of each pass's images. In the eighth the Llama's passes of two samples
# waited for their launching, which takes longer beside the host's updates than it was measured to take alone.
LEFT_OUT = {
    "planned": ("4b batch 8 cap 24 clipping", "llama-1b batch 4 cap 12 not micro-batch", "convnext-tiny"),
    "planned-regret": ("micro-batches of",),
    "planned-more": ("4b batch 8 cap 24 clipping", "llama-1b batch 4 cap 12 not micro-batch"),
    "planned-third": ("4b batch 8 cap 24 clipping",),
    "planned-fourth": (),
    "planned-fifth": ("4b batch 8 cap 24 clipping", "in 2"),
    "planned-fifth-regret": ("not micro-batch",),
    "planned-fifth-llama": ("not micro-batch",),
    "planned-sixth": ("4b batch 8 cap 24 clipping", "in 2", "not micro-batch"),
    "planned-seventh": (),
    "planned-eighth": ("4b batch 8 cap 24 clipping", "llama-1b batch 4 cap 12 not micro-batch"),
    "planned-ninth": (),
}
MACHINES = {"planned-fifth-regret": "planned-fifth", "planned-fifth-llama": "planned-fifth"}
RECORDS = [
    (name, row)
    for name, left_out in LEFT_OUT.items()
    for row in rows_of(name)
    if not any(words in f"{row['job']} {row['plan']}" for words in left_out)
]
IDS = [f"{name}-{row['job']}-{row['plan']}" for name, row in RECORDS]


@cache
def traced(case: str, batch: int, micro_batch: int) -> Graph:
    return profiling.traced(replace(planned.Job(case, batch).training(), micro_batch=micro_batch), "cuda")[0]


@cache
def profiled(name: str, case: str, batch: int, micro_batch: int) -> Profile:
    machine = Machine.load(ROOT / f"tests/golden/h200/{MACHINES.get(name, name)}-machine.json")
    return cost([traced(case, batch, micro_batch)], machine, batch)


@cache
def predicted(index: int) -> dict[str, float]:
    name, row = RECORDS[index]
    job, about = planned.JOBS[row["job"]], row["about"]
    profile = profiled(name, job.case, job.batch, about["micro_batch"])
    candidate = planned.candidate_of(about, traced(job.case, job.batch, about["micro_batch"]), profile.passes[0])
    footprint = footprint_of(profile, candidate)
    evaluation = Space(profile).evaluation
    return {
        "step_seconds": simulate(candidate, evaluation.rates).step_seconds,
        "device_bytes": footprint.device_bytes,
        "live_bytes": footprint.live_bytes,
        "pool_bytes": footprint.pool_bytes,
        "host_bytes": footprint.host_bytes,
        "reserved_bytes": evaluation.reserved_bytes(footprint) - profile.context_bytes,
    }


@pytest.mark.parametrize("index", range(len(RECORDS)), ids=IDS)
def test_memory_is_as_forecast(index: int) -> None:
    expected, (name, row) = predicted(index), RECORDS[index]
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
        if row["plan"] in ("planned", planned.AGAIN):
            most = MOST_KEPT_AFTER_OTHERS.get((name, row["job"]), CALIBRATION.fragmentation.value)
        else:
            most = MOST_KEPT.get(name, CALIBRATION.fragmentation.value)
        assert added <= most * (measured["allocated_bytes"] - measured["pool_bytes"])


@pytest.mark.parametrize("index", range(len(RECORDS)), ids=IDS)
def test_a_step_takes_what_is_forecast_within_its_band(index: int) -> None:
    measured = RECORDS[index][1]["measured"]["step_seconds"]
    assert predicted(index)["step_seconds"] == pytest.approx(measured, rel=CALIBRATION.offload_time_error.value)


@pytest.mark.parametrize(
    ("name", "median", "most"),
    [
        ("planned-regret", 0.04, 0.11),
        ("planned", 0.06, 0.18),
        ("planned-more", 0.12, 0.24),
        ("planned-third", 0.075, 0.24),
        ("planned-fourth", 0.085, 0.16),
        ("planned-fifth", 0.03, 0.14),
        ("planned-fifth-regret", 0.025, 0.12),
        ("planned-fifth-llama", 0.085, 0.19),
        ("planned-sixth", 0.05, 0.14),
        ("planned-seventh", 0.035, 0.23),
        ("planned-eighth", 0.08, 0.22),
        ("planned-ninth", 0.03, 0.05),
    ],
)
def test_steps_are_forecast_well(name: str, median: float, most: float) -> None:
    """All but the sixth were measured on the very machine that was probed, in full, before; but others use its host too, and it
    is not as fast at all times: the seventh's Llama with two streamed chunks took 0.25 s, the same in the eighth 0.23.
    Up to the fourth a batch came up behind all the weights that a step had left to be sent, which a small model felt; and up to
    the third, lanes were given nothing while the host waited for the norm, which streamed chunks felt, and resident updates began
    after that."""
    off = off_by(name, "")
    assert statistics.median(off.values()) <= median, off
    assert max(off.values()) <= most, off


@pytest.mark.parametrize(("name", "jobs"), [("planned", 10), ("planned-eighth", 12)])
def test_steps_that_were_planned_are_forecast_well(name: str, jobs: int) -> None:
    off = off_by(name, "-planned")
    assert len(off) == jobs
    assert statistics.median(off.values()) <= 0.06, off
    assert max(off.values()) <= 0.12, off


@pytest.mark.parametrize(
    ("name", "jobs"), [("planned", 1), ("planned-more", 2), ("planned-fourth", 4), ("planned-fifth", 2), ("planned-eighth", 2)]
)
def test_steps_with_everything_on_the_device_are_forecast_well(name: str, jobs: int) -> None:
    """In one pass and in several; of a transformer, and of a convolutional network, whose steps wait for the host."""
    off = {}
    for row in rows_of(name, in_chunks=False):
        job = planned.JOBS[row["job"]]
        profile = profiled(name, job.case, job.batch, row["about"]["micro_batch"])
        off[row["job"]] = abs(forecast(profile, profile.passes[0]).step_seconds / row["measured"]["step_seconds"] - 1)
    assert len(off) == jobs
    assert max(off.values()) <= 0.06, off


def off_by(name: str, ending: str) -> dict[tuple[str, int], float]:
    return {
        (IDS[index], index): abs(predicted(index)["step_seconds"] / row["measured"]["step_seconds"] - 1)
        for index, (of, row) in enumerate(RECORDS)
        if of == name and IDS[index].endswith(ending)
    }


@pytest.mark.parametrize(
    ("name", "plans", "outside"),
    [("planned", 11, 1), ("planned-seventh", 11, 0), ("planned-eighth", 12, 1), ("planned-ninth", 6, 0)],
)
def test_what_reasons_name_costs_what_they_say(name: str, plans: int, outside: int) -> None:
    """Within the stated band of what was forecast then, measured beside the plan they belong to; but a Llama's two passes."""
    named = [row for row in rows_of(name) if row["plan"].startswith(planned.WHY)]
    assert len(named) == plans
    off = [row for row in named if abs(_then(row) / row["measured"]["step_seconds"] - 1) > CALIBRATION.offload_time_error.value]
    assert [(row["job"], row["plan"]) for row in off] == [
        ("llama-1b batch 4 cap 12", "not micro-batch: 2, 2 passes a step")
    ] * outside


def _then(row: Row) -> float:
    return float(row["predicted_then"]["step_seconds"])


@pytest.mark.parametrize(
    ("name", "job", "plans", "most"),
    [
        ("planned", "4b batch 8 cap 24", 17, 1.03),
        ("planned-more", "llama-1b batch 4 cap 12", 18, 1.0),
        ("planned-more", "4b batch 8 cap 40", 18, 1.09),
        ("planned-third", "4b batch 8 cap 40", 16, 1.10),
        ("planned-fifth-regret", "4b batch 8 cap 24", 17, 1.03),
        ("planned-fifth-regret", "4b batch 8 cap 12", 15, 1.03),
        ("planned-fifth-llama", "llama-1b batch 4 cap 12", 17, 1.0),
        ("planned-sixth", "4b batch 8 cap 12", 19, 1.01),
        ("planned-eighth", "4b batch 8 cap 24", 11, 1.05),  # on a host that was faster than when it was probed
        ("planned-eighth", "llama-1b batch 4 cap 12", 17, 1.0),
        ("planned-ninth", "4b batch 8 cap 24", 16, 1.01),
    ],
)
def test_no_plan_of_many_was_much_faster_than_the_planner_s(name: str, job: str, plans: int, most: float) -> None:
    seconds = planned.seconds_of([row for row in rows_of(name) if row["job"] == job])
    assert len(seconds) == plans
    assert seconds["planned"] <= most * min(seconds.values()), seconds


def test_what_is_planned_today_was_measured_close_to_the_best() -> None:
    """GPT-2 of 4 billion parameters in 24 GiB, beside 21 other plans of one pass on the same machine."""
    name, job = "planned-regret", planned.JOBS["4b batch 8 cap 24"]
    machine = Machine.load(ROOT / f"tests/golden/h200/{name}-machine.json").with_limits(device_memory=24 * GIB)
    profile = cost([traced(job.case, job.batch, job.batch)], machine, job.batch)
    routes = Counter(placement.route for placement in search(profile).chunks)
    measured = [row for of, row in RECORDS if of == name and row["job"] == job.name]
    best = min(row["measured"]["step_seconds"] for row in measured)

    def distance(row: Row) -> int:
        there = Counter(placement.route for placement in planned.placements_of(row["about"]))
        return sum(abs(there[route] - routes[route]) for route in ("resident", "streamed", "host"))

    nearest = min((row for row in measured if row["about"]["speculates"]), key=distance)
    assert distance(nearest) <= 6
    assert nearest["measured"]["step_seconds"] <= 1.06 * best


def test_the_plans_that_are_compared_are_different_and_fit() -> None:
    job = planned.JOBS["llama-1b batch 4 cap 12"]
    found = planned.plans_of(job, Machine.load(ROOT / "tests/golden/h200/planned-machine.json"), 4)
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


def test_updates_in_two_parts_shorten_a_step_that_waits_for_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecast for a plan that was measured with every step clipped, when updates were not parted: 0.81 s."""
    (row,) = [row for row in rows_of("planned-fifth") if row["job"] == "4b batch 8 cap 24 clipping"]
    job, about = planned.JOBS[row["job"]], row["about"]
    profile = profiled("planned-fifth", job.case, job.batch, about["micro_batch"])
    candidate = planned.candidate_of(about, traced(job.case, job.batch, about["micro_batch"]), profile.passes[0])
    candidate = replace(candidate, placements=tuple(replace(each, speculates=False) for each in candidate.placements))
    rates = Space(profile).evaluation.rates
    parted = simulate(candidate, rates).step_seconds
    monkeypatch.setattr("anyfit.planning.simulation.updates.two_phase_share", lambda *_given: 0.0)
    at_once = simulate(candidate, rates).step_seconds
    assert at_once == pytest.approx(row["measured"]["step_seconds"], rel=0.06)
    assert parted < 0.9 * at_once


def test_more_host_memory_is_never_slower() -> None:
    """GPT-2 of 10 billion parameters with 16 samples on an H200 held to 24 GiB, whose host has just enough."""
    machine, graph = Machine.load(ROOT / "tests/golden/h200/planned-fifth-machine.json"), traced("10b", 16, 16)
    found = []
    for host in (123.5, 124.5, 125.5):
        best = fastest(cost([graph], machine.with_limits(device_memory=24 * GIB, host_memory=int(host * GIB)), 16))
        assert best is not None
        assert best.offer is not None
        found.append(best.offer.simulated.step_seconds)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.95 * found[0]
