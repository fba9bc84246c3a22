"""What is fetched for the computation: weights that are not on the device, or sharded, and activations that were offloaded.

Weights are fetched to slots, some ahead of their use. The slot that is given up for others is that of the chunk whose next use is
the last. A block's activations are offloaded when its forward is over, and an offloaded block begins when the one before the last
is on the host. They return when backward comes to the offloaded block after it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from functools import cache, partial

from anyfit.values.engine import OFFLOADED_AT_ONCE

from .clock import Signal, Work
from .step import Chunk, Step


class Fetches:
    def __init__(self, step: Step) -> None:
        self._resources, self._exchanges, self._ledger = step.resources, step.exchanges, step.ledger
        self._launching, self._costs = step.launching, step.rates.host.launching
        self._most, self._prefetch = step.candidate.slots, step.candidate.prefetch
        self._slots: dict[int, Signal] = {}  # by chunk: its weights are there
        self._touches = [chunk for used in step.uses for chunk in used if chunk.is_away]
        self._positions: dict[int, list[int]] = {}  # in these, by chunk
        for position, chunk in enumerate(self._touches):
            self._positions.setdefault(chunk.index, []).append(position)
        self._position = 0
        self._coming = cache(self._next_ones)  # every pass comes by the same places

    def begin_pass(self) -> None:
        self._position = 0

    def ready(self, used: Sequence[Chunk]) -> Work:
        """The weights of a segment are there."""
        for chunk in used:
            if not chunk.fresh.happened and chunk.route != "resident":
                chunk.fresh.then(self._launching.wait)  # the host waits for it too, and not for the copy after it
            if chunk.route == "disk" and not chunk.fresh.happened:
                yield from self._ledger.wait("disk", chunk.fresh)
            if not chunk.is_away:
                if not chunk.fresh.happened:
                    yield from self._ledger.wait("exchange" if chunk.route == "resident" else "update", chunk.fresh)
                continue
            if chunk.index not in self._slots:
                if len(self._slots) >= self._most:
                    del self._slots[self._used_last()[0]]
                self._fetch(chunk)
            yield from self._ledger.wait("fetch" if chunk.is_on_host else "exchange", self._slots[chunk.index])
            self._position += 1
        if self._touches:
            self._fetch_ahead()

    def drop(self, chunk: Chunk) -> None:
        self._slots.pop(chunk.index, None)

    def _fetch_ahead(self) -> None:
        for chunk in self._coming(self._position):
            if chunk.index in self._slots:
                continue
            if len(self._slots) >= self._most:
                last, used = self._used_last()
                if used <= self._next_use(chunk.index):
                    return
                del self._slots[last]
            self._fetch(chunk)

    def _next_ones(self, position: int) -> tuple[Chunk, ...]:
        """Those that are touched next from there, as many as are fetched ahead."""
        coming: dict[int, Chunk] = {}
        for at in range(position, len(self._touches)):
            coming[self._touches[at].index] = self._touches[at]
            if len(coming) >= self._prefetch:
                break
        return tuple(coming.values())

    def _fetch(self, chunk: Chunk) -> None:
        self._launching.spend(self._costs.fetch_seconds + self._costs.bind_seconds * chunk.cost.tensors)
        there = self._slots[chunk.index] = Signal()
        arrived = partial(self._exchanges.all_gather, chunk, there.fire) if chunk.gathers else there.fire
        if chunk.is_on_host:
            chunk.fresh.then(partial(self._resources.use, "up", "fetch", chunk.weights_bytes, arrived))
        else:
            chunk.fresh.then(arrived)

    def _next_use(self, index: int) -> int:
        """Position in the touches, of this pass or the next."""
        positions = self._positions[index]
        found = bisect_left(positions, self._position)
        return positions[found] if found < len(positions) else positions[0] + len(self._touches)

    def _used_last(self) -> tuple[int, int]:
        """Of the chunks in slots, the one whose next use is the last, and that use. One loop, as it is much of a simulation."""
        position, after = self._position, len(self._touches)
        last, used = -1, -1
        for index in self._slots:
            positions = self._positions[index]
            found = bisect_left(positions, position)
            use = positions[found] if found < len(positions) else positions[0] + after
            if use > used:
                last, used = index, use
        return last, used


class OffloadedActivations:
    def __init__(self, step: Step) -> None:
        candidate = self._candidate = step.candidate
        self._resources, self._ledger = step.resources, step.ledger
        self._forwards = Counter(each.block for each in candidate.profile_pass.segments if each.phase == "forward")
        self._bytes = {block: candidate.offloaded_bytes(block) for block in candidate.offloaded}
        self.begin_pass()

    def begin_pass(self) -> None:
        self._forwards_left = {block: self._forwards[block] for block in self._bytes}
        self._landed = {block: Signal() for block in self._bytes}  # on the host
        self._returned = {block: Signal() for block in self._bytes}
        self._returning: set[int] = set()
        self._going: deque[int] = deque()  # blocks whose memory is held until they are on the host

    def begin(self, block: int) -> Work:
        """A block's forward: one that is offloaded begins when there is room."""
        if block not in self._bytes or self._forwards_left[block] < self._forwards[block]:
            return
        while len(self._going) > OFFLOADED_AT_ONCE - 1:
            yield from self._ledger.wait("activations", self._landed[self._going.popleft()])
        self._going.append(block)

    def forward_over(self, block: int) -> None:
        """Of one of its segments."""
        if block not in self._bytes:
            return
        self._forwards_left[block] -= 1
        if self._forwards_left[block] == 0:
            self._resources.use("down", "activations", self._bytes[block], self._landed[block].fire)

    def back(self, block: int) -> Work:
        """Those of a block are on the device again; and those of the offloaded block before it begin to return."""
        self._bring_back(block)
        if (before := self._candidate.before.get(block)) is not None:
            self._bring_back(before)
        yield from self._ledger.wait("activations", self._returned[block])

    def _bring_back(self, block: int) -> None:
        if block not in self._returning:
            self._returning.add(block)
            back = self._returned[block].fire
            self._landed[block].then(partial(self._resources.use, "up", "activations", self._bytes[block], back))
