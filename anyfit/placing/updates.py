"""The update: the user's own torch optimizer, run chunk by chunk on exact fp32 masters, on the device or on the host.

Any optimizer that treats each parameter by itself works; others are stepped whole, where all is on the device (optimizers.py).
For each chunk its masters are put together in a scratch buffer, a copy of the optimizer that sees these parameters alone steps
them there, and they are taken apart again: no fp32 copy of the model ever exists. Moments of a parameter's own shape lie in flat
buffers that share the chunk's offsets.

torch's Adam and AdamW are stepped by one-pass kernels instead (kernels/), which need no such scratch: on the host, and on a GPU.

Chunks whose optimizer state is on the device are updated at once. The others are updated on a lane, in the layout's order,
while the computation goes on; whoever uses one first waits for it. Until its last line such a job changes
nothing that counts, so one that fails can be started again.

A plan may have chunks updated before the norm is known, into a second generation of their state: it is taken over when nothing
was clipped, and the update done anew when something was. Where that happens often, updates wait for the norm; only the states
of the first streamed chunks are lifted before.

When all updates wait for the norm, the next forward waits for those of the host, whose memory is too slow for them, and which has
nothing to do in backward. So the host updates weights first, and moments once all weights are fresh: of as many chunks as it is
through with before their next gradients come, which shows in whether it was in the steps before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anyfit.kernels.adamw import Begun, Part, Settings, State, adamw, can_be_parted
from anyfit.kernels.adamw_gpu import adamw_on_gpu, can_run_on_gpu
from anyfit.kernels.split import merge, split
from anyfit.values.machine import update_threads

from .chunks import Carried, ChunkState, ModelState
from .gradients import Gradients, clip_factor
from .lanes import STREAMED_DEPTH, Lanes, Over, Ticket, Work
from .mirrors import Mirrors
from .optimizer_state import Flat, Load, OptimizerState, Second
from .optimizers import UsersOptimizer, steps_together
from .reduction import Reduction
from .residency import Residency
from .tiers import HostSlabs

ADAM_KEYS = ("exp_avg", "exp_avg_sq")
CLIPPED_SHARE = 0.5  # of late steps: with more, no update begins before the norm is known
LATE_STEPS = 8  # about so many count in that share
LATER = 2**30  # urgency of what can wait for all weights
LESS, MORE = 1 / 8, 1 / 32  # share of chunks, more or fewer of which are then updated in two parts
BROKEN_OFF = "the update was broken off half-way"
Groups = list[dict[str, Any]]


class Bench:
    """Scratch in one place, for the chunks that are updated there one after another. Buffers grow to the largest that is asked
    for, and stay."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}

    def flat(self, name: str, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = elements * dtype.itemsize
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self._buffers[name][:size].view(dtype)

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in list(self._buffers.values()))  # a lane may add one meanwhile


class Updates:
    def __init__(
        self,
        optimizer: Optimizer,
        state: ModelState,
        gradients: Gradients | Reduction,
        residency: Residency,
        lanes: Lanes,
        slabs: HostSlabs,
        mirrors: Mirrors,
        carried: Carried | None = None,
        coupled: str | None = None,
    ) -> None:
        self.optimizer = optimizer
        self._mirrors = mirrors
        self._coupled = coupled  # why all parameters are stepped at once, if they are
        self._gradients, self._residency, self._lanes = gradients, residency, lanes
        self.chunks = [OptimizerState(chunk) for chunk in state.chunks if chunk.chunk.is_updated]
        self._by_index = {each.state.index: each for each in self.chunks}
        self._benches = {"resident": Bench(state.device), "streamed": Bench(state.device), "host": Bench(torch.device("cpu"))}
        self._carriers = [Bench(state.device) for _ in range(STREAMED_DEPTH)]
        self._next_carrier = itertools.cycle(range(STREAMED_DEPTH))
        self._loads: dict[int, Load] = {}  # by carrier, the last that it took
        self._device, self._ranks = state.device, state.ranks
        self.names = {slot.name: each for each in self.chunks for slot in each.state.chunk.slots}
        self._working: dict[tuple[str, int], list[nn.Parameter]] = {}
        self._broken: str | None = None
        self._begun: dict[int, dict[str, dict[str, Any]]] = {}  # resident chunks that the GPU updates, if the norm is a number
        self._before: Ticket | None = None  # what was computed before these
        self._threads = update_threads(torch.get_num_threads())
        self._clipped = 0.0  # share of late steps
        self._parted = 1.0  # share of chunks on the host, where they wait for the norm
        self.take_back: Callable[[], None] = lambda: None  # tensors that user code has put in the place of weights
        self.before_change: Callable[[int], None] = lambda _chunk: None  # waits where somebody still reads a chunk's state
        together = all(steps_together(each.state.placement) for each in self.chunks)
        by_torch = all(self._settings_of(each.state, optimizer.param_groups) is None for each in self.chunks)
        self.users = UsersOptimizer(optimizer, self.chunks, state.parameters, is_open=together and by_torch)
        for each in self.chunks:
            self._make_adam(each)
            self._adopt(each, state.parameters)
            if carried is not None:
                self._take_over(each, carried)
        for each in self.chunks:
            if each.state.placement.speculates and not gradients.adds_up:  # sums are not known before the last micro-batch
                each.second = Second(each.state, slabs)
                each.second.moments = {key: self._zeros(each, key) for key in each.moments}
        if any(each.second is not None for each in self.chunks):
            gradients.on_complete, gradients.on_late = self._speculate, self._revoke
            residency.on_edit = self._revoke
        self._first_streamed = [each for each in self.chunks if each.state.placement.route == "streamed"][:STREAMED_DEPTH]
        self.users.show()
        for each in self.chunks:
            self._furnish(each)

    def _furnish(self, each: OptimizerState) -> None:
        """Takes the scratch that the chunk's update will want, so that a step takes nothing."""
        state, elements = each.state, each.state.own.elements
        route = state.placement.route
        bench = self._benches[route]
        in_one_pass = self._settings_of(state, self.optimizer.param_groups) is not None
        from_host = state.placement.gradients == "host"
        flat = self._gradients.flat(state)
        came_in = state.dtype if flat is None else flat.dtype
        if in_one_pass and route != "host" and flat is None:
            bench.flat("gathered", elements, state.dtype)
        if not in_one_pass and (state.is_split or route != "resident"):
            bench.flat(self._scratch("exact", state), elements)
        if not in_one_pass and (state.is_split or route != "resident" or from_host):
            bench.flat(self._scratch("gradient", state), elements)
        if route == "resident" and from_host and self._device.type != "cpu":
            bench.flat("landed", elements, came_in)
        for carrier in self._carriers if route == "streamed" else ():
            carrier.flat("low", elements if state.is_split else 0, torch.int16)
            if state.on_device is None or each.second is not None:
                carrier.flat("weights", elements, state.dtype)
            if from_host and self._device.type != "cpu":
                carrier.flat("landed", elements, came_in)
            for key in each.moments:
                carrier.flat(key, elements)

    def _settings_of(self, state: ChunkState, groups: Sequence[Mapping[str, Any]]) -> Settings | None:
        """Where a one-pass kernel steps the chunk: its group's settings."""
        route = state.placement.route
        if self._coupled is not None or state.dtype.is_complex:
            return None
        if route == "resident" and self._device.type == "cpu":  # forecasts of the CPU device rest on torch's own
            return None
        if route != "host" and self._device.type == "cuda" and not can_run_on_gpu(self._device):
            return None
        return _adam(self.optimizer, groups[state.chunk.group])

    def _scratch(self, name: str, state: ChunkState) -> str:
        """Chunks that are stepped at once have each their own."""
        return name if self._coupled is None else f"{name} {state.index}"

    def _zeros(self, each: OptimizerState, _key: str) -> Tensor:
        return each.state.optimizer_zeros(torch.float32)

    def _make_adam(self, each: OptimizerState) -> None:
        """Moments as torch's Adam makes them in its first step, taken at the start instead."""
        if type(self.optimizer) not in (torch.optim.Adam, torch.optim.AdamW) or each.state.dtype.is_complex:
            return
        group = self.optimizer.param_groups[each.state.chunk.group]
        keys = (*ADAM_KEYS, "max_exp_avg_sq") if group["amsgrad"] else ADAM_KEYS
        for key in keys:
            if key not in each.moments:
                each.moments[key] = self._zeros(each, key)
        where = self._device if self._counts_on_device(each.state) else torch.device("cpu")
        for slot in each.state.own.slots:
            each.rest[slot.name] = {"step": torch.zeros((), device=where), **{key: Flat() for key in keys}}

    def _counts_on_device(self, state: ChunkState) -> bool:
        """Whether torch's optimizer wants its step counts there."""
        groups = self.optimizer.param_groups
        wanted = groups[state.chunk.group].get("fused") or groups[state.chunk.group].get("capturable")
        return bool(wanted) and state.placement.update == "device" and self._settings_of(state, groups) is None

    def _adopt(self, each: OptimizerState, parameters: Mapping[str, nn.Parameter]) -> None:
        """What the optimizer knows already: its constructor made it (Adagrad's does), or it has stepped or loaded before."""
        known = {slot.name: self.optimizer.state.pop(parameters[slot.name], None) for slot in each.state.chunk.slots}
        self.load({name: entry for name, entry in known.items() if entry})

    def _replace(self, given: Mapping[Any, Mapping[str, Any]]) -> None:
        """Takes over a state that user code has put in the place of this one."""
        self._residency.settle_all()
        names = {id(parameter): name for name, parameter in self.users.parameters.items()}
        self.forget_all()
        for each in self.chunks:
            for flat in each.moments.values():
                flat.zero_()
            self._make_adam(each)
        self.load({names[id(parameter)]: entry for parameter, entry in given.items() if names.get(id(parameter)) in self.names})

    def _take_over(self, each: OptimizerState, carried: Carried) -> None:
        names = [slot.name for slot in each.state.own.slots if slot.name in carried.optimizer_state]
        self.load({name: carried.optimizer_state[name] for name in names})
        carried.optimizer_state.update(each.entries(each.moments, names, cloned=False))

    # ------------------------------------------------------------------ a step

    def ready(self) -> None:
        """Before a step: takes over what user code has done to the optimizer since the last, or raises where it cannot."""
        self.users.refuse_changed()
        given = self.users.replaced()
        if given is not None:
            self._replace(given)
        self.users.show_hidden()

    def begin(self, norm: Tensor, clip_norm: float | None, scale: Tensor | None) -> None:
        """Gives the GPU the updates of resident chunks before the host knows the norm, which the GPU will: it goes on with them
        while the host waits, and then starts the others. `apply` or `leave_out` has to follow. Times `scale` the gradients have
        this norm."""
        self.check()
        groups = self._settings()
        begun = [each for each in self.chunks if self._can_begin(each.state, groups)]
        if not begun or self.users.must_step_together(self._coupled):
            return
        self._before = self._lanes.so_far()
        factor = torch.ones_like(norm) if clip_norm is None else clip_factor(norm, clip_norm)
        factor = factor if scale is None else factor * scale
        factor = torch.where(norm.isfinite(), factor, math.nan)  # with which an update changes nothing
        for each in begun:
            own, _ = self._gradients.of(each.state)
            self.before_change(each.state.index)
            if own:
                self._update_resident(each, own, None, factor, groups)

    def _can_begin(self, state: ChunkState, groups: Groups) -> bool:
        is_there = state.placement.route == "resident" and state.placement.gradients == "device" and self._device.type == "cuda"
        return is_there and self._settings_of(state, groups) is not None

    def leave_out(self) -> None:
        """Nothing is to change in this step."""
        self._begun.clear()

    def apply(self, factor: float | None) -> None:
        """One optimizer step with the gradients at hand (times `factor`) on every parameter that has one."""
        self.check()
        self.take_back()
        self._residency.heed_all()
        self._residency.refuse_kept()
        self._mirrors.collect()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # for torch's schedulers, which would warn
        groups = self._settings()
        self._clipped += ((factor is not None) - self._clipped) / LATE_STEPS
        is_late = any(each.state.left is not None and not each.state.left.is_over for each in self.chunks)
        self._parted = max(self._parted - LESS, 0.0) if is_late else min(self._parted + MORE, 1.0)
        if self._ranks.are_several:
            for each in self.chunks:
                self._residency.settle(each.state)  # one that only other ranks used may still be at its last update
        before = self._before or self._lanes.so_far()  # the old weights have been read
        begun, self._begun = self._begun, {}
        self._broken = BROKEN_OFF  # unless it comes to its end
        if self.users.must_step_together(self._coupled):
            self._apply_together(factor)
            self._broken = None
            return
        for each in self.chunks:
            own, arrived = self._gradients.of(each.state)
            if each.state.placement.route == "resident":
                if each.state.index in begun:
                    each.rest |= begun[each.state.index]
                    continue
                self.before_change(each.state.index)
                if own:
                    self._update_resident(each, own, arrived, factor, groups)
                self._share(each.state, None)
        for each in self.chunks:
            state, second = each.state, each.second
            own, arrived = self._gradients.of(state)
            if state.placement.route == "resident":
                continue
            is_speculated = factor is None and second is not None and second.ticket is not None
            if not (is_speculated and self._keeps_generations(state)):
                self.before_change(state.index)
            if not own:
                self._share(state, None)
                continue
            self._residency.drop(state)  # the weights that are there will be old
            start = self._streamed if state.placement.route == "streamed" else self._on_host
            state.again = functools.partial(start, each, own, (arrived, before), factor, groups)
            state.fresh = self._committed(each, own, before) if is_speculated else state.again()
            self._residency.part(state)
            self._share(state, before)
        self._mirrors.spread()
        self._broken = None

    def _apply_together(self, factor: float | None) -> None:
        """One call of the optimizer itself for all parameters."""
        gradients: dict[str, Tensor] = {}
        masters: dict[str, Tensor] = {}
        exact: dict[int, Tensor] = {}
        bench = self._benches["resident"]
        with self._lanes.computing("update"):
            for each in self.chunks:
                state = each.state
                own, arrived = self._gradients.of(state)
                self._lanes.hold_computation(arrived)
                self.before_change(state.index)
                self.users.collect(each)
                if state.is_split and own:
                    merged = exact[state.index] = bench.flat(f"exact {state.index}", state.own.elements)
                    merge(state.weights, state.low, merged)
                    masters |= _views(state, own, merged)
                    dense = {name: each for name, each in own.items() if each.layout == torch.strided}
                    widened = self._widened(state, dense, bench, f"gradient {state.index}")
                    own = {name: widened[name] if name in dense else each.float() for name, each in own.items()}
                gradients |= own
            try:
                self.users.step_together(gradients, masters, factor)
            except BaseException as error:
                self._broken = f"the update failed half-way ({type(error).__name__}: {error})"
                raise
            for each in self.chunks:
                self._keep_new(each)
                if each.state.index in exact:
                    split(exact[each.state.index], each.state.weights, each.state.low)
                    self._mirrors.spread()
            self._mirrors.collect()

    def _keep_new(self, each: OptimizerState) -> None:
        """What the optimizer itself has made for parameters of which nothing was known."""
        slots = {slot.name: self.users.entry(slot.name) for slot in each.own_slots if slot.name not in each.live}
        made = {name: entry for name, entry in slots.items() if entry}
        if made:
            self.users.keep(each, made, lambda key: self._zeros(each, key))

    def _share(self, state: ChunkState, before: Ticket | None) -> None:
        """Fresh weights of a chunk that ranks divide come to the others: now, where each has all of them; else when they are
        fetched again. Every rank takes part, also one whose stretch has not changed."""
        if state.shards == 1:
            return
        self._residency.drop(state)
        if not state.is_spread:
            return
        label, ranks = f"spread chunk {state.index}", state.ranks
        ranks.ask("spread", label)

        def spread() -> None:
            whole, own = state.on_device, state.own_on_device
            assert whole is not None
            assert own is not None
            ranks.gather("spread", state.shards, whole, own, label)

        state.fresh = self._lanes.spread.run(spread, (self._lanes.so_far(), before, state.fresh), label)
        self._residency.part(state)

    def turn_of(self, chunk: int) -> tuple[int, int]:
        """In which order chunks are changed: those on the device first; those of two generations a step later, the last first.
        So are those finished that have something left."""
        each = self._by_index.get(chunk)
        if each is not None and each.state.left is not None and not each.state.left.is_over:
            return 1, -chunk
        if each is not None and each.second is not None and self._keeps_generations(each.state) and self._speculates:
            return 2, -chunk
        return int(each is None or each.state.placement.route != "resident"), chunk

    def let_read(self, wait_for: Callable[[int], None]) -> None:
        """Somebody reads the state as it is now. From here on `wait_for` is asked before any of a chunk's is overwritten."""
        self.before_change = wait_for
        for each in self.chunks:
            if each.second is not None:
                each.second.may_be_read = False

    def _before_speculation(self, each: OptimizerState) -> None:
        """On a lane, before the second generation is overwritten."""
        assert each.second is not None
        if each.second.may_be_read:
            self.before_change(each.state.index)
            each.second.may_be_read = False

    @staticmethod
    def _keeps_generations(state: ChunkState) -> bool:
        """A step that is taken over leaves the state before it whole, until the next speculates: weights are on the host too."""
        return state.on_host is not None

    @property
    def _speculates(self) -> bool:
        return self._clipped <= CLIPPED_SHARE

    def _settings(self) -> Groups:
        """Learning rates and the like of every group as they are now: a scheduler may change them while an update runs."""
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]

    def forget(self) -> None:
        """The step is over, however it ended: what was speculated in it is not to be used by another."""
        if self._begun:
            self._broken = self._broken or BROKEN_OFF
        self._begun, self._before = {}, None
        for each in self.chunks:
            each.lifted = None
            if each.second is not None:
                each.second.ticket = None

    def check(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"{self._broken}; go on from the last checkpoint: anyfit.start(job, resume=...)")

    def _update_resident(
        self,
        each: OptimizerState,
        own: Mapping[str, Tensor],
        arrived: Ticket | None,
        factor: float | Tensor | None,
        groups: Groups,
    ) -> None:
        with self._lanes.computing(f"update chunk {each.state.index}"):
            self._lanes.hold_computation(arrived)
            try:
                self._resident(each, own, factor, groups)
            except BaseException as error:
                self._broken = f"the update failed half-way ({type(error).__name__}: {error})"
                raise

    def _resident(self, each: OptimizerState, own: Mapping[str, Tensor], factor: float | Tensor | None, groups: Groups) -> None:
        state, bench, on_device = each.state, self._benches["resident"], each.state.own_on_device
        assert on_device is not None
        flat = self._gradients.flat(state)
        if flat is not None and flat.device != self._device:
            flat = bench.flat("landed", state.own.elements, flat.dtype).copy_(flat, non_blocking=True)
            own = _views(state, own, flat)
        settings = self._settings_of(state, groups)
        if settings is not None:
            flat = self._gathered(state, own, bench) if flat is None else flat
            now = State(on_device, state.low if state.is_split else None, *(each.moments[key] for key in ADAM_KEYS))
            made, _ = self._in_one_pass(each, own, now, None, flat, factor, settings)
            if isinstance(factor, Tensor):
                self._begun[state.index] = made
            else:
                each.rest |= made
            return
        assert not isinstance(factor, Tensor)
        weights = exact = on_device
        if state.is_split:
            exact = bench.flat("exact", state.own.elements)
            merge(weights, state.low, exact)
        if state.is_split or state.placement.gradients == "host":
            own = self._widened(state, own, bench)
        self.users.collect(each)
        missing = [name for name in own if name not in each.live]
        entries = each.live | each.entries(each.moments, missing)
        made = self._step(each, exact, own, entries, factor, groups, "resident", missing)
        if missing:
            self.users.keep(each, made, lambda key: self._zeros(each, key))
        if state.is_split:
            split(exact, weights, state.low)

    # ------------------------------------------------------------------ streamed

    def _streamed(
        self,
        each: OptimizerState,
        own: dict[str, Tensor],
        after: Sequence[Ticket | None],
        factor: float | None,
        groups: Groups,
        second: Second | None = None,
    ) -> Ticket:
        """Starts a streamed update, of the state itself or into its second generation. Up, step and down are on streams of their
        own: the next chunk comes up while this one is stepped."""
        index = each.state.index
        load, each.lifted = (each.lifted, None) if second is None else (None, each.lifted)
        if load is None:
            load = Load(own, second)
        load.gradients = own
        home = None if each.home is None else Over(each.home)

        def lift() -> None:
            load.is_ahead = False
            if load.carrier is None:
                self._lift(each, load)

        parts = (
            (lift, f"lift state of chunk {index}"),
            (
                lambda: self._step_lifted(each, load, factor, groups),
                f"{'update' if second is None else 'speculate on'} chunk {index}",
            ),
            (lambda: self._lower(each, load), f"lower state of chunk {index}"),
        )
        each.home = load.ticket = self._lanes.streamed.run_parts(parts, (home, load.ticket, *after), order=index)
        return each.home

    def _lift_ahead(self, each: OptimizerState) -> None:
        """Of the streamed chunks that are needed first, as many as there are carriers."""
        if each in self._first_streamed:
            load = each.lifted = Load({}, None)
            after = (None if each.home is None else Over(each.home), self._gradients.of(each.state)[1])
            label = f"lift state of chunk {each.state.index}"

            def lift() -> None:
                self._lift(each, load)
                load.is_ahead = True

            load.ticket = self._lanes.streamed.run(lift, after, label, each.state.index)

    def _lift(self, each: OptimizerState, load: Load) -> None:
        state, elements = each.state, each.state.own.elements
        which = next(self._next_carrier)
        before, self._loads[which] = self._loads.get(which), load
        if before is not None and before.is_ahead:  # the lane comes to its update later, if it does: it is lifted again then
            before.carrier = None
        elif before is not None and before.ticket is not None:
            Over(before.ticket).wait()
        carrier = load.carrier = self._carriers[which]
        load.weights, load.flat = state.own_on_device, self._gradients.flat(state)
        load.moments = {key: carrier.flat(key, elements) for key in each.moments}
        copies = [(load.moments[key], flat) for key, flat in each.moments.items()]
        if load.weights is None:
            load.weights = carrier.flat("weights", elements, state.dtype)
            copies.append((load.weights, state.weights))
        if state.is_split:
            copies.append((carrier.flat("low", elements, torch.int16), state.low))
        if load.flat is not None and load.flat.device != self._device:
            copies.append((carrier.flat("landed", elements, load.flat.dtype), load.flat))
            load.flat = copies[-1][0]
        self._lanes.streamed.tracks[0].copy(copies, yields=True)  # to weights that the computation waits for

    def _step_lifted(self, each: OptimizerState, load: Load, factor: float | None, groups: Groups) -> None:
        state, bench, carrier = each.state, self._benches["streamed"], load.carrier
        elements, own = state.own.elements, load.gradients
        assert carrier is not None
        assert load.weights is not None
        old = new = load.weights
        self._lanes.streamed.tracks[1].uses(own.values())
        low = carrier.flat("low", elements if state.is_split else 0, torch.int16)
        if load.second is not None:  # the old weights stay
            load.weights = new = carrier.flat("weights", elements, state.dtype)
        settings = self._settings_of(state, groups)
        if settings is not None:
            flat = self._gathered(state, own, bench) if load.flat is None else load.flat
            halves, moments = low if state.is_split else None, [load.moments[key] for key in ADAM_KEYS]
            now, out = (State(weights, halves, *moments) for weights in (old, new))
            load.rest, _ = self._in_one_pass(each, own, now, out, flat, factor, settings)
            return
        if load.flat is not None:
            own = _views(state, own, load.flat)
        exact = bench.flat("exact", elements)
        if state.is_split:
            merge(old, low, exact)
        else:
            exact.copy_(old)
        entries = _moved(each.entries(load.moments, own), self._device)
        made = self._step(each, exact, self._widened(state, own, bench), entries, factor, groups, "streamed")
        after = OptimizerState(state)
        after.keep(load.moments, made, lambda key: carrier.flat(key, elements).zero_())
        load.rest = _moved(after.rest, torch.device("cpu"))
        # Nothing has changed so far that counts; from here on nothing can fail.
        if state.is_split:
            split(exact, new, low)
        else:
            new.copy_(exact)

    def _lower(self, each: OptimizerState, load: Load) -> None:
        state, second, carrier = each.state, load.second, load.carrier
        assert load.weights is not None
        assert carrier is not None
        moments = each.moments if second is None else second.moments
        if second is not None:
            self._before_speculation(each)
        for key in load.moments:
            if key not in moments:
                moments[key] = self._zeros(each, key)
        copies = [(moments[key], flat) for key, flat in load.moments.items()]
        if state.is_split:
            low = state.low if second is None else second.low
            copies.append((low, carrier.flat("low", state.own.elements, torch.int16)))
        weights = state.on_host if second is None else second.weights
        if weights is not None:
            copies.append((weights, load.weights))
        self._lanes.streamed.tracks[2].copy(copies)
        if second is not None:
            second.made = load.rest
        else:
            each.rest |= load.rest
        load.gradients.clear()  # the carrier knows this load until it takes another, which may be in the next step

    # ------------------------------------------------------------------ on the host

    def _on_host(
        self,
        each: OptimizerState,
        own: dict[str, Tensor],
        after: Sequence[Ticket | None],
        factor: float | None,
        groups: Groups,
    ) -> Ticket:
        state = each.state
        arrived, before = after
        part: Part = "masters" if self._is_parted(state, groups) else "all"
        job = functools.partial(self._host_job, each, own, factor, groups, part)
        updated = self._run_on_host(each, job, arrived, f"update chunk {state.index}")
        state.left = None
        if part == "masters":
            job = functools.partial(self._finish_on_host, each, own, factor, groups)
            label = f"finish chunk {state.index}"  # the last first: their next gradients come first
            state.left = each.home = self._lanes.host.run(job, (updated,), label, order=LATER - state.index)
        if state.on_device is None:
            return updated
        return self._lanes.fresh.run(lambda: self._upload(each), (updated, before), f"upload chunk {state.index}")

    def _run_on_host(self, each: OptimizerState, job: Work, arrived: Ticket | None, label: str) -> Ticket:
        """After the chunk's last, which may be one that does not count any more."""
        home = None if each.home is None else Over(each.home)
        each.home = self._lanes.host.run(job, (arrived, home), label, order=each.state.index)
        return each.home

    @staticmethod
    def _upload(each: OptimizerState) -> None:
        """Fresh weights to the device: from the host's copy, or, of a streamed update, from the generation that was committed."""
        state, source = each.state, each.state.on_host
        if source is None:
            assert each.second is not None
            source = each.second.weights
        on_device = state.own_on_device
        assert on_device is not None
        on_device.copy_(source, non_blocking=True)

    def _is_parted(self, state: ChunkState, groups: Groups) -> bool:
        settings = self._settings_of(state, groups)
        if self._gradients.adds_up or settings is None or not can_be_parted(settings):
            return False  # to add gradients up keeps the host at work all through backward
        return int((state.index + 1) * self._parted) > int(state.index * self._parted)

    def _host_job(
        self, each: OptimizerState, own: Mapping[str, Tensor], factor: float | None, groups: Groups, part: Part
    ) -> Begun | None:
        state, bench = each.state, self._benches["host"]
        assert state.on_host is not None
        if self._settings_of(state, groups) is not None:  # one pass, that cannot fail half-way
            known, begun = self._in_one_pass_on_host(each, own, None, factor, groups, part)
            each.rest |= known
            return begun
        before = {}
        for key, flat in each.moments.items():
            before[key] = bench.flat(f"{key} before", flat.numel())
            before[key].copy_(flat)
        try:
            exact, made = self._host_step(each, each.moments, own, factor, groups)
        except BaseException:
            for key, flat in before.items():
                each.moments[key].copy_(flat)
            raise
        each.keep(each.moments, made, lambda key: self._zeros(each, key))
        if state.is_split:
            split(exact, state.on_host, state.low)
        else:
            state.on_host.copy_(exact)
        return None

    def _finish_on_host(
        self, each: OptimizerState, own: Mapping[str, Tensor], factor: float | None, groups: Groups
    ) -> Begun | None:
        """The moments of a chunk whose weights are fresh."""
        try:
            return self._in_one_pass_on_host(each, own, None, factor, groups, "moments")[1]
        except BaseException:
            self._broken = BROKEN_OFF
            raise

    def _in_one_pass_on_host(
        self,
        each: OptimizerState,
        own: Mapping[str, Tensor],
        second: Second | None,
        factor: float | None,
        groups: Groups,
        part: Part = "all",
    ) -> tuple[dict[str, dict[str, Any]], Begun | None]:
        """In place, or into the second generation."""
        state = each.state
        settings, flat = self._settings_of(state, groups), self._gradients.flat(state)
        assert state.on_host is not None
        assert settings is not None
        assert flat is not None
        now = State(state.on_host, state.low if state.is_split else None, *(each.moments[key] for key in ADAM_KEYS))
        out = None
        if second is not None:
            out = State(second.weights, second.low if state.is_split else None, *(second.moments[key] for key in ADAM_KEYS))
        return self._in_one_pass(each, own, now, out, flat, factor, settings, part, waits=False)

    def _host_step(
        self,
        each: OptimizerState,
        moments: Mapping[str, Tensor],
        own: Mapping[str, Tensor],
        factor: float | None,
        groups: Groups,
    ) -> tuple[Tensor, dict[str, dict[str, Any]]]:
        """The masters after the step, in scratch; moments are updated where they lie."""
        state, bench = each.state, self._benches["host"]
        assert state.on_host is not None
        exact = bench.flat("exact", state.own.elements)
        if state.is_split:
            merge(state.on_host, state.low, exact)
        else:
            exact.copy_(state.on_host)
        widened = self._widened(state, own, bench)
        return exact, self._step(each, exact, widened, each.entries(moments, own), factor, groups, "host")

    # ------------------------------------------------------------------ speculation

    def _speculate(self, state: ChunkState) -> None:
        """All gradients of the chunk are there, or on their way: steps it, out of place, as if nothing were clipped."""
        each = self._by_index.get(state.index)
        if each is None or each.second is None or len(each.rest) != len(state.own.slots):
            return  # a first step makes state, which is taken over in place
        if not self._speculates:
            self._lift_ahead(each)
            return
        second = each.second
        self._residency.heed(state.index)
        own, arrived = self._gradients.of(state)
        groups = self._settings()
        if state.placement.route == "streamed":
            second.ticket = self._streamed(each, own, (self._lanes.so_far(), arrived), None, groups, second)
            return

        def job() -> Begun | None:
            self._before_speculation(each)
            if self._settings_of(state, groups) is not None:
                second.made, begun = self._in_one_pass_on_host(each, own, second, None, groups)
                return begun
            for key, flat in each.moments.items():
                if key not in second.moments:
                    second.moments[key] = self._zeros(each, key)
                second.moments[key].copy_(flat)
            exact, second.made = self._host_step(each, second.moments, own, None, groups)
            if state.is_split:
                split(exact, second.weights, second.low)
            else:
                second.weights.copy_(exact)
            return None

        second.ticket = self._run_on_host(each, job, arrived, f"speculate on chunk {state.index}")

    def _revoke(self, state: ChunkState) -> None:
        each = self._by_index.get(state.index)
        if each is not None:
            each.lifted = None  # its gradients may have been lifted with it
        if each is not None and each.second is not None and each.second.ticket is not None:
            with contextlib.suppress(BaseException):  # of an update that does not count
                each.second.ticket.wait()
            each.second.ticket = None

    def _committed(self, each: OptimizerState, own: dict[str, Tensor], before: Ticket) -> Ticket:
        """Takes over what was speculated, and sends its weights to where they live."""
        state, second = each.state, each.second
        assert second is not None

        def take_over() -> None:
            if state.on_host is not None:
                state.on_host, second.weights = second.weights, state.on_host
            state.low, second.low = second.low, state.low
            each.moments, second.moments = second.moments, each.moments
            each.keep(each.moments, second.made, lambda key: self._zeros(each, key))
            second.may_be_read = True
            own.clear()
            if state.on_device is not None:
                self._upload(each)

        return self._lanes.fresh.run(take_over, (second.ticket, before), f"commit chunk {state.index}")

    # ------------------------------------------------------------------ one chunk, wherever its numbers are

    def _in_one_pass(
        self,
        each: OptimizerState,
        own: Iterable[str],
        now: State,
        out: State | None,
        gradient: Tensor,
        factor: float | Tensor | None,
        settings: Settings,
        part: Part = "all",
        *,
        waits: bool = True,
    ) -> tuple[dict[str, dict[str, Any]], Begun | None]:
        """Steps these parameters of a chunk by the kernel of where they lie; what is then known of each, and, where it is not
        waited for, the host's update that is still under way."""
        made: dict[str, dict[str, Any]] = {}
        ranges: dict[int, list[tuple[int, int]]] = {}  # by step count: a parameter without a gradient has stayed behind
        slots = each.state.own.slots
        for slot in slots:
            if slot.name in own:
                entry = each.rest[slot.name]
                step = int(entry["step"]) + 1
                made[slot.name] = {**entry, "step": self._count(step)}
                ranges.setdefault(step, []).append((slot.offset, slot.offset + slot.elements))
        begun, last = None, next(reversed(ranges), None)
        for step, stretches in ranges.items():
            own_ranges = stretches if len(stretches) < len(slots) else None  # all of it, and the padding between
            if now.weights.is_cuda:
                adamw_on_gpu(now, gradient, settings, step, out=out, scale=factor, ranges=own_ranges)
            else:
                assert not isinstance(factor, Tensor)
                on_gpu = self._device.type == "cuda"  # the same bits, wherever it is updated
                how = functools.partial(adamw, part=part, threads=self._threads, as_on_gpu=on_gpu, waits=waits or step != last)
                begun = how(now, gradient, settings, step, out=out, scale=factor, ranges=own_ranges)
            now, out = out or now, None
        return made, begun

    @staticmethod
    @functools.lru_cache(8)
    def _count(step: int) -> Tensor:
        """As torch keeps it, one for all: it is replaced and not changed."""
        return torch.tensor(float(step))

    def _gathered(self, state: ChunkState, own: Mapping[str, Tensor], bench: Bench) -> Tensor:
        """Gradients that autograd made, side by side at the chunk's offsets."""
        flat = bench.flat("gathered", state.own.elements, next(iter(own.values())).dtype)
        torch._foreach_copy_(list(_views(state, own, flat).values()), list(own.values()), non_blocking=True)
        return flat

    def _widened(self, state: ChunkState, own: Mapping[str, Tensor], bench: Bench, name: str = "gradient") -> dict[str, Tensor]:
        """The gradients in fp32 on the bench's device, free to be scaled."""
        widened = _views(state, own, bench.flat(name, state.own.elements))
        if not own:
            return widened
        torch._foreach_copy_(list(widened.values()), list(own.values()), non_blocking=True)
        return widened

    def _step(
        self,
        each: OptimizerState,
        exact: Tensor,
        own: Mapping[str, Tensor],
        entries: Mapping[str, dict[str, Any]],
        factor: float | None,
        groups: Groups,
        route: str,
        asked: Collection[str] | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Steps the optimizer, which sees these parameters alone, on their masters in `exact`; what it then knows of each, or of
        those that are asked for."""
        if factor is not None:
            _scale(list(own.values()), factor)
        state = each.state
        parameters = {
            slot.name: parameter
            for slot, parameter in zip(state.own.slots, self._parameters(route, state, exact), strict=True)
            if slot.name in own
        }
        for name, parameter in parameters.items():
            parameter.grad = own[name]
        narrowed: Any = object.__new__(type(self.optimizer))
        narrowed.__dict__.update({key: value for key, value in vars(self.optimizer).items() if key != "step"})
        narrowed.param_groups = [{**group, "params": []} for group in groups]
        narrowed.param_groups[state.chunk.group]["params"] = list(parameters.values())
        narrowed.state = defaultdict(dict, {parameters[name]: entries[name] for name in parameters if entries[name]})
        try:
            narrowed.step()
        finally:
            for parameter in parameters.values():
                parameter.grad = None
        _refuse_coupled(groups, narrowed.param_groups, type(self.optimizer).__name__)
        return {name: dict(narrowed.state[parameters[name]]) for name in (parameters if asked is None else asked)}

    def _parameters(self, route: str, state: ChunkState, exact: Tensor) -> list[nn.Parameter]:
        key = (route, state.index)
        known = self._working.get(key)
        if known is None or known[0].data_ptr() != state.view(exact, state.own.slots[0]).data_ptr():
            known = [nn.Parameter(state.view(exact, slot)) for slot in state.own.slots]
            self._working[key] = known
        return known

    # ------------------------------------------------------------------ state, by parameter name

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of every parameter that has any, as far as it is this rank's."""
        self.settle()
        found: dict[str, dict[str, Any]] = {}
        for each in self.chunks:
            found |= each.entries(each.moments, [slot.name for slot in each.own_slots if slot.name in each.rest])
        return found

    def settle(self) -> None:
        """All that is known of parameters is in flat buffers, and beside them. An optimizer may have put other tensors, or
        numbers, in the place of those that a resident chunk gave it."""
        self.check()
        self._mirrors.collect()
        for each in self.chunks:
            self.users.collect(each)
            each.keep(each.moments, each.live, lambda key, each=each: self._zeros(each, key))

    def forget_all(self) -> None:
        """Nothing is known of any parameter, as before the first step: to be set anew, by `home` and `load_scalars`."""
        self.users.hide(self.names)
        for each in self.chunks:
            each.rest.clear()
            each.live.clear()

    def home(self, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[OptimizerState, Tensor] | None:
        """Where an array of that shape belongs that the optimizer keeps for a parameter; None where it is other ranks' alone."""
        each = self.names[name]
        mine = next((slot for slot in each.own_slots if slot.name == name), None)
        if mine is None:
            return None
        whole = next(slot for slot in each.state.chunk.slots if slot.name == name)
        rest = each.rest.setdefault(name, {})
        if shape == whole.shape and dtype == torch.float32:
            if key not in each.moments:
                each.moments[key] = self._zeros(each, key)
            rest[key] = Flat()
            return each, each.state.view(each.moments[key], mine)
        where = self._device if each.state.placement.optimizer == "device" else torch.device("cpu")
        rest[key] = torch.zeros(mine.shape if shape == whole.shape else shape, dtype=dtype, device=where)
        return each, rest[key]

    def load_scalars(self, name: str, entries: Mapping[str, Any]) -> None:
        each = self.names[name]
        mine = next((slot for slot in each.own_slots if slot.name == name), None)
        if mine is None:
            return
        counts = self._device if self._counts_on_device(each.state) else torch.device("cpu")
        rest = each.rest.setdefault(name, {})
        for key, value in entries.items():
            if key in each.moments and isinstance(value, Tensor):  # of a parameter that is one number
                each.state.view(each.moments[key], mine).fill_(value)
                rest[key] = Flat()
            else:
                rest[key] = _on(value, counts)

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        with torch.no_grad():
            for name, entries in state.items():
                each = self.names[name]
                on_device = each.state.placement.optimizer == "device"
                made = _pieces(each.state, {name: dict(entries)})
                if not made:
                    continue
                made = _moved(made, self._device if on_device else torch.device("cpu"))
                counts = self._device if self._counts_on_device(each.state) else torch.device("cpu")
                made[name] = {key: _on(_exact(value), counts) for key, value in made[name].items()}
                self.users.hide([name])
                each.keep(each.moments, made, lambda key, each=each: self._zeros(each, key))
                each.live.pop(name, None)

    @property
    def device_bytes(self) -> int:
        """Held between steps: the optimizer's state and the scratch buffers."""
        states = [tensor for each in self.chunks if each.state.placement.optimizer == "device" for tensor in each.tensors]
        benches = [self._benches[route].bytes for route in ("resident", "streamed")]
        benches += [carrier.bytes for carrier in self._carriers]
        return sum(tensor.nbytes for tensor in states) + sum(benches)


def _adam(optimizer: Optimizer, group: Mapping[str, Any]) -> Settings | None:
    """The settings of torch's own Adam or AdamW, where the one-pass kernel does what it does."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    if group["amsgrad"] or group["capturable"] or group["differentiable"] or isinstance(group["lr"], Tensor):
        return None
    return Settings(
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, torch.optim.AdamW))),
        maximize=group["maximize"],
    )


def _pieces(state: ChunkState, entries: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What this rank has of the state of whole parameters."""
    if state.shards == 1:
        return dict(entries)
    shapes = {slot.name: slot.shape for slot in state.chunk.slots}
    found: dict[str, dict[str, Any]] = {}
    for slot in state.own.slots:
        for key, value in entries.get(slot.name, {}).items():
            is_array = isinstance(value, Tensor) and value.dim() > 0 and value.shape == shapes[slot.name]
            found.setdefault(slot.name, {})[key] = state.piece(slot, value) if is_array else value
    return found


def _views(state: ChunkState, names: Iterable[str], flat: Tensor) -> dict[str, Tensor]:
    slots = {slot.name: slot for slot in state.own.slots}
    return {name: state.view(flat, slots[name]) for name in names}


def _moved(entries: Mapping[str, dict[str, Any]], device: torch.device) -> dict[str, dict[str, Any]]:
    """The same with arrays on the device; single numbers (step counts) stay where torch keeps them."""

    def place(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) and value.dim() else value

    return {name: {key: place(value) for key, value in entry.items()} for name, entry in entries.items()}


def _scale(gradients: list[Tensor], factor: float) -> None:
    if any(each.layout != torch.strided for each in gradients):  # which foreach does not know
        for each in gradients:
            each.mul_(factor)
    else:
        torch._foreach_mul_(gradients, factor)


def _exact(value: Any) -> Any:
    """Moments of bf16 parameters, as the masters have them."""
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) and not value.dim() else value


def _refuse_coupled(before: Groups, after: Sequence[Mapping[str, Any]], name: str) -> None:
    for old, new in zip(before, after, strict=True):
        for key, value in old.items():
            if new[key] is not value and new[key] != value:
                raise RuntimeError(
                    f"{name} changes its group's {key!r} in a step, so its parameters do not stand by themselves and cannot be "
                    "updated chunk by chunk; use an optimizer that keeps its state by parameter, such as AdamW"
                )
