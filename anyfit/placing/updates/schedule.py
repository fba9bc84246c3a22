"""The schedule of a step's updates: what begins before the norm is known, what waits for it, and in which order.

1. While backward runs, chunks whose gradients are there are speculated on (speculation.py).
2. When the GPU has the norm and the host does not, the GPU is given the resident chunks.
3. When the host has the norm, the other resident chunks are updated at once, so that the GPU has work. The rest go to their
   lanes, in the layout's order, which the next forward follows roughly. Whoever uses a chunk first waits for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..chunk_update import UpdatePhase
from ..chunks import ChunkState
from ..gradients import clip_factor
from ..labels import Label, Task
from ..lanes import Ticket
from ..optimizer_state import OptimizerState
from .resident import Resident
from .route import BROKEN_OFF, Context, SpeculatingRoute
from .speculation import Speculation, keeps_generations
from .stepper import Groups, Inputs


class Schedule:
    def __init__(
        self, context: Context, resident: Resident, others: Mapping[str, SpeculatingRoute], speculation: Speculation
    ) -> None:
        self._context, self._chunks, self._residency = context, context.chunks, context.residency
        self._resident, self._others, self._speculation = resident, others, speculation
        self._before: Ticket | None = None  # what was computed before the GPU was given resident chunks

    def begin(self, norm: Tensor, clip_norm: float | None, scale: Tensor | None) -> None:
        context = self._context
        if context.device.type != "cuda":
            return
        groups = context.stepper.groups()
        begun = [chunk for chunk in self._chunks if self._resident.can_begin(chunk, groups)]
        if not begun or self._context.users.steps_itself(context.stepper.coupled):
            return
        self._before = context.lanes.so_far()
        factor = torch.ones_like(norm) if clip_norm is None else clip_factor(norm, clip_norm)
        factor = factor if scale is None else factor * scale
        factor = torch.where(norm.isfinite(), factor, math.nan)  # with which an update changes nothing
        for chunk in begun:
            own, _ = context.gradients.of(chunk.state)
            context.readers.wait_for(chunk.state.index)
            if own:
                self._resident.begin(chunk, Inputs(own, None, factor, groups))

    def leave_out(self) -> None:
        for chunk in self._chunks:
            chunk.update.begun = None

    def apply(self, factor: float | None) -> None:
        context = self._context
        context.pace.note(clips=factor is not None, is_late=any(chunk.update.moments_pending for chunk in self._chunks))
        if context.ranks.are_several:
            for chunk in self._chunks:
                self._residency.settle(chunk.state)  # one that only other ranks used may still be at its last update
        with context.integrity.stepping():
            if context.users.steps_itself(context.stepper.coupled):
                self._resident.update_together(factor)
            else:
                self._update_apart(factor)
                context.mirrors.spread()

    def _update_apart(self, factor: float | None) -> None:
        groups = self._context.stepper.groups()
        before = self._before or self._context.lanes.so_far()  # the old weights have been read
        for chunk in self._chunks:
            if chunk.state.placement.route == "resident":
                self._update_resident(chunk, factor, groups)
        for chunk in self._chunks:
            if chunk.state.placement.route != "resident":
                self._hand_out(chunk, factor, groups, before)

    def _update_resident(self, chunk: OptimizerState, factor: float | None, groups: Groups) -> None:
        if chunk.update.begun is not None:
            chunk.rest |= chunk.update.begun
            chunk.update.begun = None
            return
        own, arrived = self._context.gradients.of(chunk.state)
        self._context.readers.wait_for(chunk.state.index)
        if own:
            self._resident.update(chunk, Inputs(own, arrived, factor, groups))
        self._share(chunk.state, None)

    def _hand_out(self, chunk: OptimizerState, factor: float | None, groups: Groups, before: Ticket) -> None:
        """To its lane."""
        state, update = chunk.state, chunk.update
        own, arrived = self._context.gradients.of(state)
        is_taken_over = factor is None and update.phase is UpdatePhase.SPECULATED
        if not (is_taken_over and keeps_generations(state)):
            self._context.readers.wait_for(state.index)
        if not own:
            self._share(state, None)
            return
        self._residency.drop(state)  # the weights that are there will be old
        inputs = Inputs(own, arrived, factor, groups, before)
        update.restart = functools.partial(self._others[state.placement.route].update, chunk, inputs)
        update.fresh = self._speculation.commit(chunk, inputs) if is_taken_over else update.restart()
        self._residency.part(state)
        self._share(state, before)

    def _share(self, state: ChunkState, before: Ticket | None) -> None:
        """Fresh weights of a chunk that ranks shard come to the others: now, where each has all of them; else when they are
        gathered again. Every rank takes part, also one whose stretch has not changed."""
        if state.shards == 1:
            return
        self._residency.drop(state)
        if not state.is_spread:
            return
        label, ranks, lanes = Label(Task.SPREAD, state.index), state.ranks, self._context.lanes
        ranks.ask("spread", label)

        def all_gather() -> None:
            whole, own = state.on_device, state.own_on_device
            assert whole is not None
            assert own is not None
            ranks.gather("spread", state.shards, whole, own, label)

        state.update.fresh = lanes.spread.run(all_gather, (lanes.so_far(), before, state.update.fresh), label)
        self._residency.part(state)

    def turn_of(self, chunk: OptimizerState | None, index: int) -> tuple[int, int]:
        if chunk is not None and chunk.update.moments_pending:
            return 1, -index
        if chunk is not None and self._speculation.comes_later(chunk):
            return 2, -index
        return int(chunk is None or chunk.state.placement.route != "resident"), index

    def forget(self) -> None:
        integrity = self._context.integrity
        if any(chunk.update.phase is UpdatePhase.BEGUN for chunk in self._chunks):
            integrity.broken = integrity.broken or BROKEN_OFF
        self._before = None
        for chunk in self._chunks:
            chunk.update.forget_step()
