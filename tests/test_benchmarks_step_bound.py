"""Seconds that no plan is under."""

from __future__ import annotations

import pytest

import anyfit
from anyfit import targets
from anyfit.planning import search
from anyfit.profiling import profiled, traced
from benchmarks.step_bound import Bound, bound_of


def test_no_plan_is_under_the_bound_and_less_memory_raises_it() -> None:
    job = targets.job_for("gpt2-small", batch=8)
    machine, graphs = anyfit.Machine.load("h200"), traced(job, "cuda")
    context = machine.device.context_bytes.value
    bounds: list[Bound] = []
    for memory in (None, "2GiB"):
        limited = machine.with_limits(device_memory=memory)
        profile = profiled(job, graphs, limited, (1, 1), job.batch_size)
        bound = bound_of(profile, limited.device_limit_bytes - context)
        assert bound is not None
        assert bound.seconds == pytest.approx(max(bound.parts.values()))
        assert bound.seconds <= search(profile).forecast.step_seconds
        bounds.append(bound)
    assert [each.seconds for each in bounds] == sorted(each.seconds for each in bounds)
    assert bounds[0].seconds < 0.95 * bounds[-1].seconds
    assert bound_of(profile, 2**26) is None
