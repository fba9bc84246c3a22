"""Updates before the norm is known, into a second generation of a chunk's state.

It is taken over when nothing was clipped; when something was, the update is done anew. Where that happens often, updates wait for
the norm, and only the states of the first streamed chunks are lifted before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from ..chunks import ChunkState
from ..lanes import Label, Task, Ticket
from ..optimizer_state import OptimizerState, Second
from ..tiers import HostSlabs
from .route import Context, SpeculatingRoute
from .stepper import Inputs


class Speculation:
    def __init__(self, context: Context, routes: Mapping[str, SpeculatingRoute], slabs: HostSlabs) -> None:
        self._context, self._routes, chunks = context, routes, context.chunks
        self._by_index = {chunk.state.index: chunk for chunk in chunks}
        for chunk in chunks:
            if chunk.state.placement.speculates and not context.gradients.adds_up:  # sums are not known before the last part
                chunk.second = Second(chunk.state, slabs)
                chunk.second.moments = {key: chunk.zeros() for key in chunk.moments}
        if any(chunk.second is not None for chunk in chunks):
            context.gradients.on_complete, context.gradients.on_late = self._speculate, self._revoke
            context.residency.on_edit = self._revoke

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
        chunk.update.speculated = route.speculate(chunk, Inputs(own, arrived, None, self._context.stepper.groups()))

    def _revoke(self, state: ChunkState) -> None:
        """The chunk's gradients, or its weights, have changed after all."""
        chunk = self._by_index.get(state.index)
        if chunk is None:
            return
        chunk.update.lifted = None  # its gradients may have been lifted with it
        if chunk.update.speculated is not None:
            with contextlib.suppress(BaseException):  # of an update that does not count
                chunk.update.speculated.wait()
            chunk.update.speculated = None

    def commit(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        """Takes over what was speculated, and sends its weights to where they live."""
        state, second, gradients = chunk.state, chunk.second, inputs.gradients
        assert second is not None

        def take_over() -> None:
            if state.on_host is not None:
                state.on_host, second.weights = second.weights, state.on_host
            state.low, second.low = second.low, state.low
            chunk.moments, second.moments = second.moments, chunk.moments
            chunk.keep(second.made)
            second.may_be_read = True
            gradients.clear()
            if state.on_device is not None:
                chunk.upload()

        return self._context.lanes.fresh.run(take_over, (chunk.update.speculated, inputs.before), Label(Task.COMMIT, state.index))

    def comes_later(self, chunk: OptimizerState) -> bool:
        """The chunk's state of now is not overwritten before the next step speculates."""
        return chunk.second is not None and keeps_generations(chunk.state) and self._context.pace.may_speculate


def keeps_generations(state: ChunkState) -> bool:
    """A step that is taken over leaves the state before it whole, until the next speculates: weights are on the host too."""
    return state.on_host is not None
