"""What steps hold on the CPU device, counted: the device of a GPU does that itself, and refuses what is over its limit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from anyfit.placing.tiers import LiveBytes, peak_bytes_of_gpu
from anyfit.values.batches import named_tensors, shape_of
from anyfit.values.job import Batch

from .engine import Engine
from .shortage import OverLimitError, Shortfall, module_at

WATCHED_STEPS = 2  # of every batch shape: one makes the optimizer's state, one uses it


def shapes_of(batch: Batch) -> Any:
    return tuple((name, shape_of(tensor)) for name, tensor in named_tensors(batch))


class Counting:
    """Counts what the first steps of every batch shape hold, and keeps them to the plan's limit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._peak_bytes = 0
        self._watched: Counter[Any] = Counter()  # steps counted, by the shapes of the batch
        self._is_updating = False  # what is changed in place is not to be broken off
        self._over: OverLimitError | None = None  # met meanwhile

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        engine, shape = self._engine, shapes_of(batch)
        if engine.device.type != "cpu" or self._watched[shape] >= WATCHED_STEPS:
            yield
            return
        held, limit = engine.placed.device_bytes, engine.plan.limit_bytes["device"]

        def exceeded(live_bytes: int) -> None:
            where = module_at(engine.model, sys._getframe(1))
            error = OverLimitError(engine.plan, Shortfall(where, held + live_bytes, limit))
            if not self._is_updating:
                raise error
            if self._over is None or self._over.shortfall.needed_bytes < held + live_bytes:
                self._over = error

        residency = engine.placed.residency
        with LiveBytes(limit - held, exceeded) as live:
            residency.slots.on_growth, told = live.count, residency.slots.on_growth
            try:
                yield
            finally:
                residency.slots.on_growth = told
        self._watched[shape] += 1
        self._peak_bytes = max(self._peak_bytes, held + live.peak_bytes)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the update: what it holds over the limit is told after it."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    def pop_over_limit(self) -> OverLimitError | None:
        """Of the last update, if it held more than it may."""
        over, self._over = self._over, None
        return over

    def forget(self) -> None:
        """With another plan steps hold something else."""
        self._watched.clear()

    @property
    def peaks(self) -> Mapping[str, int]:
        """By tier, the most bytes so far."""
        engine = self._engine
        device = peak_bytes_of_gpu(engine.device) if engine.device.type == "cuda" else self._peak_bytes
        return {"device": device, "host": engine.placed.host_bytes, "disk": 0}
