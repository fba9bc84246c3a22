"""The order of a step's updates: what begins before the norm is known, what waits for it, and which chunk comes first.

1. While the last backward runs, chunks whose gradients are final are speculated on: updated into a second generation of their
   state, which is taken over when nothing was clipped. Where steps clip often, updates wait for the norm, and only the states of
   the first streamed chunks are uploaded before.
2. When the GPU has the norm and the host does not, the GPU is given the resident chunks.
3. When the host has the norm, the other resident chunks are updated at once, so that the GPU has work. The rest go to their
   lanes, in the layout's order, which the next forward follows roughly. Whoever uses a chunk first waits for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..chunks import Carried, ChunkState, ModelState, UpdatePhase
from ..gradients import Gradients, clip_factor
from ..lanes import Label, Lanes, Task, Ticket
from ..mirrors import Mirrors
from ..optimizer_state import Entries, OptimizerState
from ..optimizers import UsersOptimizer, steps_together
from ..residency import Residency
from ..tiers import Tier
from .disk import OnDisk
from .host import OnHost
from .resident import Resident
from .route import BROKEN_OFF, Context, LaneRoute, Pace, Route
from .speculation import Speculation, keeps_generations
from .states import OptimizerStates
from .stepper import Groups, Inputs, Stepper
from .streamed import Streamed

COMMITTED_BYTES = 2**26  # of weights whose updates are taken over together


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
        self.load_scalars, self.forget_all, self.put_away = states.load_scalars, states.forget_all, states.put_away
        states.make(carried)
        self._resident = Resident(context)
        streamed = Streamed(context)
        self._others: dict[str, LaneRoute] = {
            "streamed": streamed,
            "host": OnHost(context),
            "disk": OnDisk(context, host, streamed),
        }
        self._routes: dict[str, Route] = {"resident": self._resident, **self._others}
        self._speculation = Speculation(context, self._others, host)
        self._before: Ticket | None = None  # what was computed before the GPU was given resident chunks
        self._is_expecting = False  # the step's norm: what comes before it is done
        self.users.show()
        for chunk in self.chunks:
            self._routes[chunk.state.placement.route].furnish(chunk)

    def ready(self) -> None:
        """Before a step: takes over what user code has done to the optimizer since the last, or raises where it cannot."""
        self.users.refuse_changed()
        self._context.stepper.step += 1
        given = self.users.replaced()
        if given is not None:
            self._residency.settle_all()
            self._states.replace(given)
        self.users.show_hidden()

    def begin_last_backward(self, weight: Tensor | None) -> None:
        """Of a step: with the weight that this rank's sums have, if gradients are to be divided by that of all."""
        self._speculation.begin(weight)

    def begin(self, norm: Tensor, clip_norm: float | None, scale: Tensor | None) -> None:
        """Before the host knows the norm: gives the GPU the updates of resident chunks, so that it has work while the host waits,
        and does what does not depend on it. `apply` or `leave_out` has to follow. Times `scale` the gradients have this norm."""
        self._check()
        if self._context.device.type == "cuda":
            self._begin_resident(norm, clip_norm, scale)
        self._expect()

    def _begin_resident(self, norm: Tensor, clip_norm: float | None, scale: Tensor | None) -> None:
        context = self._context
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

    def _expect(self) -> None:
        """What an update begins with, whatever the norm is. Until their chunks are updated, or used, parameters that are updated
        elsewhere stand for no number."""
        self._take_back()
        self._residency.heed_all()
        self._residency.refuse_kept()
        self._context.mirrors.collect()
        if not self.users.steps_itself(self._context.stepper.coupled):
            for chunk in self.chunks:
                if chunk.state.placement.route != "resident":
                    self._residency.part(chunk.state)
        self._is_expecting = True

    def leave_out(self) -> None:
        """Nothing is to change in this step."""
        for chunk in self.chunks:
            chunk.update.begun = None
            chunk.update.drop_speculated()

    def apply(self, factor: float | None) -> None:
        """One optimizer step with the gradients at hand (times `factor`) on every parameter that has one."""
        self._check()
        if not self._is_expecting:
            self._expect()
        context = self._context
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers, which would warn
        is_as_speculated = factor == self._speculation.factor()
        context.pace.note(clips=not is_as_speculated, is_late=any(chunk.update.moments_pending for chunk in self.chunks))
        if context.ranks.are_several:
            for chunk in self.chunks:
                self._residency.settle(chunk.state)  # one that only other ranks used may still be at its last update
        if not is_as_speculated:  # all of them first: a lane is then at once through with those that it has not begun
            for chunk in self.chunks:
                chunk.update.drop_speculated()
        with context.integrity.stepping():
            if self.users.steps_itself(context.stepper.coupled):
                self._resident.update_together(factor)
            else:
                self._update_apart(factor)
                context.mirrors.write_back()

    def _update_apart(self, factor: float | None) -> None:
        groups = self._context.stepper.groups()
        before = self._before or self._context.lanes.so_far()  # the old weights have been read
        for chunk in self.chunks:
            if chunk.state.placement.route == "resident":
                self._update_resident(chunk, factor, groups)
        lanes = self._context.lanes
        with lanes.host.holding(), lanes.streamed.holding(), lanes.fresh.holding():
            self._update_on_lanes(factor, groups, before)

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

    def _update_on_lanes(self, factor: float | None, groups: Groups, before: Ticket) -> None:
        """In the layout's order. Neighbours whose speculation is done are taken over together: a job for each takes the host
        longer than their copies take the link. Ranks, whose neighbours may be others, take over one by one."""
        done: list[tuple[OptimizerState, Inputs]] = []
        most = 0 if self._context.ranks.are_several else COMMITTED_BYTES

        def commit(chunks: list[tuple[OptimizerState, Inputs]]) -> None:
            if chunks:
                self._fresh([chunk for chunk, _ in chunks], self._speculation.commit(chunks), before)

        for chunk in self.chunks:
            if chunk.state.placement.route == "resident":
                continue
            inputs, speculated = self._begun_on_lane(chunk, factor, groups, before), chunk.update.speculated
            if inputs is not None and speculated is not None and speculated.is_issued and speculated.is_over:
                done.append((chunk, inputs))
                if sum(each.state.chunk.bytes for each, _ in done) < most:
                    continue
                inputs = None
            commit(done)
            done = []
            if inputs is None:
                continue
            if speculated is not None:
                commit([(chunk, inputs)])
            else:
                assert chunk.update.restart is not None
                self._fresh([chunk], chunk.update.restart(), before)
        commit(done)

    def _begun_on_lane(self, chunk: OptimizerState, factor: float | None, groups: Groups, before: Ticket) -> Inputs | None:
        """None where it has no gradient."""
        state, update = chunk.state, chunk.update
        own, arrived = self._context.gradients.of(state)
        if not (update.phase is UpdatePhase.SPECULATED and keeps_generations(state)):
            self._context.readers.wait_for(state.index)
        if not own:
            self._share(state, None)
            return None
        self._residency.drop(state)  # the weights that are there will be old
        inputs = Inputs(own, arrived, factor, groups, before, self._context.stepper.step)
        update.restart = functools.partial(self._others[state.placement.route].update, chunk, inputs)
        return inputs

    def _fresh(self, chunks: Sequence[OptimizerState], ticket: Ticket, before: Ticket) -> None:
        """Their weights will be, with this ticket."""
        for chunk in chunks:
            chunk.update.fresh = ticket
        for chunk in chunks:
            self._residency.part(chunk.state)
            self._share(chunk.state, before)

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
        self._before, self._is_expecting = None, False
        self._speculation.forget_step()
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
