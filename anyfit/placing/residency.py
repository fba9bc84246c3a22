"""Residency: weights that live on the host are on the device when an op needs them, and at no other time.

Parameters of such chunks are made `Watched`: torch calls their `__torch_function__` before any op that takes them, whoever
wrote that op, so a chunk is fetched at op precision and nothing has to be known about modules. What autograd saves for
backward is not kept but written down as (chunk, offset, shape, stride); backward fetches the chunk again.

The order in which one step touches chunks is the forecast for the next: chunks are fetched ahead of it, and the one whose next
use is furthest away makes room. A step that differs fetches on demand. A slot is overwritten only when nobody holds a view of
it (its storage's use count says) and after all that the computation was given so far.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .chunks import ChunkState, ModelState, quietly
from .lanes import Lanes
from .slots import DeviceSlot, DeviceSlots, Saved, SavedTensors, held_of, uses_of
from .watched import Present, Versions, take_over, watched_kind

LOOK_AHEAD = 64  # touches in which a step that left the forecast order is looked for again


class Order:
    def __init__(self) -> None:
        self._learnt: list[int] = []  # chunks in the order the last step touched them
        self._positions: dict[int, list[int]] = {}  # in it
        self.seen: list[int] | None = None  # of the step under way; None between steps
        self._cursor = 0

    def begin(self) -> None:
        """A step begins: the last one's order is what to expect."""
        if self.seen:
            self._learnt = self.seen
            self._positions = {}
            for position, index in enumerate(self._learnt):
                self._positions.setdefault(index, []).append(position)
        self.seen, self._cursor = [], 0

    def forget(self) -> None:
        """No step is under way: nothing is learnt."""
        self.seen = None

    def note(self, index: int) -> None:
        if self.seen is None:
            return
        if not self.seen or self.seen[-1] != index:
            self.seen.append(index)
        if self._cursor and self._learnt[self._cursor - 1] == index:
            return
        window = self._learnt[self._cursor : self._cursor + LOOK_AHEAD]
        if index in window:
            self._cursor += window.index(index) + 1

    def next_use(self, index: int) -> float:
        positions = self._positions.get(index)
        if not positions:
            return float("inf")
        place = bisect_left(positions, self._cursor)
        return positions[place] if place < len(positions) else positions[0] + len(self._learnt)

    def coming(self, among: Collection[int], most: int) -> list[int]:
        """The next so many of these chunks."""
        found: dict[int, None] = {}
        for place in range(self._cursor, len(self._learnt)):
            if self._learnt[place] in among:
                found[self._learnt[place]] = None
                if len(found) >= most:
                    break
        return list(found)


@dataclass(frozen=True)
class Home:
    """A parameter whose weights live on the device, and are updated elsewhere."""

    parameter: Any
    there: Tensor
    absent: Tensor
    present: type[nn.Parameter]
    watched: type[nn.Parameter]

    def bind(self, *, is_watched: bool) -> None:
        self.parameter.data = self.there
        self.parameter.__class__ = self.watched if is_watched else self.present

    def part(self) -> None:
        self.parameter.__class__ = self.watched
        self.parameter.data = self.absent


class Residency:
    def __init__(self, state: ModelState, lanes: Lanes, slots: int, prefetch: int, held: Collection[Tensor] = ()) -> None:
        """`held`: views of weights that are gone before the first step."""
        self._state, self._lanes, self._prefetch_depth = state, lanes, prefetch
        self.moved_gradients: set[str] = set()  # names whose gradient of this step has left autograd
        self.is_editing = False  # inside `run.weights()`
        self._fetched = {each.index for each in state.chunks if each.placement.weights == "host" or each.is_gathered}
        # Chunks that somebody may still be at work on when they are next used are watched too.
        updated = [each for each in state.chunks if each.chunk.is_updated]
        late = {each.index for each in updated if each.placement.optimizer != "device" or each.is_replicated}
        self.watched = self._fetched | late
        self.slots = DeviceSlots(state, lanes, self._fetched, slots)
        self._slot_of, self.refuse_kept = self.slots.of_chunk, self.slots.refuse_kept
        fetched = [slot.name for index in self._fetched for slot in state.chunks[index].chunk.slots]
        with quietly():
            self._absent = {name: state.parameters[name].data for name in fetched}
        self.kinds: dict[str, type[nn.Parameter]] = {}  # what each parameter is to the user
        for index in self.watched:
            for slot in state.chunks[index].chunk.slots:
                parameter: Any = state.parameters[slot.name]
                self.kinds[slot.name] = type(parameter)
                parameter.__class__ = watched_kind(type(parameter))
                parameter.anyfit = (self, slot.name, index)
        named = {index: [slot.name for slot in state.chunks[index].chunk.slots] for index in self.watched}
        self.versions = Versions({at: [(name, state.parameters[name]) for name in names] for at, names in named.items()})
        # Of chunks on the device that are watched: how each parameter is while its weights are fresh, and while they are not.
        self._homes = {index: self._homes_of(state.chunks[index]) for index in self.watched - self._fetched}
        # How many hold weights on the device besides the parameters:
        flats = {index: flat for index in self._homes if (flat := state.chunks[index].on_device) is not None}
        self._alone = {at: uses_of(flat) - len(named[at]) - held_of(flat, held) for at, flat in flats.items()}
        self._parted: set[int] = set()  # chunks on the device whose parameters wait for an update
        self.on_edit: Callable[[ChunkState], None] = lambda _state: None  # what was made of the old weights does not count
        self._order = Order()
        self._saved = SavedTensors(state, self.slots, self._fetched)
        self.pack = self._saved.pack
        self._needed: set[int] = set()  # by the call under way
        self._is_ahead = False  # these are there, and so is what comes next
        self._pinned: list[int] = []  # by compiled modules under way
        self.undo: list[Callable[[], None]] = []  # what the end has to put back
        self.fetches = 0  # uploads so far
        self.misses = 0  # of them, those that somebody had to wait for

    def _homes_of(self, state: ChunkState) -> list[Home]:
        assert state.on_device is not None
        homes = []
        for slot in state.chunk.slots:
            kinds = watched_kind(self.kinds[slot.name], Present), watched_kind(self.kinds[slot.name])
            there, absent = state.view(state.on_device, slot), self._state.absent.of(state, slot)
            homes.append(Home(self._state.parameters[slot.name], there, absent, *kinds))
        return homes

    def heed(self, index: int, *, is_written: bool = False) -> None:
        """Takes over what user code has written into weights of the chunk; `is_written`: it is known to have."""
        name = self.versions.edited(index) or (self._state.chunks[index].chunk.slots[0].name if is_written else None)
        if name is None or self.is_editing:
            return
        state, slot = self._state.chunks[index], self._slot_of.get(index)
        if state.shards > 1:
            raise RuntimeError(
                f"{name} is edited, and its chunk is sharded over ranks, where the edit would be lost; edit weights inside `with "
                "run.weights():`"
            )
        if (index in self._fetched and slot is None) or (state.update.fresh is not None and index not in self._fetched):
            raise RuntimeError(
                f"{name} is edited through a view that was kept while its weights were updated elsewhere, so the edit is lost; "
                "take the view anew (parameter.data, parameter[...]), or edit inside `with run.weights():`"
            )
        with torch.no_grad(), _disable_current_modes():
            on_device = slot.weights() if slot is not None else state.on_device
            assert on_device is not None
            take_over(state, on_device)
        self.versions.note(index)
        self.on_edit(state)

    def heed_all(self) -> None:
        for index in self.watched:
            self.heed(index)

    def ready(self, needed: set[int]) -> None:
        """Makes the weights of these chunks ready for the op that the computation is given next, whatever mode that is in."""
        if not (self._is_ahead and needed == self._needed):  # as by the op before: most have parameters of the same chunk
            with _untransformed(), _outside_inference():
                self.touch(needed)

    def touch(self, chunks: Iterable[int]) -> None:
        """Makes the weights of these chunks ready for what the computation is given next."""
        needed = set(chunks)
        if self._is_ahead and needed == self._needed:
            return
        self._needed, self._is_ahead = needed, False
        for index in needed:
            self._order.note(index)
            self.settle(self._state.chunks[index])
        for index in needed & self._fetched:
            slot = self._slot_of.get(index)
            if slot is None:
                self.misses += 1
                slot = self._fetch(index, self._make_room(index, at_all_costs=True))
            self._lanes.hold_computation(slot.ticket)
            slot.ticket = None
            self.slots.bind(slot)
        self._is_ahead = self._fetch_ahead()

    def settle(self, state: ChunkState) -> None:
        """The computation waits for the chunk's update. A failed one is raised once, and started again by the next to ask."""
        update = state.update
        if update.fresh is None and update.restart is not None:
            self.drop(state)  # what was fetched ahead since it failed is old
            update.fresh = update.restart()
        if update.fresh is not None:
            fresh, update.fresh = update.fresh, None
            try:
                self._lanes.hold_computation(fresh)
            except BaseException:
                self.drop(state)  # what was fetched ahead rested on it
                raise
            update.restart = None
        if state.index in self._parted:
            self._parted.discard(state.index)
            with quietly():
                for home in self._homes[state.index]:
                    home.bind(is_watched=torch._C._len_torch_dispatch_stack() > 0)  # under which torch does not count all writes

    def part(self, state: ChunkState) -> None:
        """Its weights on the device will be old ones until the chunk is settled: who reads them past the watching gets none."""
        if state.index in self.watched and state.index not in self._fetched:
            self._is_ahead = False
            self._parted.add(state.index)
            with quietly():
                for home in self._homes[state.index]:
                    home.part()

    def part_all(self) -> None:
        """No weights are where parameters are, until an op asks for them."""
        self.drop_all()
        for state in self._state.chunks:
            self.part(state)

    def settle_weights(self) -> None:
        """The host waits until every weight is fresh. What is left of updates changes where no weights are."""
        for state in self._state.chunks:
            self.settle(state)
        self._lanes.so_far().wait()

    def settle_all(self) -> None:
        """The host waits until every update is done."""
        self.settle_weights()
        for state in self._state.chunks:
            state.update.finish()

    def drop_all(self) -> None:
        """No update is under way and no slot holds weights: their homes may be written."""
        self.settle_all()
        for index in list(self._slot_of):
            self.drop(self._state.chunks[index])

    @contextmanager
    def pinning(self, chunks: set[int]) -> Iterator[None]:
        """Inside, the weights of these chunks stay on the device."""
        self.touch(chunks)
        self._pinned += chunks
        try:
            yield
        finally:
            for index in chunks:
                self._pinned.remove(index)

    def is_gathered(self, index: int) -> bool:
        """Whether ranks put the weights of a chunk together for each use."""
        return self._state.chunks[index].is_gathered

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Inside, saved tensors that are views of slots are replaced."""
        return self._saved.watching(self.unpack)

    def unpack(self, saved: Tensor | Saved) -> Tensor:
        return self._saved.unpack(saved, self.touch)

    def begin(self) -> None:
        """A step begins: the last one's order is what to expect."""
        self._order.begin()
        self._needed, self._is_ahead = set(), False
        self._fetch_ahead()

    def settle_kept(self) -> None:
        """Whoever keeps a view of weights on the device reads it without asking: it has to be fresh."""
        for index, alone in self._alone.items():
            state = self._state.chunks[index]
            bound = 0 if index in self._parted else len(state.chunk.slots)
            if state.update.fresh is not None and state.on_device is not None and uses_of(state.on_device) != alone + bound:
                self.settle(state)

    def end(self) -> None:
        """No step is under way: what is touched now is not learnt from."""
        if self._order.seen:
            self.begin()
        self._order.forget()

    def forget(self) -> None:
        """The step under way was broken off: nothing is learnt from it."""
        self._order.forget()
        self._is_ahead = False

    def _fetch_ahead(self) -> bool:
        """Whether a step is under way, and all that it needs next is there or comes."""
        if self._order.seen is None or not self._prefetch_depth:
            return self._order.seen is not None
        for index in self._order.coming(self._fetched, self._prefetch_depth):
            if index not in self._slot_of:
                slot = self._make_room(index, at_all_costs=False)
                if slot is None:
                    return False
                self._fetch(index, slot)
        return True

    def _fetch(self, index: int, slot: DeviceSlot) -> DeviceSlot:
        self.fetches += 1
        return self.slots.fetch(self._state.chunks[index], slot)

    def give_back(self) -> None:
        """Slots beyond the plan's, as far as nobody holds them."""
        self.slots.give_back(self.drop)

    def _make_room(self, index: int, *, at_all_costs: bool) -> Any:
        """An empty slot for the chunk. When nobody waits for it yet, only what is needed later makes room."""
        empty = self.slots.empty
        if empty is not None:
            return empty
        kept, next_use = {*self._needed, *self._pinned}, self._order.next_use
        free = [other for other, slot in self._slot_of.items() if other not in kept and not slot.is_held]
        last = max(free, key=next_use, default=None)
        if last is not None and (at_all_costs or next_use(last) > next_use(index)):
            slot = self._slot_of[last]
            self.drop(self._state.chunks[last])
            return slot
        return self.slots.one_more(index, len(self._needed & self._fetched)) if at_all_costs else None

    def drop(self, state: ChunkState) -> None:
        """The chunk's weights leave the device."""
        self._is_ahead = False
        slot = self._slot_of.pop(state.index, None)
        if slot is not None:
            self._empty(slot, state)

    @_disable_current_modes()
    def _empty(self, slot: DeviceSlot, state: ChunkState) -> None:
        if slot.ticket is not None:
            with contextlib.suppress(BaseException):  # whoever waits for the update that failed gets it
                slot.ticket.reach()
        if self.is_editing:
            edited = slot.weights()[state.stretch] if state.is_gathered else slot.weights()
            state.adopt(edited.to(state.weights.device, copy=True), state.weights)
        elif slot.is_bound:
            self._slot_of[state.index] = slot
            try:
                self.heed(state.index)
            finally:
                del self._slot_of[state.index]
        with quietly():
            for each in state.chunk.slots if slot.is_bound else ():
                self._state.parameters[each.name].data = self._absent[each.name]
        slot.state, slot.ticket, slot.is_bound = None, None, False

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, weights may be edited; what lies in a slot is written back when it leaves, and at the end."""
        self.settle_all()
        self.is_editing = True
        try:
            yield
        finally:
            with quietly(), torch.no_grad():
                for slot in self.slots.all:
                    if slot.state is not None:
                        self.drop(slot.state)
                self.is_editing = False
                for index in self.watched:
                    self.versions.note(index)

    @property
    def device_bytes(self) -> int:
        return sum(slot.flat.nbytes for slot in self.slots.all)

    def close(self) -> None:
        """Parameters are plain again, and hold their weights: on the device where they live there, else on the host. Sharded ones
        stay empty: no rank has room for all, and one that ends by itself cannot ask the others."""
        self.settle_all()
        for undo in self.undo:
            undo()
        with quietly():
            for index in self.watched:
                state = self._state.chunks[index]
                self.drop(state)
                for slot in state.chunk.slots:
                    parameter: Any = self._state.parameters[slot.name]
                    del parameter.anyfit
                    parameter.__class__ = self.kinds[slot.name]
                    if index in self._fetched and not state.is_gathered:
                        parameter.data = state.view(state.weights, slot)


def _untransformed() -> contextlib.AbstractContextManager[Any]:
    """Inside, no transform of torch.func is at work: what it would make of a weight is gone when the transform is."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def _outside_inference() -> contextlib.AbstractContextManager[Any]:
    """Inside, views of weights are made that serve after the user's inference mode too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
