"""Plans written by hand: for the engine's tests and benchmarks, which place chunks as they like. They forecast nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import anyfit
from anyfit.values.mesh import AXES
from anyfit.values.plan import Activations, BlockCut, Forecast, Placement, Plan, Stage


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
    disk_bytes: int = 2**36,
    ranks: int = 1,
    tensor: int = 1,
    cut: Mapping[str, BlockCut] | None = None,
    tables: tuple[str, ...] = (),
    stages: tuple[tuple[int, int], ...] = ((0, 0),),
    pipeline: int = 1,
    reduction: Literal["fp32", "bf16"] = "fp32",
) -> Plan:
    """A plan that places every chunk as said, or all alike when one placement is given. `stages` have the first and the last of
    their block calls; what is done with blocks is said in the first of them."""
    nothing, data = {"device": 0, "host": 0, "disk": 0}, ranks // tensor // pipeline
    first = Stage(*stages[0], activations or {}, compiled, replayed, cut or {}, tables)
    return Plan(
        model="",
        machine="",
        parameters=0,
        precision=job.precision,
        batch_size=job.batch_size,
        micro_batch=job.batch_size // data // accumulation,
        accumulation=accumulation,
        mesh={**dict.fromkeys(AXES, 1), "data": data, "tensor": tensor, "pipeline": pipeline},
        stages=(first, *(Stage(*calls, {}) for calls in stages[1:])),
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        slots=slots,
        prefetch=prefetch,
        limit_bytes={"device": device_bytes, "host": host_bytes, "disk": disk_bytes},
        forecast=Forecast(1.0, 0.0, {}, nothing, 0.0, 0, 0.0, 1.0, 1.0, 1.0),
        decisions=(),
        alternatives=(),
        fingerprint=None,
        reduction=reduction,
    )
