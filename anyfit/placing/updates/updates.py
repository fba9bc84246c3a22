"""The order of a step's updates: what begins before the norm is known, what waits for it, and which chunk comes first.

1. While backward runs, chunks whose gradients are there are speculated on: updated into a second generation of their state,
   which is taken over when nothing was clipped. Where steps clip often, updates wait for the norm, and only the states of the
   first streamed chunks are uploaded before.
2. When the GPU has the norm and the host does not, the GPU is given the resident chunks.
3. When the host has the norm, the other resident chunks are updated at once, so that the GPU has work. The rest go to their
   lanes, in the layout's order, which the next forward follows roughly. Whoever uses a chunk first waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..chunks import Carried, ChunkState, ModelState, UpdatePhase
from ..gradients import Gradients, clip_factor
from ..lanes import Label, Lanes, Task, Ticket
from ..mirrors import Mirrors
from ..optimizer_state import Entries, OptimizerState, Second
from ..optimizers import UsersOptimizer, steps_together
from ..residency import Residency
from ..tiers import Tier
from .host import OnHost
from .resident import Resident
from .route import BROKEN_OFF, Context, Pace, Route, SpeculatingRoute
from .states import OptimizerStates
from .stepper import Groups, Inputs, Stepper
from .streamed import Streamed


class Speculation:
    """Updates before the norm is known, into a second generation of a chunk's state."""

    def __init__(self, context: Context, routes: Mapping[str, SpeculatingRoute], host: Tier) -> None:
        self._context, self._routes, chunks = context, routes, context.chunks
        self._by_index = {chunk.state.index: chunk for chunk in chunks}
        for chunk in chunks:
            if chunk.state.placement.speculates and not context.gradients.adds_up:  # sums are not known before the last part
                chunk.second = Second(chunk.state, host)
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
        ticket = chunk.update.speculated
        if ticket is not None:
            chunk.update.drop_speculated()
            with contextlib.suppress(BaseException):  # of an update that does not count
                ticket.wait()

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


class Updates:
    """`take_back` has tensors that user code has put in the place of weights taken over."""

    def __init__(
        self,
        optimizer: Optimizer,
        state: ModelState,
        gradients: Gradients,
        residency: Residency,
        lanes: Lanes,
        host: Tier,
        mirrors: Mirrors,
        take_back: Callable[[], None],
        pace: Pace,
        carried: Carried | None = None,
        coupled: str | None = None,
    ) -> None:
        self.optimizer, self._residency, self._take_back = optimizer, residency, take_back
        self.chunks = [OptimizerState(chunk) for chunk in state.chunks if chunk.chunk.is_updated]
        self._by_index = {chunk.state.index: chunk for chunk in self.chunks}
        stepper = Stepper(optimizer, state.device, coupled)
        together = all(steps_together(chunk.state.placement) for chunk in self.chunks)
        by_torch = all(stepper.one_pass(chunk.state) is None for chunk in self.chunks)
        self.users = UsersOptimizer(optimizer, self.chunks, state.parameters, is_open=together and by_torch)
        context = self._context = Context(
            state.device, state.ranks, lanes, gradients, residency, mirrors, self.chunks, self.users, stepper, pace
        )
        self.pace, self._check = context.pace, context.integrity.check
        states = self._states = OptimizerStates(context)
        self.names, self.home = states.names, states.home
        self.load_scalars, self.forget_all = states.load_scalars, states.forget_all
        states.make(carried)
        self._resident = Resident(context)
        self._others: dict[str, SpeculatingRoute] = {"streamed": Streamed(context), "host": OnHost(context)}
        self._routes: dict[str, Route] = {"resident": self._resident, **self._others}
        self._speculation = Speculation(context, self._others, host)
        self._before: Ticket | None = None  # what was computed before the GPU was given resident chunks
        self.users.show()
        for chunk in self.chunks:
            self._routes[chunk.state.placement.route].furnish(chunk)

    def ready(self) -> None:
        """Before a step: takes over what user code has done to the optimizer since the last, or raises where it cannot."""
        self.users.refuse_changed()
        given = self.users.replaced()
        if given is not None:
            self._residency.settle_all()
            self._states.replace(given)
        self.users.show_hidden()

    def begin(self, norm: Tensor, clip_norm: float | None, scale: Tensor | None) -> None:
        """Gives the GPU the updates of resident chunks before the host knows the norm: it has work while the host waits. `apply`
        or `leave_out` has to follow. Times `scale` the gradients have this norm."""
        self._check()
        context = self._context
        if context.device.type != "cuda":
            return
        groups = context.stepper.groups()
        begun = [chunk for chunk in self.chunks if self._resident.can_begin(chunk, groups)]
        if not begun or self.users.steps_itself(context.stepper.coupled):
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
        """Nothing is to change in this step."""
        for chunk in self.chunks:
            chunk.update.begun = None
            chunk.update.drop_speculated()

    def apply(self, factor: float | None) -> None:
        """One optimizer step with the gradients at hand (times `factor`) on every parameter that has one."""
        self._check()
        self._take_back()
        self._residency.heed_all()
        self._residency.refuse_kept()
        context = self._context
        context.mirrors.collect()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers, which would warn
        context.pace.note(clips=factor is not None, is_late=any(chunk.update.moments_pending for chunk in self.chunks))
        if context.ranks.are_several:
            for chunk in self.chunks:
                self._residency.settle(chunk.state)  # one that only other ranks used may still be at its last update
        with context.integrity.stepping():
            if self.users.steps_itself(context.stepper.coupled):
                self._resident.update_together(factor)
            else:
                self._update_apart(factor)
                context.mirrors.write_back()

    def _update_apart(self, factor: float | None) -> None:
        if factor is not None:  # all of them first: a lane is then at once through with those that it has not begun
            for chunk in self.chunks:
                chunk.update.drop_speculated()
        groups = self._context.stepper.groups()
        before = self._before or self._context.lanes.so_far()  # the old weights have been read
        for chunk in self.chunks:
            if chunk.state.placement.route == "resident":
                self._update_resident(chunk, factor, groups)
        for chunk in self.chunks:
            if chunk.state.placement.route != "resident":
                self._update_on_lane(chunk, factor, groups, before)

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

    def _update_on_lane(self, chunk: OptimizerState, factor: float | None, groups: Groups, before: Ticket) -> None:
        state, update = chunk.state, chunk.update
        own, arrived = self._context.gradients.of(state)
        is_taken_over = update.phase is UpdatePhase.SPECULATED
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
        """Ranks all-gather the fresh weights of a sharded chunk: now, where each holds all of them; else when they are next used.
        Every rank takes part, also one whose stretch has not changed."""
        if state.shards == 1:
            return
        self._residency.drop(state)
        if not state.is_replicated:
            return
        label, ranks, lanes = Label(Task.ALL_GATHER, state.index), state.ranks, self._context.lanes
        ranks.ask("all_gather", label)

        def all_gather() -> None:
            whole, own = state.on_device, state.own_on_device
            assert whole is not None
            assert own is not None
            ranks.gather("all_gather", state.sharding, whole, own, label)

        state.update.fresh = lanes.all_gather.run(all_gather, (lanes.so_far(), before, state.update.fresh), label)
        self._residency.part(state)

    def forget(self) -> None:
        """The step is over, however it ended: what was speculated in it is not to be used by another."""
        integrity = self._context.integrity
        if any(chunk.update.phase is UpdatePhase.BEGUN for chunk in self.chunks):
            integrity.broken = integrity.broken or BROKEN_OFF
        self._before = None
        for chunk in self.chunks:
            chunk.update.forget_step()

    def turn_of(self, index: int) -> tuple[int, int]:
        """The order in which chunks change: resident first; those with two generations or pending moments later, backwards."""
        chunk = self._by_index.get(index)
        if chunk is not None and chunk.update.moments_pending:
            return 1, -index
        if chunk is not None and self._speculation.comes_later(chunk):
            return 2, -index
        return int(chunk is None or chunk.state.placement.route != "resident"), index

    def let_read(self, wait_for: Callable[[int], None]) -> None:
        """Somebody reads the state as it is now. From here on `wait_for` is asked before any of a chunk's is overwritten."""
        self._context.readers.wait_for = wait_for
        for chunk in self.chunks:
            if chunk.second is not None:
                chunk.second.may_be_read = False

    def state_dict(self) -> Entries:
        """The optimizer's state of every parameter that has any, as far as it is this rank's."""
        self.settle()
        return self._states.read()

    def settle(self) -> None:
        """All that is known of parameters is in chunks."""
        self._check()
        self._context.mirrors.collect()
        self._states.settle()

    @property
    def device_bytes(self) -> int:
        """Held between steps: the optimizer's state and the scratch buffers."""
        return self._states.device_bytes + sum(route.device_bytes for route in self._routes.values())
