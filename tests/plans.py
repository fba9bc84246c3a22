"""Placements and runs for tests of the engine."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch

import anyfit
from anyfit.placing import place
from anyfit.placing.place import Placed
from anyfit.running.run import Run
from anyfit.values.plan import Placement, Plan
from benchmarks.by_hand import hand_written as hand_written

RESIDENT = Placement()
STREAMED = Placement(optimizer="host")
ON_HOST = Placement(gradients="host", optimizer="host", update="host")
ON_DISK = Placement(gradients="host", optimizer="disk", update="host")
AWAY_ON_DISK = Placement(weights="host", gradients="host", optimizer="disk", update="host")
DISK_STREAMED = Placement(optimizer="disk")
AWAY_DISK_STREAMED = Placement(weights="host", gradients="host", optimizer="disk")
ALL_ON_DISK = {
    "disk": ON_DISK, "away and disk": AWAY_ON_DISK, "disk, streamed": DISK_STREAMED,
    "away and disk, streamed": AWAY_DISK_STREAMED,
}  # fmt: skip
AWAY = Placement(weights="host", gradients="host", optimizer="host", update="host")
AWAY_STREAMED = Placement(weights="host", gradients="host", optimizer="host")


def started(job: anyfit.Job, plan: Plan, delay: Callable[[], None] | None = None, device: str = "cpu") -> Run:
    """As `anyfit.start` does, with delays in every lane."""
    torch.manual_seed(job.seed)
    return Run(job, plan, place(job, plan, job.build(), torch.device(device), delay))


def placed_of(run: Run) -> Placed:
    """What a run has placed: the room's interface, for tests that look inside."""
    return run._engine.placed


def random_delays(seed: int, longest_seconds: float = 0.0005) -> Callable[[], None]:
    generator = random.Random(seed)

    def delay() -> None:
        if generator.random() < 0.5:
            time.sleep(generator.random() * longest_seconds)

    return delay


def chunk_count(job: anyfit.Job, chunk_bytes: int) -> int:
    """How many chunks the job's model makes."""
    with started(job, hand_written(job, chunk_bytes=chunk_bytes)) as run:
        return len(placed_of(run).state.chunks)
