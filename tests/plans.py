"""Plans written by hand, for tests of the engine: what they forecast is not looked at."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

import anyfit
from anyfit.placing import place
from anyfit.running.run import Run
from anyfit.values.plan import AXES, Activations, Forecast, Placement, Plan, Stage

RESIDENT = Placement()
STREAMED = Placement(optimizer="host")
ON_HOST = Placement(gradients="host", optimizer="host", update="host")
AWAY = Placement(weights="host", gradients="host", optimizer="host", update="host")
AWAY_STREAMED = Placement(weights="host", gradients="host", optimizer="host")


def hand_written(
    job: anyfit.Job,
    *chunks: Placement,
    chunk_bytes: int = 4096,
    slots: int = 4,
    prefetch: int = 2,
    accumulation: int = 1,
    activations: Mapping[str, Activations] | None = None,
    host_bytes: int = 2**33,
) -> Plan:
    nothing = {"device": 0, "host": 0, "disk": 0}
    return Plan(
        model="",
        machine="",
        parameters=0,
        precision=job.precision,
        batch_size=job.batch_size,
        micro_batch=job.batch_size // accumulation,
        accumulation=accumulation,
        mesh=dict.fromkeys(AXES, 1),
        stages=(Stage(0, 0, activations or {}),),
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        slots=slots,
        prefetch=prefetch,
        limit_bytes={"device": 2**33, "host": host_bytes, "disk": 0},
        forecast=Forecast(1.0, 0.0, {}, nothing, 0.0, 0, 0.0, 1.0, 1.0, 1.0),
        decisions=(),
        alternatives=(),
        fingerprint=None,
    )


def started(job: anyfit.Job, plan: Plan, delay: Callable[[], None] | None = None, device: str = "cpu") -> Run:
    """As `anyfit.start` does, with delays in every lane."""
    torch.manual_seed(job.seed)
    return Run(job, plan, place(job, plan, job.build(), torch.device(device), delay))


def random_delays(seed: int, longest_seconds: float = 0.0005) -> Callable[[], None]:
    generator = random.Random(seed)

    def delay() -> None:
        if generator.random() < 0.5:
            time.sleep(generator.random() * longest_seconds)

    return delay


def chunk_count(job: anyfit.Job, chunk_bytes: int) -> int:
    """How many chunks the job's model makes."""
    with started(job, hand_written(job, chunk_bytes=chunk_bytes)) as run:
        placed: Any = run._placed
        return len(placed.state.chunks)
