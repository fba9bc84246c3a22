"""Streamed updates: a chunk's state is lifted to the device, updated there and lowered again, a few chunks at once."""

from __future__ import annotations

import heapq
from functools import partial

from anyfit.planning.rates import Rates
from anyfit.values.engine import STREAMED_DEPTH

from .clock import Call, Clock
from .resources import Resource, Resources
from .step import Chunk

LIFT_SECONDS = 1.5e-3  # of a lift, beside its copies: its parts wait for each other
PARTS = 3  # moments and low halves are copies of their own: others come in between


class StreamedUpdates:
    def __init__(self, clock: Clock, rates: Rates, resources: Resources) -> None:
        self._clock, self._rates, self._resources = clock, rates, resources
        self._waiting: list[tuple[int, int, Call]] = []  # for a carrier, the first in order of use first
        self._carriers = STREAMED_DEPTH
        self._is_lifting = False
        self._count = 0

    def update(self, chunk: Chunk, done: Call) -> None:
        self._count += 1
        begin: Call = partial(self._begin, chunk, done)
        heapq.heappush(self._waiting, (chunk.index, self._count, begin))
        self._lift_next()

    def _lift_next(self) -> None:
        if self._waiting and self._carriers and not self._is_lifting:
            heapq.heappop(self._waiting)[2]()

    def _begin(self, chunk: Chunk, done: Call) -> None:
        self._carriers -= 1
        self._is_lifting = True
        size = chunk.optimizer_bytes + (chunk.weights_bytes if chunk.is_on_host else 0)
        self._copy("up", "lift", size, chunk.index, partial(self._lifted, chunk, done))

    def _lifted(self, chunk: Chunk, done: Call) -> None:
        self._resources.owed_seconds += self._rates.update_seconds * chunk.elements  # the computation has less of the device
        self._clock.at(LIFT_SECONDS, self._lift_over)
        size = chunk.optimizer_bytes + (chunk.weights_bytes if chunk.is_on_host or chunk.speculates else 0)
        self._copy("down", "lower", size, chunk.index, partial(self._lowered, done))

    def _lift_over(self) -> None:
        self._is_lifting = False
        self._lift_next()

    def _lowered(self, done: Call) -> None:
        self._carriers += 1
        done()
        self._lift_next()

    def _copy(self, name: Resource, queue: str, size: float, order: int, done: Call, parts: int = PARTS) -> None:
        then = done if parts == 1 else partial(self._copy, name, queue, size, order, done, parts - 1)
        self._resources.use(name, queue, size / PARTS, then, order)
