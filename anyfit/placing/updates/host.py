"""Chunks that the host updates: gradients are copied to it, and fresh weights to the device, at once where they live there.

In a two-phase update the host makes weights first, and moments when all weights are fresh (`Pace`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from anyfit.kernels.adamw import Begun, Part, can_be_parted
from anyfit.values.engine import LATER, is_two_phase

from ..lanes import Label, Task, Ticket, Work
from ..optimizer_state import Entries, OptimizerState, Views
from ..tiers import Scratch
from .route import BROKEN_OFF, Context
from .stepper import Groups, Inputs, adam_state


class OnHost:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._scratch = Scratch(torch.device("cpu"))

    @property
    def device_bytes(self) -> int:
        return 0

    def furnish(self, chunk: OptimizerState) -> None:
        if self._context.stepper.one_pass(chunk.state) is None:
            self._scratch.flat("exact", chunk.state.own.elements)
            self._scratch.flat("gradient", chunk.state.own.elements)

    def update(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        state, lanes = chunk.state, self._context.lanes
        part: Part = "masters" if self._is_two_phase(chunk, inputs.groups) else "all"
        job = functools.partial(self._update, chunk, inputs, part)
        updated = self._run(chunk, job, inputs.arrived, Label(Task.UPDATE, state.index))
        chunk.update.moments = None
        if part == "masters":
            job = functools.partial(self._finish, chunk, inputs)
            label = Label(Task.FINISH, state.index)  # the last first: their next gradients come first
            ticket = lanes.host.run(job, (updated,), label, order=LATER - state.index)
            chunk.update.moments = chunk.update.last = ticket
        if state.on_device is None:
            return updated
        return lanes.fresh.run(chunk.upload, (updated, inputs.before), Label(Task.UPLOAD, state.index))

    def _run(self, chunk: OptimizerState, job: Work, arrived: Ticket | None, label: Label) -> Ticket:
        after = (arrived, chunk.update.last_over)
        chunk.update.last = ticket = self._context.lanes.host.run(job, after, label, order=chunk.state.index)
        return ticket

    def _is_two_phase(self, chunk: OptimizerState, groups: Groups) -> bool:
        settings, pace = self._context.stepper.one_pass(chunk.state, groups), self._context.pace
        if settings is None or not can_be_parted(settings):
            return False
        if self._context.gradients.adds_up or (chunk.second is not None and pace.may_speculate):
            return False  # the host is at work all through backward, with gradients that add up or with the next speculation
        return is_two_phase(chunk.state.index, pace.two_phase_share)

    def _update(self, chunk: OptimizerState, inputs: Inputs, part: Part) -> Begun | None:
        if self._context.stepper.one_pass(chunk.state, inputs.groups) is not None:  # one pass, that cannot fail half-way
            known, begun = self._in_one_pass(chunk, inputs, part)
            chunk.rest |= known
            return begun
        before = {key: self._scratch.flat(f"{key} before", flat.numel()).copy_(flat) for key, flat in chunk.moments.items()}
        try:
            exact, made = self._in_scratch(chunk, inputs, chunk.moments)
        except BaseException:
            for key, flat in before.items():
                chunk.moments[key].copy_(flat)
            raise
        chunk.keep(made)
        chunk.state.masters(chunk.state.on_host).write(exact)
        return None

    def _finish(self, chunk: OptimizerState, inputs: Inputs) -> Begun | None:
        """The moments of a chunk whose weights are fresh."""
        try:
            return self._in_one_pass(chunk, inputs, "moments")[1]
        except BaseException:
            self._context.integrity.broken = BROKEN_OFF
            raise

    def speculate(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        job = functools.partial(self._speculate, chunk, inputs)
        return self._run(chunk, job, inputs.arrived, Label(Task.SPECULATE, chunk.state.index))

    def lift_ahead(self, chunk: OptimizerState) -> None:
        """It is there."""

    def _speculate(self, chunk: OptimizerState, inputs: Inputs) -> Begun | None:
        second = chunk.second
        assert second is not None
        self._context.readers.before_speculation(chunk)
        if self._context.stepper.one_pass(chunk.state, inputs.groups) is not None:
            second.made, begun = self._in_one_pass(chunk, inputs, into_second=True)
            return begun
        for key, flat in chunk.moments.items():
            if key not in second.moments:
                second.moments[key] = chunk.zeros()
            second.moments[key].copy_(flat)
        exact, second.made = self._in_scratch(chunk, inputs, second.moments)
        second.masters.write(exact)
        return None

    def _in_one_pass(
        self, chunk: OptimizerState, inputs: Inputs, part: Part = "all", *, into_second: bool = False
    ) -> tuple[Entries, Begun | None]:
        """In place, or into the second generation."""
        second, flat = chunk.second, self._context.gradients.flat(chunk.state)
        assert flat is not None
        now = adam_state(chunk.state.masters(chunk.state.on_host), chunk.moments)
        out = adam_state(second.masters, second.moments) if into_second and second is not None else None
        return self._context.stepper.in_one_pass(chunk, inputs, flat, now, out, part)

    def _in_scratch(self, chunk: OptimizerState, inputs: Inputs, moments: Views) -> tuple[Tensor, Entries]:
        masters, own = chunk.state.masters(chunk.state.on_host), inputs.gradients
        return self._context.stepper.in_scratch(chunk, inputs, own, masters, moments, self._scratch)
