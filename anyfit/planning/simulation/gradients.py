"""Gradients on their way: when a chunk's are complete they are put in a staging buffer, and copied to the host, or reduced over
ranks first. Those of several micro-batches add up where they end."""

from __future__ import annotations

from collections.abc import Generator
from functools import partial

from anyfit.planning.candidate import ADDED
from anyfit.values.engine import GRADIENT_BUFFERS, REDUCTION_BUFFERS

from .clock import Call, Signal, Work
from .step import Chunk, Step, Waits


class Gradients:
    def __init__(self, step: Step) -> None:
        candidate = self._candidate = step.candidate
        self._rates, self._resources, self._exchanges, self._ledger = step.rates, step.resources, step.exchanges, step.ledger
        self._is_alone = candidate.division.is_alone
        self._waited_for: Waits = "gradients" if self._is_alone else "exchange"
        self._most_staged = GRADIENT_BUFFERS if self._is_alone else REDUCTION_BUFFERS
        self._staged = 0
        self._stage_free = Signal(happened=True)
        self._holds_norm = candidate.adds_up or not self._is_alone  # the norm waits for all of them
        self._adding = 0  # that are being added up on the host, or over ranks
        self._all_added = Signal(happened=True)

    def complete(self, chunk: Chunk, *, is_last: bool) -> Generator[float | Signal, None, Signal]:
        """All of a chunk are made, of one micro-batch; the signal says that they have arrived where they are updated."""
        arrived = Signal()
        if not self._candidate.stages(chunk.placement, is_last=is_last):
            self._resources.owed_seconds += self._candidate.adds_up * self._rates.add_seconds * chunk.cost.elements
            arrived.fire()
            return arrived
        self._resources.owed_seconds += self._rates.gather_seconds * chunk.cost.elements
        yield from self._ledger.wait(self._waited_for, self._stage_free)
        self._staged += 1
        if self._staged == self._most_staged:
            self._stage_free = Signal()
        if self._holds_norm:
            if self._adding == 0:
                self._all_added = Signal()
            self._adding += 1
        landed = partial(self._landed, chunk, arrived)
        send = partial(chunk.whole.then, partial(self._send, chunk, landed))  # no sooner than the last moments are made
        if self._is_alone:
            send()
        else:
            self._exchanges.reduce(chunk, send if chunk.placement.gradients == "host" else landed)
        return arrived

    def all_added(self) -> Work:
        yield from self._ledger.wait(self._waited_for, self._all_added)

    def _send(self, chunk: Chunk, landed: Call) -> None:
        self._resources.use("down", "gradients", self._candidate.sent_bytes(chunk.cost), landed)

    def _landed(self, chunk: Chunk, arrived: Signal) -> None:
        self._staged -= 1
        self._stage_free.fire()
        if chunk.placement.gradients == "host" and self._candidate.adds_up:
            self._resources.use("host", "update", ADDED * chunk.elements, partial(self._added, arrived), -1)
        elif self._holds_norm:
            self._added(arrived)
        else:
            arrived.fire()

    def _added(self, arrived: Signal) -> None:
        arrived.fire()
        self._adding -= 1
        if self._adding == 0:
            self._all_added.fire()
