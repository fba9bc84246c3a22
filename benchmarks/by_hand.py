"""Plans written by hand: for the engine's tests and benchmarks, which place chunks as they like. They forecast nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import anyfit
from anyfit.values.plan import AXES, Activations, Forecast, Placement, Plan, Stage


def hand_written(
    job: anyfit.Job,
    *chunks: Placement,
    chunk_bytes: int = 4096,
    slots: int = 4,
    prefetch: int = 2,
    accumulation: int = 1,
    activations: Mapping[str, Activations] | None = None,
    compiled: tuple[str, ...] = (),
    replayed: tuple[str, ...] = (),
    device_bytes: int = 2**33,
    host_bytes: int = 2**33,
    ranks: int = 1,
    reduction: Literal["fp32", "bf16"] = "fp32",
) -> Plan:
    """A plan that places every chunk as said, or all alike when one placement is given."""
    nothing = {"device": 0, "host": 0, "disk": 0}
    return Plan(
        model="",
        machine="",
        parameters=0,
        precision=job.precision,
        batch_size=job.batch_size,
        micro_batch=job.batch_size // ranks // accumulation,
        accumulation=accumulation,
        mesh={**dict.fromkeys(AXES, 1), "data": ranks},
        stages=(Stage(0, 0, activations or {}, compiled, replayed),),
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        slots=slots,
        prefetch=prefetch,
        limit_bytes={"device": device_bytes, "host": host_bytes, "disk": 0},
        forecast=Forecast(1.0, 0.0, {}, nothing, 0.0, 0, 0.0, 1.0, 1.0, 1.0),
        decisions=(),
        alternatives=(),
        fingerprint=None,
        reduction=reduction,
    )
