"""Streamed chunks: the optimizer's state lives on the host, is copied to the device to be stepped, and copied back.

Upload, step and download have a stream each, and three carriers hold the state: one chunk's is uploaded while another's is
stepped and a third's downloaded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import torch

from anyfit.kernels.split import Masters
from anyfit.values.engine import STREAMED_DEPTH

from ..chunks import UpdatePhase
from ..lanes import Label, Over, Task, Ticket
from ..optimizer_state import Generation, Load, OptimizerState
from ..tiers import LANDED, LOW, WEIGHTS, Scratch
from .route import Context
from .stepper import Inputs, adam_state, gathered, moved, views


class Streamed:
    def __init__(self, context: Context) -> None:
        self._context, self._lane = context, context.lanes.streamed
        self._scratch = Scratch(context.device)
        self._carriers = [Scratch(context.device) for _ in range(STREAMED_DEPTH)]
        self._next_carrier = itertools.cycle(range(STREAMED_DEPTH))
        self._loads: dict[int, Load] = {}  # by carrier, the last that it took
        self._ahead: dict[int, Load] = {}  # by chunk, what is lifted before the norm is known
        self._first: list[OptimizerState] = []  # of the layout, as many as there are carriers: they are needed first

    @property
    def device_bytes(self) -> int:
        return self._scratch.bytes + sum(carrier.bytes for carrier in self._carriers)

    def furnish(self, chunk: OptimizerState) -> None:
        state, elements = chunk.state, chunk.state.own.elements
        if len(self._first) < STREAMED_DEPTH and state.disk is None:
            self._first.append(chunk)
        flat = self._context.gradients.flat(state)
        if self._context.stepper.one_pass(state) is None:
            self._scratch.flat("exact", elements)
            self._scratch.flat("gradient", elements)
        elif flat is None:
            self._scratch.flat("gathered", elements, state.dtype)
        for carrier in self._carriers:
            carrier.flat(LOW, elements if state.is_split else 0, torch.int16)
            if state.on_device is None or chunk.second is not None or state.disk is not None:
                carrier.flat(WEIGHTS, elements, state.dtype)
            if state.placement.gradients == "host" and self._context.device.type != "cpu":
                carrier.flat(LANDED, elements, state.dtype if flat is None else flat.dtype)
            for key in chunk.moments:
                carrier.flat(key, elements)

    def update(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        load = self._ahead.pop(chunk.state.index, None)
        if load is None or chunk.update.phase is not UpdatePhase.LIFTED:
            load = Load(inputs.gradients, None)
        chunk.update.lifted = None
        return self._start(chunk, load, inputs, Label(Task.UPDATE, chunk.state.index))

    def speculate(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        inputs = replace(inputs, before=self._context.lanes.so_far())
        load, label = Load(inputs.gradients, chunk.second), Label(Task.SPECULATE, chunk.state.index)
        return self._start(chunk, load, inputs, label)

    def carry(
        self, chunk: OptimizerState, trip: Generation, inputs: Inputs, label: Label, after: Ticket, is_wanted: Callable[[], bool]
    ) -> Ticket:
        """The same with a state that lies in buffers of somebody else's, where what becomes of it is put, weights too."""
        load = Load(inputs.gradients, trip, source=trip, is_wanted=is_wanted)
        return self._start(chunk, load, inputs, label, after)

    def _start(self, chunk: OptimizerState, load: Load, inputs: Inputs, label: Label, source: Ticket | None = None) -> Ticket:
        index = chunk.state.index
        load.gradients = inputs.gradients

        def lift() -> None:
            load.is_ahead = False
            if load.carrier is None:
                self._lift(chunk, load)

        def if_wanted(part: Callable[[], None]) -> None:
            if load.is_wanted():
                part()

        parts = (
            (functools.partial(if_wanted, lift), Label(Task.LIFT, index)),
            (functools.partial(if_wanted, lambda: self._step(chunk, load, inputs)), label),
            (functools.partial(if_wanted, lambda: self._lower(chunk, load)), Label(Task.LOWER, index)),
        )
        after = (chunk.update.last_over, load.ticket, inputs.arrived, inputs.before, source)
        chunk.update.last = load.ticket = self._lane.run_parts(parts, after, order=index)
        return load.ticket

    def lift_ahead(self, chunk: OptimizerState) -> None:
        """Of the streamed chunks that are needed first, as many as there are carriers."""
        if chunk not in self._first:
            return
        index = chunk.state.index
        load = self._ahead[index] = Load({}, None)
        after = (chunk.update.last_over, self._context.gradients.of(chunk.state)[1])

        def lift() -> None:
            self._lift(chunk, load)
            load.is_ahead = True

        chunk.update.lifted = load.ticket = self._lane.run(lift, after, Label(Task.LIFT, index), index)

    def _lift(self, chunk: OptimizerState, load: Load) -> None:
        state, elements = chunk.state, chunk.state.own.elements
        which = next(self._next_carrier)
        before, self._loads[which] = self._loads.get(which), load
        if before is not None and before.is_ahead:  # the lane comes to its update later, if it does: it is lifted again then
            before.carrier = None
        elif before is not None and before.ticket is not None:
            Over(before.ticket).wait()
        carrier = load.carrier = self._carriers[which]
        load.weights, load.flat = state.own_on_device, self._context.gradients.flat(state)
        moments, low = (chunk.moments, state.low) if load.source is None else (load.source.moments, load.source.low)
        load.moments = {key: carrier.flat(key, elements) for key in moments}
        copies = [(load.moments[key], flat) for key, flat in moments.items()]
        if load.weights is None:
            load.weights = carrier.flat(WEIGHTS, elements, state.dtype)
            copies.append((load.weights, state.weights))
        if state.is_split:
            copies.append((carrier.flat(LOW, elements, torch.int16), low))
        if load.flat is not None and load.flat.device != self._context.device:
            copies.append((carrier.flat(LANDED, elements, load.flat.dtype), load.flat))
            load.flat = copies[-1][0]
        self._lane.tracks[0].copy(copies, yields=True)  # to weights that the computation waits for

    def _step(self, chunk: OptimizerState, load: Load, inputs: Inputs) -> None:
        state, carrier, own = chunk.state, load.carrier, load.gradients
        assert carrier is not None
        assert load.weights is not None
        self._lane.tracks[1].uses(own.values())
        low = carrier.flat(LOW, state.own.elements, torch.int16) if state.is_split else None
        old = Masters(load.weights, low)
        if load.second is not None:  # the old weights stay
            load.weights = carrier.flat(WEIGHTS, state.own.elements, state.dtype)
        new = Masters(load.weights, low)
        stepper = self._context.stepper
        if stepper.one_pass(state, inputs.groups) is not None:
            flat = gathered(state, own, self._scratch) if load.flat is None else load.flat
            now, out = (adam_state(masters, load.moments) for masters in (old, new))
            load.rest, _ = stepper.in_one_pass(chunk, inputs, flat, now, out)
            return
        own = own if load.flat is None else views(state, own, load.flat)
        exact, made = stepper.in_scratch(chunk, inputs, own, old, load.moments, self._scratch)
        after = OptimizerState(state)
        after.keep(made, load.moments, lambda key: carrier.flat(key, state.own.elements).zero_())
        load.rest = moved(after.rest, torch.device("cpu"))
        # Nothing has changed so far that counts; from here on nothing can fail.
        new.write(exact)

    def _lower(self, chunk: OptimizerState, load: Load) -> None:
        state, second, carrier = chunk.state, load.second, load.carrier
        assert load.weights is not None
        assert carrier is not None
        if second is not None and second is chunk.second:
            self._context.readers.before_speculation(chunk)
        home: OptimizerState | Generation = chunk if second is None else second
        for key in load.moments:
            if key not in home.moments:
                home.moments[key] = home.zeros(key)
        copies = [(home.moments[key], flat) for key, flat in load.moments.items()]
        if state.is_split:
            low = state.low if second is None else second.low
            copies.append((low, carrier.flat(LOW, state.own.elements, torch.int16)))
        weights = state.on_host if second is None else second.weights
        if weights is not None:
            copies.append((weights, load.weights))
        self._lane.tracks[2].copy(copies)
        if second is not None:
            second.made = load.rest
        else:
            chunk.rest |= load.rest
        if load.source is None:  # else whoever lent it may have to begin again
            load.gradients.clear()  # the carrier knows this load until it takes another, which may be in the next step
