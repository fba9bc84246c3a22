"""Resident chunks: the optimizer's state is on the device, and the computation updates it in place, at the end of the step."""

from __future__ import annotations

import torch
from torch import Tensor

from ..lanes import Task
from ..optimizer_state import Entries, OptimizerState, Views
from ..tiers import Scratch
from .route import Context
from .stepper import Groups, Inputs, adam_state, gathered, views, widened


class Resident:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._scratch = Scratch(context.device)

    @property
    def device_bytes(self) -> int:
        return self._scratch.bytes

    def furnish(self, chunk: OptimizerState) -> None:
        state, elements = chunk.state, chunk.state.own.elements
        flat, from_host = self._context.gradients.flat(state), state.placement.gradients == "host"
        if self._context.stepper.one_pass(state) is not None:
            if flat is None:
                self._scratch.flat("gathered", elements, state.dtype)
        else:
            # Chunks that are stepped at once have each their own.
            suffix = "" if self._context.stepper.coupled is None else f" {state.index}"
            if state.is_split:
                self._scratch.flat(f"exact{suffix}", elements)
            if state.is_split or from_host:
                self._scratch.flat(f"gradient{suffix}", elements)
        if from_host and self._context.device.type != "cpu":
            self._scratch.flat("landed", elements, state.dtype if flat is None else flat.dtype)

    def can_begin(self, chunk: OptimizerState, groups: Groups) -> bool:
        """Before the host knows the norm: a kernel on the GPU finds the factor in its own memory."""
        context, placed = self._context, chunk.state.placement
        is_there = placed.route == "resident" and placed.gradients == "device" and context.device.type == "cuda"
        return is_there and context.stepper.one_pass(chunk.state, groups) is not None

    def begin(self, chunk: OptimizerState, inputs: Inputs) -> None:
        """Gives the update to the GPU: one that changes nothing where the factor is no number."""
        chunk.update.begun = self._updated(chunk, inputs)

    def update(self, chunk: OptimizerState, inputs: Inputs) -> None:
        chunk.rest |= self._updated(chunk, inputs)

    def _updated(self, chunk: OptimizerState, inputs: Inputs) -> Entries:
        """What is then known of parameters and not kept yet."""
        context, state, own = self._context, chunk.state, inputs.gradients
        with context.lanes.computing(Task.UPDATE, state.index):
            context.lanes.hold_computation(inputs.arrived)
            with context.integrity.in_place():
                flat = context.gradients.flat(state)
                if flat is not None and flat.device != context.device:
                    flat = self._scratch.flat("landed", state.own.elements, flat.dtype).copy_(flat, non_blocking=True)
                    own = views(state, own, flat)
                if context.stepper.one_pass(state, inputs.groups) is None:
                    self._by_torch(chunk, inputs, own)
                    return {}
                flat = gathered(state, own, self._scratch) if flat is None else flat
                now = adam_state(state.masters(state.own_on_device), chunk.moments)
                return context.stepper.in_one_pass(chunk, inputs, flat, now)[0]

    def _by_torch(self, chunk: OptimizerState, inputs: Inputs, own: Views) -> None:
        state, masters, users = chunk.state, chunk.state.masters(chunk.state.own_on_device), self._context.users
        exact = masters.weights
        if state.is_split:
            exact = self._scratch.flat("exact", state.own.elements)
            masters.read(exact)
        if state.is_split or state.placement.gradients == "host":
            own = widened(state, own, self._scratch)
        users.collect(chunk)
        missing = [name for name in own if name not in chunk.live]
        entries = chunk.live | chunk.entries(chunk.moments, missing)
        made = self._context.stepper.by_torch(chunk, inputs, own, exact, entries, missing)
        if missing:
            users.keep(chunk, made)
        if state.is_split:
            masters.write(exact)

    def update_together(self, factor: float | None) -> None:
        """One call of the optimizer itself for all parameters."""
        context, users = self._context, self._context.users
        gradients: Views = {}
        parameters: Views = {}
        exact: dict[int, Tensor] = {}
        with context.lanes.computing(Task.UPDATE):
            for chunk in context.chunks:
                state = chunk.state
                own, arrived = context.gradients.of(state)
                context.lanes.hold_computation(arrived)
                context.readers.wait_for(state.index)
                users.collect(chunk)
                if state.is_split and own:
                    merged = exact[state.index] = self._scratch.flat(f"exact {state.index}", state.own.elements)
                    state.masters(state.weights).read(merged)
                    parameters |= views(state, own, merged)
                    own = self._widened(chunk, own)
                gradients |= own
            with context.integrity.in_place():
                users.step_together(gradients, parameters, factor)
            for chunk in context.chunks:
                self._keep_new(chunk)
                if chunk.state.index in exact:
                    chunk.state.masters(chunk.state.weights).write(exact[chunk.state.index])
                    context.mirrors.write_back()
            context.mirrors.collect()

    def _widened(self, chunk: OptimizerState, own: Views) -> Views:
        """In fp32, each as dense as it was."""
        dense = {name: each for name, each in own.items() if each.layout == torch.strided}
        found = widened(chunk.state, dense, self._scratch, f"gradient {chunk.state.index}")
        return {name: found[name] if name in dense else each.float() for name, each in own.items()}

    def _keep_new(self, chunk: OptimizerState) -> None:
        """What the optimizer itself has made for parameters of which nothing was known."""
        users, state = self._context.users, self._context.users.optimizer.state
        names = [slot.name for slot in chunk.own_slots if slot.name not in chunk.live]
        made = {name: entry for name in names if (entry := state.get(users.parameters[name]))}
        if made:
            users.keep(chunk, made)
