"""Updates of chunks whose optimizer is on the host, by the host or streamed, or on the disk; and the way of their fresh weights.

Those that do not speculate begin when the norm is known. Of such ones the host updates some in two phases: weights, and moments
when nobody waits for weights, before the chunk's next gradients come; as many chunks as it is through with in backward. A chunk's
weights are ready for the next forward when they are where they live; on their way up each waits for those that forward uses
before it.

Where the norm clips, what was updated before it does not count. What has not begun is left out, what is being updated goes on to
its end, and all chunks are updated anew from what they were. The host does that in one phase, as it speculates again in the next
backward.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from anyfit.planning.candidate import ONE_PHASE, WIDER, Candidate, Rates
from anyfit.values.engine import DISK_DEPTH, LATER, STREAMED_DEPTH, is_two_phase

from .clock import Call, Resource, Signal
from .fetches import Fetches
from .step import Chunk, Step

PARTS = 3  # moments and low halves are copies of their own: others come in between


@dataclass(eq=False)
class Speculation:
    """The update of one chunk before the norm of its step is known."""

    chunk: Chunk
    arrived: Signal  # its gradients
    over: Signal = field(default_factory=Signal)
    has_begun: bool = False
    counts: bool = True

    def __post_init__(self) -> None:
        self.fire = self.over.fire  # one object, by which a server knows what is taken back


class Updates:
    def __init__(self, step: Step, fetches: Fetches) -> None:
        self._chunks, self._resources, self._exchanges, self._fetches = step.chunks, step.resources, step.exchanges, fetches
        self._streamed = StreamedUpdates(step)
        self._disk = DiskUpdates(step, self._update_on_host)
        self._times = 1 + WIDER * (step.candidate.adds_up and step.rates.host.overlaps)  # what an update reads and writes
        self._norm = Signal()
        self._speculations: list[Speculation] = []  # of this step
        waiting = [each for each in step.chunks if each.route == "host" and each.cost.is_updated and not each.speculates]
        share = two_phase_share(step.candidate, step.rates, sum(chunk.elements for chunk in waiting))
        for chunk in waiting:
            chunk.is_two_phase = is_two_phase(chunk.index, share)

    def begin_step(self) -> None:
        self._norm = Signal()
        self._speculations = []

    def begin(self, chunk: Chunk, arrived: Signal) -> None:
        """The chunk's gradients of the step are complete, and `arrived` where it is updated."""
        if not chunk.cost.is_updated or (chunk.route == "resident" and not chunk.gathers):
            return
        self._norm.then(partial(self._fetches.drop, chunk))  # the weights that are there will be old
        if chunk.route == "resident":
            return
        chunk.fresh = Signal()
        if chunk.route == "disk":
            self._disk.expect(chunk, arrived, self._from_now_on(chunk))
        elif chunk.speculates:
            speculation = Speculation(chunk, arrived)
            chunk.updated = speculation.over
            self._speculations.append(speculation)
            arrived.then(partial(self._speculate, speculation))
        else:
            arrived.then(partial(self._norm.then, self._from_now_on(chunk)))

    def _from_now_on(self, chunk: Chunk) -> Call:
        """Updates the chunk in place; its weights are then on their way to where they live."""
        updated = Signal()
        if chunk.placement.update == "host" and not chunk.is_on_host:
            chunk.updated = updated
        else:  # they are where they live
            updated.then(partial(self._exchanges.share, chunk))
        if chunk.route == "streamed":
            return partial(self._streamed.update, chunk, updated.fire)
        return updated.fire if chunk.route == "disk" else partial(self._on_host, chunk, updated)

    def _speculate(self, speculation: Speculation) -> None:
        if not speculation.counts:
            return
        speculation.has_begun, chunk = True, speculation.chunk
        if chunk.route == "streamed":
            self._streamed.update(chunk, speculation.fire)
        else:
            self._resources.use("host", "update", self._times * chunk.elements, speculation.fire, chunk.index)

    def norm_known(self, *, clips: bool = False) -> None:
        self._norm.fire()
        self._disk.begin()
        if clips:
            self._update_anew()
        self._send_in_turn(iter([chunk for chunk in self._chunks if chunk.updated is not None]))

    def _update_anew(self) -> None:
        for speculation in self._speculations:  # before any of them is begun anew
            speculation.counts, speculation.chunk.updated = False, None
            if speculation.has_begun and not speculation.over.happened and self._is_taken_back(speculation):
                speculation.over.fire()
        for speculation in self._speculations:
            update = self._from_now_on(speculation.chunk)
            if speculation.has_begun:
                speculation.over.then(update)
            else:
                speculation.arrived.then(update)

    def _is_taken_back(self, speculation: Speculation) -> bool:
        if speculation.chunk.route == "streamed":
            return self._streamed.take_back(speculation.fire)
        return self._resources.servers["host"].take_back("update", speculation.fire)

    def _update_on_host(self, chunk: Chunk, done: Call) -> None:
        self._resources.use("host", "update", self._times * chunk.elements, done, chunk.index)

    def _on_host(self, chunk: Chunk, updated: Signal) -> None:
        if chunk.is_two_phase:
            then = partial(self._second_phase, chunk, updated)
            self._resources.use("host", "update", ONE_PHASE * chunk.elements, then, chunk.index)
        else:
            self._update_on_host(chunk, updated.fire)

    def _second_phase(self, chunk: Chunk, updated: Signal) -> None:
        chunk.whole = Signal()
        self._resources.use("host", "update", ONE_PHASE * chunk.elements, chunk.whole.fire, LATER - chunk.index)
        updated.fire()

    def _send_in_turn(self, chunks: Iterator[Chunk]) -> None:
        """Copies fresh weights to the device: first what the next forward needs first, each when its update is over."""
        for chunk in chunks:
            updated, chunk.updated = chunk.updated, None
            assert updated is not None
            if not updated.happened:
                updated.then(partial(self._send_on, chunk, chunks))
                return
            self._send_up(chunk)

    def _send_on(self, chunk: Chunk, chunks: Iterator[Chunk]) -> None:
        self._send_up(chunk)
        self._send_in_turn(chunks)

    def _send_up(self, chunk: Chunk) -> None:
        """Fresh weights to where they live."""
        if chunk.is_on_host:
            chunk.fresh.fire()
        else:
            self._resources.use("up", "fresh", chunk.weights_bytes, partial(self._exchanges.share, chunk))


def two_phase_share(candidate: Candidate, rates: Rates, elements: float) -> float:
    """Of the chunks that wait for the norm on the host, with so many elements: as many as have time for it in backward."""
    if not rates.host.overlaps or not elements or candidate.adds_up:  # to add gradients up keeps the host at work
        return 0.0
    backward = sum(segment.seconds for segment in candidate.profile_pass.segments if segment.phase == "backward")
    per_second = (rates.host.loaded or rates.host).updates_per_second
    return min((backward + candidate.recompute_seconds) * per_second / (ONE_PHASE * elements), 1.0)


class StreamedUpdates:
    """A chunk's state is lifted to the device, updated there and lowered again, a few chunks at once."""

    def __init__(self, step: Step) -> None:
        self._clock, self._rates, self._resources = step.clock, step.rates, step.resources
        self._waiting: list[tuple[int, int, partial[None]]] = []  # for a carrier, the first in order of use first
        self._carriers = STREAMED_DEPTH
        self._is_lifting = False
        self._count = 0

    def update(self, chunk: Chunk, done: Call) -> None:
        self._count += 1
        begin = partial(self._begin, chunk, done)
        heapq.heappush(self._waiting, (chunk.index, self._count, begin))
        self._lift_next()

    def take_back(self, done: Call) -> bool:
        """Whether it has not begun, and so is not done any more."""
        others = [each for each in self._waiting if each[2].args[1] is not done]
        was_waiting = len(others) < len(self._waiting)
        self._waiting[:] = others
        heapq.heapify(self._waiting)
        return was_waiting

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
        self._clock.at(self._rates.calibration.lift_seconds.value, self._lift_over)
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


class DiskUpdates:
    """From the norm on a chunk's state is read, updated by the host and written, a few chunks at once, in the order of use. Its
    weights count when all of it is written."""

    def __init__(self, step: Step, update: Callable[[Chunk, Call], None]) -> None:
        self._resources, self._update = step.resources, update
        self._expected: list[tuple[Chunk, Signal, Call]] = []  # of this step: whose gradients are made, the last first
        self._waiting: deque[tuple[Chunk, Signal, Call]] = deque()
        self._carriers = DISK_DEPTH
        self._is_reading = False

    def expect(self, chunk: Chunk, arrived: Signal, done: Call) -> None:
        self._expected.append((chunk, arrived, done))

    def begin(self) -> None:
        self._waiting.extend(sorted(self._expected, key=lambda each: each[0].index))
        self._expected = []
        self._read_next()

    def _read_next(self) -> None:
        if self._waiting and self._carriers and not self._is_reading:
            self._carriers -= 1
            self._is_reading = True
            chunk, arrived, done = self._waiting.popleft()
            self._resources.move("read", chunk.optimizer_bytes, partial(self._read, chunk, arrived, done))

    def _read(self, chunk: Chunk, arrived: Signal, done: Call) -> None:
        self._is_reading = False
        write = partial(self._resources.move, "write", chunk.optimizer_bytes, partial(self._written, done))
        arrived.then(partial(self._update, chunk, write))
        self._read_next()

    def _written(self, done: Call) -> None:
        self._carriers += 1
        done()
        self._read_next()
