"""Forecasts beside recorded measurements: every case of benchmarks/profiler.py is predicted from the machine recorded with it,
once with the calls that were measured on the machine, and once by its curves alone, as for a machine that is not at hand.

What cannot run here, a GPU, was measured there; what can be wrong here, the forecast, is checked on every commit.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal

import pytest

from anyfit.costing import cost
from anyfit.planning.forecast import forecast
from anyfit.tracing import trace
from anyfit.values.calibration import Calibration, Figure
from anyfit.values.machine import Curve, Machine
from anyfit.values.plan import Forecast
from benchmarks import record
from benchmarks.cases import Case, is_alike, job_of
from benchmarks.record import Recording

CPU, CUDA = Calibration.of("cpu"), Calibration.of("cuda")
RECORDINGS = record.recordings("profiler")
PROBED_TWICE = [each for each in RECORDINGS if "machine_again" in each.document]
How = Literal["by calls", "by curves"]


def rows_of(recording: Recording) -> list[dict[str, Any]]:
    """The cases whose model is the same here as where it was measured."""
    return [row for row in recording.rows if is_alike(row)]


CASES = [
    pytest.param(recording, row, id=f"{recording.name}-{row['case']['name']}")
    for recording in RECORDINGS
    for row in rows_of(recording)
]


@cache
def predicted(recording: Recording, document: str) -> dict[How, Forecast]:
    case, machine = Case.from_json(json.loads(document)), recording.machine
    graph = trace(job_of(case), case.batch, machine.device.kind)
    machines: dict[How, Machine] = {
        "by calls": machine,
        "by curves": replace(machine, device=replace(machine.device, measured={})),
    }
    profiles = {how: cost([graph], each, case.batch) for how, each in machines.items()}
    return {how: forecast(profile, profile.passes[0]) for how, profile in profiles.items()}


def errors(recording: Recording, row: dict[str, Any], how: How) -> dict[str, float]:
    """How far the measurement lies from the forecast, as a share of the forecast: what an error band promises."""
    expected, measured = predicted(recording, json.dumps(row["case"]))[how], row["measured"]
    context = recording.machine.device.context_bytes.value
    return {
        "allocated": abs(measured["allocated_bytes"] / expected.peak_bytes["device"] - 1),
        "reserved": abs(measured["reserved_bytes"] / (expected.reserved_bytes - context) - 1),
        "step": abs(measured["step_seconds"] / expected.step_seconds - 1),
    }


def test_there_is_something_to_hold_forecasts_to() -> None:
    assert len(CASES) >= 20
    assert PROBED_TWICE


@pytest.mark.parametrize("how", ["by calls", "by curves"])
@pytest.mark.parametrize(("recording", "row"), CASES)
def test_a_recorded_step_lies_within_the_forecasts_error_band(recording: Recording, row: dict[str, Any], how: How) -> None:
    off, expected = errors(recording, row, how), predicted(recording, json.dumps(row["case"]))[how]
    assert off["allocated"] <= expected.peak_error
    assert off["reserved"] <= expected.reserved_error
    assert off["step"] <= expected.step_error


@pytest.mark.parametrize(("recording", "row"), CASES)
def test_only_convolutions_and_routed_experts_widen_the_band(recording: Recording, row: dict[str, Any]) -> None:
    expected = predicted(recording, json.dumps(row["case"]))
    by_curves = CUDA.rough_time_error if "rough" in row else CUDA.time_error  # ViT has a convolution, but hardly computes with it
    assert expected["by curves"].step_error == by_curves.value
    by_calls = CUDA.rough_time_error if "calls_missing" in row else CUDA.measured_time_error
    assert expected["by calls"].step_error == by_calls.value


@pytest.mark.parametrize(("recording", "row"), CASES)
def test_a_forecast_by_measured_calls_is_never_far_off(recording: Recording, row: dict[str, Any]) -> None:
    off = errors(recording, row, "by calls")
    assert off["allocated"] <= 0.03
    assert off["reserved"] <= 0.06
    assert off["step"] <= 0.12


@pytest.mark.parametrize("which", ["all", "held out"])  # held out: no constant was fitted to them
@pytest.mark.parametrize(("how", "most_seconds"), [("by calls", 0.04), ("by curves", 0.08)])
@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda each: each.name)
def test_the_median_errors_are_small(recording: Recording, how: How, most_seconds: float, which: str) -> None:
    rows = [row for row in rows_of(recording) if which == "all" or not row["case"]["calibrates"]]
    off = [errors(recording, row, how) for row in rows]
    assert statistics.median(each["allocated"] for each in off) <= 0.005
    assert statistics.median(each["reserved"] for each in off) <= 0.005
    assert statistics.median(each["step"] for each in off) <= most_seconds


def readings(value: object, path: str = "") -> dict[str, tuple[float, float]]:
    """Every figure and every point of a curve below a value, by where it stands: the number, and how far it may be off."""
    match value:
        case Figure():
            return {path: (value.value, value.measurement_error * value.value)}
        case Curve():
            return {f"{path} at {size:g}": (rate, value.measurement_error * rate) for size, rate in value.points}
        case Mapping():
            inside = dict(value)
        case tuple():
            inside = dict(enumerate(value))
        case _:
            inside = {each.name: getattr(value, each.name) for each in fields(value)} if is_dataclass(value) else {}
    return {key: reading for name, each in inside.items() for key, reading in readings(each, f"{path}.{name}").items()}


@pytest.mark.parametrize("recording", PROBED_TWICE, ids=lambda each: each.name)
def test_two_probes_of_a_machine_agree_within_their_errors(recording: Recording) -> None:
    first, second = readings(recording.machine), readings(Machine.load(recording.machine_file("machine_again")))
    assert first.keys() == second.keys()
    assert len(first) >= 200
    for name, (value, error) in first.items():
        other, other_error = second[name]
        assert abs(value - other) <= error + other_error, name


@pytest.mark.parametrize("recording", record.recordings("forecast"), ids=lambda each: each.name)
def test_steps_recorded_on_a_cpu_lie_within_the_error_band_that_plans_for_one_carry(recording: Recording) -> None:
    assert len(recording.rows) >= 8
    for row in recording.rows:
        band = CPU.rough_time_error if "rough" in row else CPU.time_error
        assert abs(row["off"]["step"]) <= band.value, row["case"]
        assert abs(row["off"]["peak"]) <= CPU.peak_error.value, row["case"]
