"""Gradients of several ranks: summed over all of them, each rank keeping the stretch that it updates.

A chunk is reduced while backward still runs, as soon as its gradients are there: they are put side by side in a staging buffer,
and a lane does the rest. Ranks reduce the same chunks in the same order whatever their models did: a chunk waits for those
before it, and those that are not complete when backward ends go then, with zeros for what is missing. A parameter counts when
some rank has a gradient for it.

With several micro-batches, gradients add up on every rank and are reduced with the last one; or, where a plan says that they
are divided, each micro-batch's are reduced, and the stretches add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from anyfit.kernels.sums import add, norm, root
from anyfit.values.engine import REDUCTION_STAGES
from anyfit.values.layout import Slot
from anyfit.values.machine import update_threads

from .chunks import ChunkState, ModelState, quietly
from .gradients import refuse_sparse
from .lanes import Lanes, Over, Ticket
from .tiers import HostSlabs


@dataclass(eq=False)
class Stage:
    flat: Tensor  # bytes, on the device, of a whole chunk
    own: Tensor  # the same of a stretch, where it does not go straight home
    ticket: Ticket | None = None  # of the last that used it


@dataclass(eq=False)
class Home:
    """Where a chunk's gradients come to, and what has come of the step under way."""

    state: ChunkState
    flat: Tensor  # of `own`
    is_divided: bool  # every micro-batch is reduced by itself
    sums: Tensor | None = None  # of the whole chunk, fp32, over the micro-batches of this rank
    summed: set[str] = field(default_factory=set)  # of parameters in them
    there: set[str] = field(default_factory=set)  # of this micro-batch: autograd has made them
    names: set[str] = field(default_factory=set)  # of parameters that have had one in this step
    given: int = 0  # reductions in this step
    norm: Tensor | None = None
    squares: float | None = None  # of what has been added up on the host
    reduced: Ticket | None = None
    ticket: Ticket | None = None  # it is at home


class Reduction:
    """What `Gradients` is for a rank alone. `last` is to say whether the micro-batch that goes backward is the step's last."""

    def __init__(
        self, state: ModelState, lanes: Lanes, slabs: HostSlabs, accumulation: int, moved: set[str], dtype: torch.dtype | None
    ) -> None:
        self._state, self._lanes, self._ranks, self._parameters = state, lanes, state.ranks, state.parameters
        self.adds_up = accumulation > 1
        self.last = True
        self.is_weighted = False  # sums are divided by a weight that is not known yet
        self._threads = update_threads(torch.get_num_threads())
        self._moved = moved
        self.on_complete: Callable[[ChunkState], None] = lambda _state: None
        self.on_late: Callable[[ChunkState], None] = lambda _state: None
        self.device_bytes = 0
        self._hooks: list[RemovableHandle] = []
        self._homes = {each.index: self._home(each, slabs, dtype) for each in state.chunks if each.chunk.trainable}
        self._order = sorted(self._homes, reverse=True)  # as backward comes to them, where modules are used as they are defined
        self._turn = 0  # in it
        self._dtypes = {index: self._dtype_of(home.state, dtype) for index, home in self._homes.items()}
        whole = max((each.state.chunk.elements * self._dtypes[index].itemsize for index, each in self._homes.items()), default=0)
        landing = {
            index: home.state.own.elements * self._dtypes[index].itemsize
            for index, home in self._homes.items()
            if self._lands(home)
        }
        own = max(landing.values(), default=0)
        down = max((size for index, size in landing.items() if self._homes[index].state.placement.gradients == "host"), default=0)
        self._stages = []
        for _ in range(min(REDUCTION_STAGES, len(self._homes))):
            buffers = [torch.empty(size, dtype=torch.uint8, device=state.device) for size in (whole, own)]
            self._stages.append(Stage(buffers[0], buffers[1]))
        self.device_bytes += sum(stage.flat.nbytes + stage.own.nbytes for stage in self._stages)
        self._landings: list[tuple[Tensor, Ticket | None]] = [
            (slabs.zeros(down, torch.uint8, crosses=True), None) for _ in self._stages if self.adds_up and down
        ]
        for home in self._homes.values():
            for slot in home.state.chunk.slots:
                hook = self._taker(home, slot)
                self._hooks.append(self._parameters[slot.name].register_post_accumulate_grad_hook(hook))

    @staticmethod
    def _dtype_of(state: ChunkState, dtype: torch.dtype | None) -> torch.dtype:
        return dtype or state.dtype

    def _home(self, state: ChunkState, slabs: HostSlabs, dtype: torch.dtype | None) -> Home:
        is_on_host = state.placement.gradients == "host"
        is_divided = self.adds_up and (is_on_host or state.placement.gradient_shards > 1)
        kept = torch.float32 if is_divided else self._dtype_of(state, dtype)
        elements = state.own.elements
        if is_on_host:
            return Home(state, slabs.zeros(elements, kept, crosses=not self.adds_up), is_divided)
        home = Home(state, torch.zeros(elements, dtype=kept, device=self._state.device), is_divided)
        self.device_bytes += home.flat.nbytes
        if self.adds_up and not is_divided and state.dtype != torch.float32:
            home.sums = torch.zeros(state.chunk.elements, dtype=torch.float32, device=self._state.device)
            self.device_bytes += home.sums.nbytes
        return home

    def _lands(self, home: Home) -> bool:
        """Whether a reduced stretch does not go straight home."""
        return home.is_divided or home.state.placement.gradients == "host"

    def close(self) -> None:
        """Gradients are autograd's again."""
        while self._hooks:
            self._hooks.pop().remove()

    # ------------------------------------------------------------------ while backward runs

    def _taker(self, home: Home, slot: Slot) -> Callable[[Tensor], None]:
        def take(parameter: Tensor) -> None:
            with quietly(), torch.no_grad():
                if parameter.grad is None:  # a hook of the user's has taken it
                    return
                refuse_sparse(slot.name, parameter.grad)
                home.names.add(slot.name)
                if slot.name in home.there and (home.is_divided or self.last):
                    self._refuse_late(home, slot)
                home.there.add(slot.name)
                if home.sums is not None:
                    total = home.state.view(home.sums, slot)
                    total.add_(parameter.grad) if slot.name in home.summed else total.copy_(parameter.grad)
                    home.summed.add(slot.name)
                    parameter.grad = None
                    self._moved.add(slot.name)
                if home.is_divided or self.last:
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
            if home.is_divided or self.last:
                if len(home.there) < len(home.state.chunk.slots):
                    return
                self._reduce(home)
            self._turn += 1

    def end_backward(self) -> None:
        """Of one micro-batch: what was not complete goes too."""
        with quietly(), torch.no_grad():
            for index in self._order[self._turn :]:
                home = self._homes[index]
                if home.is_divided or self.last:
                    self._reduce(home)
        self._turn = 0
        for home in self._homes.values():
            home.there.clear()

    def _reduce(self, home: Home) -> None:
        state, index = home.state, home.state.index
        stage = self._stages.pop(0)
        self._stages.append(stage)
        self._lanes.hold_computation(stage.ticket)
        dtype = self._dtypes[index]
        goes_home = not self._lands(home)
        is_direct = goes_home and state.shards == 1  # summed where it stays
        whole = home.flat if is_direct else stage.flat[: state.chunk.elements * dtype.itemsize].view(dtype)
        own = home.flat if goes_home else stage.own[: state.own.elements * dtype.itemsize].view(dtype)
        if state.shards == 1:
            own = whole
        if is_direct:
            self._lanes.hold_computation(home.ticket)
            self._lanes.hold_computation(None if state.fresh is None else Over(state.fresh))  # who updates from it
        self._fill(home, whole)
        label = f"reduce chunk {index}"
        self._ranks.ask("reduce", label)
        takes_norm = goes_home or not self.adds_up

        def work() -> None:
            self._ranks.reduce(state.shards, whole, own, label)
            if takes_norm:
                home.norm = norm(own)

        home.reduced = self._lanes.reduce.run(work, (self._lanes.so_far(), state.fresh, home.ticket), label)
        home.ticket = stage.ticket = home.reduced if goes_home else self._land(home, own, home.reduced)
        home.given += 1
        if not self.adds_up and not self.is_weighted:
            self.on_complete(state)

    def _fill(self, home: Home, whole: Tensor) -> None:
        """The chunk's gradients at their offsets, as autograd made them or as they have added up, and zeros elsewhere."""
        state = home.state
        filled, taken = [], []
        for slot in state.chunk.slots:
            gradient = self._parameters[slot.name].grad
            if home.sums is not None:
                gradient = state.view(home.sums, slot) if slot.name in home.summed else None
            if gradient is not None:
                filled.append(slot)
                taken.append(gradient)
                self._moved.add(slot.name)
        for start, end in _gaps(filled, state.chunk.elements):
            whole[start:end].zero_()
        if filled:
            torch._foreach_copy_([state.view(whole, slot) for slot in filled], taken)
        for slot in filled:
            self._parameters[slot.name].grad = None

    def _land(self, home: Home, own: Tensor, reduced: Ticket) -> Ticket:
        """From the device's staging buffer home: added to what is there, or in its place."""
        state, is_first = home.state, home.given == 0
        label = f"gradients of chunk {state.index}"
        if state.placement.gradients == "device":
            return self._lanes.reduce.run(lambda: _take(home.flat, own, is_first=is_first), (reduced,), f"add {label}")
        if not self.adds_up:
            return self._lanes.down.run(lambda: _take(home.flat, own, is_first=True), (reduced, state.left), label)
        landing, taken = self._landings.pop(0)
        summand = landing[: own.nbytes].view(own.dtype)
        down = self._lanes.down.run(lambda: _take(summand, own, is_first=True), (reduced, taken), label)
        threads = self._threads

        def add_up() -> None:
            home.squares = add(home.flat, summand, is_first=is_first, threads=threads)

        added = self._lanes.host.run(add_up, (down, home.ticket, state.left), f"add {label}")
        self._landings.append((landing, added))
        return added

    # ------------------------------------------------------------------ at the end of a step

    def finish(self) -> Tensor:
        """The sum of the squares of this rank's part of all gradients, on the device; parts of all ranks add up to the whole."""
        self._state.refuse_thawed()
        parts: list[Tensor] = []
        for home in self._homes.values():
            if not home.given:
                continue
            if self.adds_up and self._lands(home):
                self._lanes.hold_computation(home.ticket)
                if home.flat.device != self._state.device:
                    self._lanes.wait(home.ticket)
                part = norm(home.flat, threads=self._threads) if home.squares is None else root(home.squares)
            else:
                self._lanes.hold_computation(home.reduced)
                assert home.norm is not None
                part = home.norm
            share = home.state.shards / self._ranks.count  # so many ranks have the same
            parts.append(part.to(self._state.device, torch.float64).square() * share)
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self._state.device)

    def missing(self) -> list[str]:
        """Trainable parameters without a gradient on this rank."""
        return [slot.name for home in self._homes.values() for slot in home.state.chunk.slots if slot.name not in home.names]

    def count_out(self) -> None:
        """This rank's gradients are zeros that stand for none."""
        for home in self._homes.values():
            if home.names:
                home.names.clear()
                self.on_late(home.state)

    def count_in(self, names: Sequence[str]) -> None:
        """These have a gradient on another rank. An update that began without them does not count."""
        wanted = set(names)
        for home in self._homes.values():
            found = wanted.intersection(slot.name for slot in home.state.chunk.slots) - home.names
            if found:
                home.names |= found
                self.on_late(home.state)

    def of(self, state: ChunkState) -> tuple[dict[str, Tensor], Ticket | None]:
        """This rank's part of a chunk's gradients by name, in the tier its placement says; the ticket of what is under way."""
        home = self._homes.get(state.index)
        if home is None:
            return {}, None
        return {slot.name: state.view(home.flat, slot) for slot in state.own.slots if slot.name in home.names}, home.ticket

    def flat(self, state: ChunkState) -> Tensor | None:
        home = self._homes.get(state.index)
        return None if home is None else home.flat

    def clear(self) -> None:
        """Forgets the step's gradients. Those that an update still works with are kept by it."""
        self._moved.clear()
        self._turn, self.last, self.is_weighted = 0, True, False
        for home in self._homes.values():
            home.summed.clear()
            home.there.clear()
            home.names.clear()
            home.given, home.norm = 0, None
        with quietly():
            for parameter in self._parameters.values():
                parameter.grad = None


def _take(target: Tensor, source: Tensor, *, is_first: bool) -> None:
    if is_first:
        target.copy_(source, non_blocking=True)
    else:
        target.add_(source)


def _gaps(slots: Sequence[Slot], elements: int) -> Iterator[tuple[int, int]]:
    """(start, end) of what lies between these."""
    end = 0
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if slot.offset > end:
            yield end, slot.offset
        end = slot.offset + slot.elements
    if elements > end:
        yield end, elements
