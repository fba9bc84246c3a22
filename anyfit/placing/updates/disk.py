"""Chunks with optimizer state on the disk: it is read into a carrier, stepped, and written back.

The host steps a chunk in its carrier. A streamed one crosses from there to the device and back, and its gradients stay where they
are. Reads, updates and writes have a lane each, so one chunk's state is read while another's is stepped and a third's written.

What is written goes beside what is there, and new weights lie in the carrier: only when all is on the disk do both count. So an
update that fails anywhere has changed nothing, and is started again by whoever needs the chunk (`ChunkUpdate.restart`). One that
speculates puts its weights into the second generation, and what it has written counts when that is taken over.

A step whose writes fail says so once. What of it fails after that goes to host memory, where the plan has room: a disk that takes
no more writes does not keep a run from being saved elsewhere. Over several ranks all of it goes there, and all ranks say so
before a step: one that raised an error in the midst of a step would leave the others waiting.
"""

from __future__ import annotations

import functools
import queue
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from anyfit.kernels.adamw import Begun
from anyfit.kernels.split import Masters
from anyfit.values.engine import DISK_DEPTH

from ..disk import DiskError, Stored, padded
from ..disk_state import DiskChunk
from ..lanes import Label, Over, Task, Ticket, Wanted
from ..optimizer_state import Entries, OptimizerState, Second
from ..tiers import LOW, WEIGHTS, Scratch, Tier
from .route import Context
from .stepper import Inputs, Stepper, adam_state
from .streamed import Streamed


@dataclass(eq=False)
class Trip:
    """A chunk's state on its way from the disk through an update and back: a `Generation`, once it is read."""

    chunk: OptimizerState
    inputs: Inputs
    second: Second | None  # where its weights go to and what it has become counts from, if it speculates
    carrier: Scratch | None = None
    moments: dict[str, Tensor] = field(default_factory=dict)
    made: Entries = field(default_factory=dict)
    weights: Tensor = field(default_factory=lambda: torch.empty(0))  # new ones
    low: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int16))
    wanted: Wanted | None = None  # who asked for it may drop this
    uploaded: Future[Ticket] | None = None  # of weights that go up from the carrier

    @property
    def disk(self) -> DiskChunk:
        assert self.chunk.state.disk is not None
        return self.chunk.state.disk

    @property
    def is_wanted(self) -> bool:
        return self.wanted is None or not self.wanted.is_dropped

    @property
    def low_or_none(self) -> Tensor | None:
        return self.low if self.chunk.state.is_split else None

    def zeros(self, key: str, /) -> Tensor:
        assert self.carrier is not None
        return self.carrier.flat(key, self.chunk.state.own.elements).zero_()

    def parts(self) -> dict[str, Tensor]:
        """All that is to be written."""
        return self.moments | ({LOW: self.low} if self.chunk.state.is_split else {})


class OnDisk:
    def __init__(self, context: Context, host: Tier, streamed: Streamed) -> None:
        self._context, self._streamed, self._scratch = context, streamed, Scratch(torch.device("cpu"))
        chunks = [chunk for chunk in context.chunks if chunk.state.disk is not None]
        crosses = any(_is_streamed(chunk) for chunk in chunks)

        def room(size: int) -> Tensor:
            return host.zeros(padded(size), torch.uint8, crosses=crosses)

        self._free: queue.SimpleQueue[tuple[Scratch, Future[Ticket] | None]] = queue.SimpleQueue()
        carriers = [Scratch(torch.device("cpu"), room) for _ in range(DISK_DEPTH if chunks else 0)]
        for chunk in sorted(chunks, key=lambda each: -each.state.own.elements):  # which leaves no smaller room over
            for carrier in carriers:
                carrier.flat(WEIGHTS, chunk.state.own.elements, chunk.state.dtype)
                for key in (*chunk.moments, *[LOW] * chunk.state.is_split):
                    _part(chunk, carrier, key)
        for carrier in carriers:
            self._free.put((carrier, None))
        self._told: Trip | None = None  # whose failed write was the last to be told

    @property
    def device_bytes(self) -> int:
        return 0

    def furnish(self, chunk: OptimizerState) -> None:
        state, elements = chunk.state, chunk.state.own.elements
        if _is_streamed(chunk):
            self._streamed.furnish(chunk)
        elif self._context.stepper.one_pass(state) is None:
            self._scratch.flat("exact", elements)
            self._scratch.flat("gradient", elements)

    def update(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        state, lanes, trip = chunk.state, self._context.lanes, Trip(chunk, inputs, None)
        label = Label(Task.UPLOAD, state.index)
        if state.on_device is not None and state.on_host is None:
            trip.uploaded = Future()
        written = self._begin(trip, Label(Task.UPDATE, state.index))
        if state.on_device is None:
            return written
        if trip.uploaded is None:
            return lanes.fresh.run(chunk.upload, (written, inputs.before), label)
        fresh = lanes.fresh.run(functools.partial(self._upload, trip), (written, inputs.before), label)
        trip.uploaded.set_result(fresh)
        return fresh

    def speculate(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        inputs = replace(inputs, before=self._context.lanes.so_far())
        trip = Trip(chunk, inputs, chunk.second)
        self._begin(trip, Label(Task.SPECULATE, chunk.state.index))
        assert trip.wanted is not None
        return trip.wanted

    def lift_ahead(self, chunk: OptimizerState) -> None:
        """There is no carrier to leave it in."""

    def _begin(self, trip: Trip, label: Label) -> Ticket:
        """All up to the end of its writes."""
        chunk, inputs, lanes = trip.chunk, trip.inputs, self._context.lanes
        index = chunk.state.index
        lift, lower = functools.partial(self._lift, trip), functools.partial(self._lower, trip)
        lifted = lanes.from_disk.run(lift, (chunk.update.last_over,), Label(Task.READ, index))
        if _is_streamed(chunk):
            stepped = self._streamed.carry(chunk, trip, inputs, label, lifted, lambda: trip.is_wanted)
        else:
            step = functools.partial(self._step, trip)
            stepped = lanes.host.run(step, (inputs.arrived, lifted), label, order=index)
        # After a failed step too: the carrier is given back.
        written = lanes.to_disk.run(functools.partial(lower, stepped), (Over(stepped),), Label(Task.WRITE, index))
        trip.wanted = Wanted(written)
        chunk.update.last, chunk.update.moments = written, None
        return written

    def _lift(self, trip: Trip) -> None:
        if not trip.is_wanted:
            return
        chunk, second, elements = trip.chunk, trip.chunk.second, trip.chunk.state.own.elements
        if second is not None:  # what was speculated and not taken over
            trip.disk.tier.file.free(second.stored.values())
            second.stored = {}
        if trip.second is not None:
            self._context.readers.before_speculation(chunk)
        carrier, uploaded = self._free.get()
        if uploaded is not None:
            Over(uploaded.result()).wait()
        trip.carrier = carrier
        trip.moments = {key: _part(chunk, carrier, key) for key in chunk.moments}
        if chunk.state.is_split:
            trip.low = _part(chunk, carrier, LOW)
        trip.weights = carrier.flat(WEIGHTS, elements, chunk.state.dtype) if trip.second is None else trip.second.weights
        trip.disk.read(trip.parts())

    def _step(self, trip: Trip) -> Begun | None:
        chunk, state, inputs, stepper = trip.chunk, trip.chunk.state, trip.inputs, self._context.stepper
        if not trip.is_wanted:
            return None
        assert state.on_host is not None
        old, new = Masters(state.on_host, trip.low_or_none), Masters(trip.weights, trip.low_or_none)
        if stepper.one_pass(state, inputs.groups) is not None:
            flat = self._context.gradients.flat(state)
            assert flat is not None
            now, out = (adam_state(masters, trip.moments) for masters in (old, new))
            trip.made, begun = stepper.in_one_pass(chunk, inputs, flat, now, out)
            return begun
        self._step_by_torch(trip, stepper, old, new)
        return None

    def _step_by_torch(self, trip: Trip, stepper: Stepper, old: Masters, new: Masters) -> None:
        chunk, inputs = trip.chunk, trip.inputs
        exact, made = stepper.in_scratch(chunk, inputs, inputs.gradients, old, trip.moments, self._scratch)
        after = OptimizerState(chunk.state)
        after.keep(made, trip.moments, trip.zeros)
        trip.made = after.rest
        new.write(exact)

    def _lower(self, trip: Trip, stepped: Ticket) -> None:
        try:
            stepped.wait()
            if trip.is_wanted:
                self._write(trip)
        finally:
            if trip.carrier is not None:
                self._free.put((trip.carrier, trip.uploaded))

    def _write(self, trip: Trip) -> None:
        chunk, second, parts = trip.chunk, trip.second, trip.parts()
        stored = dict(zip(parts, self._written(trip, list(parts.values())), strict=True))
        if second is not None:
            second.stored, second.made = stored, trip.made
            return
        if chunk.state.on_host is not None:
            chunk.state.on_host.copy_(trip.weights)
        trip.disk.take_over(stored)
        chunk.rest |= trip.made
        for key in trip.moments.keys() - chunk.moments.keys():
            chunk.moments[key] = chunk.zeros()
        trip.inputs.gradients.clear()

    def _written(self, trip: Trip, parts: list[Tensor]) -> list[Stored]:
        disk, told = trip.disk, self._told
        try:
            return disk.written(parts)
        except DiskError as error:
            if self._context.ranks.are_several:
                disk.tier.failed = error
            elif told is None or told.inputs.step != trip.inputs.step or not told.is_wanted:  # of what is dropped nobody hears
                self._told = trip
                raise
            try:
                return disk.tier.file.keep(parts)
            except MemoryError as lacking:
                raise DiskError(f"{error}; and host memory has no room for it: {lacking}") from error

    def _upload(self, trip: Trip) -> None:
        on_device = trip.chunk.state.own_on_device
        assert on_device is not None
        on_device.copy_(trip.weights, non_blocking=True)


def _is_streamed(chunk: OptimizerState) -> bool:
    return chunk.state.placement.update == "device"


def _part(chunk: OptimizerState, carrier: Scratch, key: str) -> Tensor:
    """Where in a carrier a part of its state lies."""
    return carrier.flat(key, chunk.state.own.elements, torch.int16 if key == LOW else torch.float32)
