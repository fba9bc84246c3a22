"""Do the calibration's figures still fit what was recorded?

    python -m benchmarks.calibrate [--write]

Forecasts the cases of benchmarks/profiler.py from the machine recorded with them, and compares with the measured steps:

- A fitted figure is varied by itself around its value. The best value is where the worst case that calibrates is nearest to its
  forecast; the range is where it is at most a point of percent further off. A figure that no case bounds has a wide range.
  Convolutions are left out of it where the curves price them: they are rough.
- An error figure is the worst of all cases, rounded up to a percent.

`--write` puts the ranges and the error figures into the calibration of GPUs; values are changed by hand, with new recordings.
Figures that come from elsewhere (timelines, starts, planned runs) say so in their source.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from anyfit.costing import cost
from anyfit.planning.forecast import forecast
from anyfit.tracing import trace
from anyfit.values.calibration import Calibration, Figure
from anyfit.values.graph import Graph
from anyfit.values.machine import Machine
from anyfit.values.plan import Forecast

from . import record
from .cases import Case, is_alike, job_of

FILE = Path(__file__).parent.parent / "anyfit" / "values" / "calibrations" / "cuda.json"
FITTED = ("curve_slowdown", "call_slowdown", "host_call_factor", "update_calls", "split_update_bytes")
TIMES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 2.0)  # of a figure's value, that are tried
WORSE = 0.01
Row = dict[str, Any]


@cache
def graph_of(document: str) -> Graph:
    case = Case.from_json(json.loads(document))
    return trace(job_of(case), case.batch, "cuda")


def forecasts(case: Row, machine: Machine) -> dict[str, Forecast]:
    """By the calls that were measured, and by the curves alone."""
    graph, bare = graph_of(json.dumps(case)), replace(machine, device=replace(machine.device, measured={}))
    profiles = {"calls": cost([graph], machine, case["batch"]), "curves": cost([graph], bare, case["batch"])}
    return {how: forecast(profile, profile.passes[0]) for how, profile in profiles.items()}


def off(row: Row, machine: Machine) -> dict[str, float]:
    """How far the measured step lies from its forecasts, as shares of them."""
    found, measured = forecasts(row["case"], machine), row["measured"]
    calls, context = found["calls"], machine.device.context_bytes.value
    return {
        **{how: measured["step_seconds"] / each.step_seconds - 1 for how, each in found.items()},
        "peak": measured["allocated_bytes"] / calls.peak_bytes["device"] - 1,
        "reserved": measured["reserved_bytes"] / (calls.reserved_bytes - context) - 1,
    }


def calibrated(machine: Machine, **changes: Figure) -> Machine:
    calibration = replace(machine.device.calibration, **changes)
    return replace(machine, device=replace(machine.device, calibration=calibration))


def worst(rows: list[Row], machine: Machine, how: str) -> float:
    return max(abs(off(row, machine)[how]) for row in rows)


def fitted(name: str, rows: list[Row], machine: Machine) -> tuple[float, float, float]:
    """The best value, and the ends of its range."""
    figure: Figure = getattr(machine.device.calibration, name)
    how = "calls" if name == "call_slowdown" else "curves"
    rows = [row for row in rows if how == "calls" or "rough" not in row]
    tried = {}
    for times in TIMES:
        changed = replace(figure, value=figure.value * times)
        tried[changed.value] = worst(rows, calibrated(machine, **{name: changed}), how)
    best = min(tried, key=tried.__getitem__)
    near = [value for value, error in tried.items() if error <= tried[best] + WORSE]
    return best, min(near), max(near)


def errors(rows: list[Row], machine: Machine) -> dict[str, float]:
    """By error figure, the worst of the cases that it speaks of, rounded up."""
    found = [("rough" in row, off(row, machine)) for row in rows]
    worst_of = {
        "time_error": [abs(each["curves"]) for is_rough, each in found if not is_rough],
        "rough_time_error": [abs(each["curves"]) for is_rough, each in found if is_rough],
        "measured_time_error": [abs(each["calls"]) for _, each in found],
        "peak_error": [abs(each["peak"]) for _, each in found],
        "reserved_error": [abs(each["reserved"]) for _, each in found],
    }
    return {name: math.ceil(100 * max(values)) / 100 for name, values in worst_of.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()

    recorded = record.recordings("profiler")[-1]
    machine, rows = recorded.machine, [row for row in recorded.rows if is_alike(row)]
    calibrating = [row for row in rows if row["case"].get("calibrates")]
    changes: dict[str, Figure] = {}
    for name in FITTED:
        figure: Figure = getattr(machine.device.calibration, name)
        best, least, most = fitted(name, calibrating, machine)
        print(f"{name:<24} {figure.value:g}; the cases say {best:g}, and {least:g} to {most:g} alike", flush=True)
        changes[name] = replace(figure, measurement_error=round(max(most / figure.value - 1, 1 - least / figure.value, 0.0), 2))
    for name, error in errors(rows, machine).items():
        figure = getattr(machine.device.calibration, name)
        print(f"{name:<24} {figure.value:g}; the worst of {len(rows)} cases is {error:g}")
        changes[name] = replace(figure, value=max(figure.value, error))
    if options.write:
        calibration: Calibration = replace(machine.device.calibration, **changes)
        assert {field.name for field in fields(calibration)} > set(changes)
        calibration.save(FILE)


if __name__ == "__main__":
    main()
