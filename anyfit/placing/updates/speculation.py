"""Updates that begin before the norm is known, into a second generation of a chunk's state.

In a step's last backward, a chunk whose gradients are final is updated as if nothing were clipped. When the norm is known, the
new generation is taken over. If the step clips, the update is redone from the old one; if it is left out, the new one is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..chunks import ChunkState
from ..lanes import Label, Task, Ticket
from ..optimizer_state import OptimizerState, Second
from ..tiers import Tier
from .route import Context, LaneRoute
from .stepper import Inputs


class Speculation:
    """Updates before the norm is known, into a second generation of a chunk's state."""

    def __init__(self, context: Context, routes: Mapping[str, LaneRoute], host: Tier) -> None:
        self._context, self._routes, chunks = context, routes, context.chunks
        self._by_index = {chunk.state.index: chunk for chunk in chunks}
        self.factor: Callable[[], float | None] = lambda: None  # as an update is given it, of the step under way if nothing clips
        for chunk in chunks:
            if chunk.state.placement.speculates:
                chunk.second = Second(chunk.state, host)
                chunk.second.moments = {key: chunk.zeros() for key in chunk.moments}
        self._is_asked_for = any(chunk.second is not None for chunk in chunks)
        if self._is_asked_for:
            context.gradients.on_complete, context.gradients.on_late = self._speculate, self._revoke
            context.residency.on_edit = self._revoke

    def begin(self, weight: Tensor | None) -> None:
        """Before the last backward of a step: the weight of this rank's micro-batches, where their sums are to be divided by that
        of all. It may have yet to be computed: a lane that updates waits for it, and for the other ranks'."""
        if not self._is_asked_for:
            return
        for chunk in self._by_index.values():
            chunk.update.drop_speculated()  # in a backward that the step was not told of
        lanes = self._context.lanes
        if self._context.ranks.are_several:
            self.factor = self._agreed(weight)
        elif weight is not None:
            known = lanes.reading(1.0 / weight.detach())
            self.factor = lambda: _or_none(float(known()))

    def _agreed(self, weight: Tensor | None) -> Callable[[], float | None]:
        """Ranks exchange weights ahead of the gradients of the last backward, which come the same way."""
        ranks, lanes, label = self._context.ranks, self._context.lanes, Label(Task.WEIGHTS)
        there = lanes.send(torch.tensor([weight is not None, 0.0], dtype=torch.float64))
        if weight is not None:
            there[1] = weight.detach()
        found: list[Callable[[], Tensor]] = []
        ranks.ask("reduce", label)

        def exchange() -> None:
            lanes.reduce.uses((there,))
            found.append(lanes.reading(ranks.of_all(there, "reduce", label.task)))

        ticket = lanes.reduce.run(exchange, (lanes.so_far(),), label)

        def factor() -> float | None:
            ticket.reach()
            is_weighted, weights = found[0]().unbind(1)
            return _or_none(ranks.scale_of(weights)) if bool(is_weighted.any()) else None

        return factor

    def forget_step(self) -> None:
        self.factor = lambda: None

    def _speculate(self, state: ChunkState) -> None:
        """All gradients of the chunk are there, or on their way: steps it, out of place, as if nothing were clipped."""
        chunk = self._by_index.get(state.index)
        if chunk is None or chunk.second is None or len(chunk.rest) != len(state.own.slots):
            return  # a first step makes state, which is taken over in place
        route = self._routes[state.placement.route]
        if not self._context.pace.may_speculate:
            route.lift_ahead(chunk)
            return
        self._context.residency.heed(state.index)
        own, arrived = self._context.gradients.of(state)
        stepper = self._context.stepper
        inputs = Inputs(own, arrived, self.factor, stepper.groups(), step=stepper.step)
        chunk.update.speculated = route.speculate(chunk, inputs)

    def _revoke(self, state: ChunkState) -> None:
        """The chunk's gradients, or its weights, have changed after all."""
        chunk = self._by_index.get(state.index)
        if chunk is None:
            return
        chunk.update.lifted = None  # its gradients may have been lifted with it
        ticket = chunk.update.speculated
        if ticket is not None:
            chunk.update.drop_speculated()
            with contextlib.suppress(BaseException):  # of an update that does not count
                ticket.wait()

    def commit(self, chunks: Sequence[tuple[OptimizerState, Inputs]]) -> Ticket:
        """Takes over what was speculated, and sends the weights of all these to where they live."""

        def take_over() -> None:
            copies = [copy for chunk, inputs in chunks for copy in _taken_over(chunk, inputs)]
            self._context.lanes.fresh.tracks[0].copy(copies)

        tickets = [chunk.update.speculated for chunk, _ in chunks]
        first, inputs = chunks[0]
        return self._context.lanes.fresh.run(take_over, (*tickets, inputs.before), Label(Task.COMMIT, first.state.index))

    def comes_later(self, chunk: OptimizerState) -> bool:
        """The chunk's state of now is not overwritten before the next step speculates."""
        return chunk.second is not None and keeps_generations(chunk.state) and self._context.pace.may_speculate


def _or_none(factor: float) -> float | None:
    """As an update is given it."""
    return None if factor == 1.0 else factor


def _taken_over(chunk: OptimizerState, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
    """The second generation becomes the first; copies of its weights to the device, where they live there."""
    state, second = chunk.state, chunk.second
    assert second is not None
    if state.on_host is not None:
        state.on_host, second.weights = second.weights, state.on_host
    if state.disk is not None:
        state.disk.take_over(second.stored)
        second.stored = {}
    else:
        state.low, second.low = second.low, state.low
        chunk.moments, second.moments = second.moments, chunk.moments
    chunk.keep(second.made)
    second.may_be_read = True
    inputs.gradients.clear()
    if state.on_device is not None:
        yield chunk.fresh_weights()


def keeps_generations(state: ChunkState) -> bool:
    """A step that is taken over leaves the state before it whole, until the next speculates: weights are on the host too."""
    return state.on_host is not None
