"""Gradients of several ranks: reduce-scattered, so that each rank has the sum of the stretch that it updates.

A chunk is reduced while backward still runs, as soon as its gradients are side by side in a staging buffer. Ranks reduce the same
chunks in the same order whatever their models did: a chunk waits for those before it, and what is not complete when backward
ends is reduced then, with zeros for what is missing. Ranks of a tensor axis have gradients of the same samples: their mean is
taken, where the parameter is not cut. A parameter counts when some rank has a gradient for it. Of several
micro-batches, gradients add up on every rank and are reduced with the last one; sharded ones are reduced for each, and add up.
What several places of a pipeline hold is added up over these after all else, in one order on all of them: a place that is done
must not wait for another whose backward needs it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anyfit.kernels.sums import add, norm, root
from anyfit.values.engine import REDUCTION_BUFFERS
from anyfit.values.layout import Slot

from .chunks import ChunkState, ModelState, quietly
from .gradients import DeviceSums, Gradients, Landings, Norms, StagingBuffer, refuse_sparse, stretches_of
from .lanes import Label, Lanes, Over, Task, Ticket
from .tiers import Tiers


@dataclass(eq=False)
class ReductionStaging(StagingBuffer):
    own: Tensor = field(kw_only=True)  # bytes of a stretch, where it does not go straight home


@dataclass(eq=False)
class Home:
    """Where a chunk's gradients come to, and what has come of the step under way."""

    state: ChunkState
    flat: Tensor  # of `own`
    dtype: torch.dtype  # in which ranks sum
    by_micro_batch: bool  # each of them is reduced by itself
    sums: DeviceSums | None = None  # of the whole chunk, over the micro-batches of this rank
    there: set[str] = field(default_factory=set)  # of this micro-batch: autograd has made them
    names: set[str] = field(default_factory=set)  # of parameters that have had one in this step
    given: int = 0  # reductions in this step
    norm: Tensor | None = None
    squares: float | None = None  # of what has been added up on the host
    reduced: Ticket | None = None
    ticket: Ticket | None = None  # it is at home

    @property
    def lands(self) -> bool:
        """Whether a reduced stretch does not go straight home."""
        return self.by_micro_batch or self.state.placement.gradients == "host"

    @property
    def landing_bytes(self) -> int:
        return self.state.own.elements * self.dtype.itemsize if self.lands else 0


class ReducedGradients(Gradients):
    def __init__(
        self, state: ModelState, lanes: Lanes, tiers: Tiers, accumulation: int, moved: set[str], dtype: torch.dtype | None
    ) -> None:
        super().__init__(state, lanes, accumulation, moved)
        self._ranks, self._tiers = state.ranks, tiers
        self._is_last = True
        self._homes = {each.index: self._home(each, dtype or each.dtype) for each in state.chunks if each.chunk.trainable}
        # As backward comes to them, where modules are used as they are defined; what other places hold too is the last.
        self._order = sorted(self._homes, key=lambda at: (not self._homes[at].state.chunk.holders, at), reverse=True)
        self._turn = 0  # in it
        homes = self._homes.values()
        whole = max((home.state.chunk.elements * home.dtype.itemsize for home in homes), default=0)
        own = max((home.landing_bytes for home in homes), default=0)
        down = max((home.landing_bytes for home in homes if home.state.placement.gradients == "host"), default=0)
        empty = functools.partial(torch.empty, dtype=torch.uint8, device=state.device)
        self._staging = [ReductionStaging(empty(whole), own=empty(own)) for _ in range(min(REDUCTION_BUFFERS, len(homes)))]
        self.device_bytes += sum(staging.flat.nbytes + staging.own.nbytes for staging in self._staging)
        self._landings = Landings(lanes, tiers["host"], down, len(self._staging) if self.adds_up and down else 0)
        for home in homes:
            for slot in home.state.chunk.slots:
                self._hook(slot.name, self._taker(home, slot))

    def _home(self, state: ChunkState, dtype: torch.dtype) -> Home:
        is_on_host = state.placement.gradients == "host"
        by_micro_batch = self.adds_up and (is_on_host or state.placement.gradient_shards > 1)
        kept = torch.float32 if by_micro_batch else dtype
        flat = self._tiers[state.placement.gradients].zeros(state.own.elements, kept, crosses=not self.adds_up)
        home = Home(state, flat, dtype, by_micro_batch)
        if is_on_host:
            return home
        self.device_bytes += home.flat.nbytes
        if self.adds_up and not by_micro_batch and state.dtype != torch.float32:
            home.sums = DeviceSums.of(state, self._state.device)
            self.device_bytes += home.sums.flat.nbytes
        return home

    def _taker(self, home: Home, slot: Slot) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            with quietly(), torch.no_grad():
                if parameter.grad is None:  # a hook of the user's has taken it
                    return
                refuse_sparse(slot.name, parameter.grad)
                home.names.add(slot.name)
                if slot.name in home.there and (home.by_micro_batch or self._is_last):
                    self._refuse_late(home, slot)
                home.there.add(slot.name)
                if home.sums is not None:
                    home.sums.add({slot.name: parameter.grad})
                    parameter.grad = None
                    self._moved.add(slot.name)
                if home.by_micro_batch or self._is_last:
                    self._advance()

        return take

    def _refuse_late(self, home: Home, slot: Slot) -> None:
        if self._order.index(home.state.index) < self._turn:
            raise RuntimeError(
                f"{slot.name} got a gradient after its chunk was reduced over the ranks: a checkpoint with use_reentrant=True "
                "shares it; use use_reentrant=False"
            )

    def _advance(self) -> None:
        """Reduces what is complete, in the order that all ranks keep."""
        while self._turn < len(self._order):
            home = self._homes[self._order[self._turn]]
            if home.state.chunk.holders:
                return
            if home.by_micro_batch or self._is_last:
                if len(home.there) < len(home.state.chunk.slots):
                    return
                self._reduce(home)
            self._turn += 1

    def begin_backward(self, total: Tensor | None, *, is_last: bool) -> None:
        self._is_last = is_last

    def end_backward(self) -> None:
        with quietly(), torch.no_grad():
            for index in self._order[self._turn :]:
                home = self._homes[index]
                if home.by_micro_batch or self._is_last:
                    self._reduce(home)
        self._turn = 0
        for home in self._homes.values():
            home.there.clear()

    def sum_over_places(self) -> None:
        for index in self._order:
            home = self._homes[index]
            if home.state.chunk.holders:
                label = Label(Task.REDUCE, index)
                self._ranks.ask("reduce", label)
                work = functools.partial(self._sum_over_places, home, label)
                home.reduced = home.ticket = self._lanes.reduce.run(work, (home.ticket,), label)

    def _sum_over_places(self, home: Home, label: Label) -> None:
        there = home.flat.to(self._state.device)
        self._ranks.sum_held(there, home.state.chunk.holders, label)
        if there is not home.flat:
            home.flat.copy_(there)
        home.norm, home.squares = norm(there), None

    def _reduce(self, home: Home) -> None:
        state, index = home.state, home.state.index
        staging = self._staging.pop(0)
        self._staging.append(staging)
        self._lanes.hold_computation(staging.ticket)
        dtype, goes_home = home.dtype, not home.lands
        is_direct = goes_home and state.shards == 1  # summed where it stays
        whole = home.flat if is_direct else staging.flat[: state.chunk.elements * dtype.itemsize].view(dtype)
        own = home.flat if goes_home else staging.own[: state.own.elements * dtype.itemsize].view(dtype)
        if state.shards == 1:
            own = whole
        if is_direct:
            self._lanes.hold_computation(home.ticket)
            self._lanes.hold_computation(None if (fresh := state.update.fresh) is None else Over(fresh))  # who updates from it
        self._fill(home, whole)
        label = Label(Task.REDUCE, index)
        self._ranks.ask("reduce", label)
        takes_norm = goes_home or not self.adds_up

        def work() -> None:
            self._ranks.reduce(state.sharding, whole, own, label)
            if takes_norm:
                home.norm = norm(own)

        home.reduced = self._lanes.reduce.run(work, (self._lanes.so_far(), state.update.fresh, home.ticket), label)
        home.ticket = staging.ticket = home.reduced if goes_home else self._land(home, own, home.reduced)
        home.given += 1
        if self._is_last and not state.chunk.holders:
            self.on_complete(state)

    def _fill(self, home: Home, whole: Tensor) -> None:
        """The chunk's gradients at their offsets, as autograd made them or as they have added up, and zeros elsewhere."""
        state = home.state
        filled, taken = [], []
        for slot in state.chunk.slots:
            gradient = self._parameters[slot.name].grad if home.sums is None else home.sums.get(slot.name)
            if gradient is not None:
                filled.append(slot)
                taken.append(gradient)
                self._moved.add(slot.name)
        bounds = [0, *itertools.chain.from_iterable(stretches_of(filled, apart=1)), state.chunk.elements]
        for start, end in zip(bounds[::2], bounds[1::2], strict=True):
            if start < end:
                whole[start:end].zero_()
        if filled:
            torch._foreach_copy_([state.view(whole, slot) for slot in filled], taken)
            if state.sharding.averaged > 1:
                whole.mul_(1.0 / state.sharding.averaged)
        for slot in filled:
            self._parameters[slot.name].grad = None

    def _land(self, home: Home, own: Tensor, reduced: Ticket) -> Ticket:
        """From the device's staging buffer home: added to what is there, or in its place."""
        state, is_first = home.state, home.given == 0
        label, added = Label(Task.GRADIENTS, state.index), Label(Task.ADD, state.index)
        if state.placement.gradients == "device":
            return self._lanes.reduce.run(lambda: _take(home.flat, own, is_first=is_first), (reduced,), added)
        if not self.adds_up:
            return self._tiers["host"].write(home.flat, own, (reduced, state.update.moments), label)

        def add_up(summand: Tensor) -> None:
            home.squares = add(home.flat, summand, is_first=is_first, threads=self._threads)

        return self._landings.add_up(state, own, [(0, own.numel())], add_up, (reduced,), (home.ticket,))[1]

    def finish(self) -> Norms:
        """By chunk, of this rank's stretch."""
        self._state.refuse_thawed()
        given = [home for home in self._homes.values() if home.given]
        return Norms([self._norm(home) for home in given], [home.state.sharding.norm_share for home in given])

    def _norm(self, home: Home) -> Tensor:
        if not (self.adds_up and home.lands):
            self._lanes.hold_computation(home.reduced)
            assert home.norm is not None
            return home.norm
        self._lanes.hold_computation(home.ticket)
        if home.flat.device != self._state.device:
            self._lanes.wait(home.ticket)
        return norm(home.flat, threads=self._threads) if home.squares is None else root(home.squares)

    def missing(self) -> list[str]:
        return [slot.name for home in self._homes.values() for slot in home.state.chunk.slots if slot.name not in home.names]

    def count_out(self) -> None:
        for home in self._homes.values():
            if home.names:
                home.names.clear()
                self.on_late(home.state)

    def count_in(self, names: Sequence[str]) -> None:
        wanted = set(names)
        for home in self._homes.values():
            found = wanted.intersection(slot.name for slot in home.state.chunk.slots) - home.names
            if found:
                home.names |= found
                self.on_late(home.state)

    def of(self, state: ChunkState) -> tuple[dict[str, Tensor], Ticket | None]:
        home = self._homes.get(state.index)
        if home is None:
            return {}, None
        return {slot.name: state.view(home.flat, slot) for slot in state.own.slots if slot.name in home.names}, home.ticket

    def flat(self, state: ChunkState) -> Tensor | None:
        home = self._homes.get(state.index)
        return None if home is None else home.flat

    def clear(self) -> None:
        self._turn, self._is_last = 0, True
        for home in self._homes.values():
            if home.sums is not None:
                home.sums.names.clear()
            home.there.clear()
            home.names.clear()
            home.given, home.norm = 0, None
        super().clear()


def _take(target: Tensor, source: Tensor, *, is_first: bool) -> None:
    if is_first:
        target.copy_(source, non_blocking=True)
    else:
        target.add_(source)
