"""Gradients of a rank that trains alone.

On the device: with one micro-batch autograd's own gradient is used as it is. With several, fp32 gradients add up where autograd
put them; bf16 ones are added in fp32 to a buffer beside the chunk as soon as each is complete, and freed.

On the host: gradients of a chunk are gathered in a staging buffer. It is copied to the host when all are there, or when
another chunk needs the buffer. With several micro-batches the host adds them up in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from anyfit.kernels.sums import add, norm, root
from anyfit.values.engine import staging_bytes
from anyfit.values.layout import Slot

from .chunks import ChunkState, ModelState, quietly
from .fixed import fresh
from .gradients import DeviceSums, Gradients, Landings, Norms, StagingBuffer, Views, refuse_sparse, stretches_of
from .lanes import Label, Lanes, Task, Ticket
from .tiers import Tier

Hook = Callable[[Tensor], None]
NOTHING_CHANGES = nullcontext()
Runs = Sequence[tuple[int, int]]  # (start, end) in elements
SMALL_BYTES, SMALL_TOGETHER_BYTES = 2**18, 2**20  # of gradients that are copied in one launch


@dataclass(eq=False)
class ChunkStaging(StagingBuffer):
    state: ChunkState | None = None
    slots: dict[str, Slot] = field(default_factory=dict)  # of parameters whose gradient is in it
    _known: dict[int, tuple[Tensor, Views]] = field(default_factory=dict)
    _small: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (place, gradient), still to be copied
    _small_bytes: int = 0

    def put(self, place: Tensor, gradient: Tensor) -> None:
        """Copies a gradient to its place. On a GPU small ones go together: a launch takes the host longer than their bytes."""
        if gradient.is_cuda and gradient.nbytes < SMALL_BYTES:
            self._small.append((place, gradient))
            self._small_bytes += gradient.nbytes
            if self._small_bytes >= SMALL_TOGETHER_BYTES:
                self.put_small()
        else:
            place.copy_(gradient)

    def put_small(self) -> None:
        """Copies those that wait to be copied together."""
        if self._small:
            torch._foreach_copy_([place for place, _ in self._small], [gradient for _, gradient in self._small])
            self._small, self._small_bytes = [], 0

    def empty(self) -> None:
        self.state, self.slots, self._small, self._small_bytes = None, {}, [], 0

    def filled_by(self, state: ChunkState) -> tuple[Tensor, Views]:
        """The buffer as a chunk's gradients fill it: all of them, and each by name."""
        if state.index not in self._known:
            filled = self.flat[: state.chunk.bytes].view(state.dtype)
            self._known[state.index] = filled, state.views(filled)
        return self._known[state.index]


@dataclass(eq=False)
class HostGradients:
    """What one chunk's gradients come to on the host."""

    flat: Tensor  # as they came, or in fp32 where micro-batches add up
    views: Views  # of it, by name
    stretches: Runs  # that all of them take
    names: set[str] = field(default_factory=set)  # of parameters that have one
    ticket: Ticket | None = None  # of the last that came
    squares: dict[tuple[int, int], float] = field(default_factory=dict)  # sums of them, by stretch, as far as they are known

    def there(self) -> Views:
        """Those that came, for the caller to keep."""
        if len(self.names) == len(self.views):
            return dict(self.views)
        return {name: view for name, view in self.views.items() if name in self.names}

    def add(self, slots: Sequence[Slot], summand: Tensor, *, is_first: bool, threads: int) -> None:
        """To the gradients of these parameters, or in their place, from a buffer with the same offsets."""
        for start, end in stretches_of(slots, apart=1):  # what lies in the padding is nobody's
            squares = add(self.flat[start:end], summand[start:end], is_first=is_first, threads=threads)
            for known in [each for each in self.squares if each[0] < end and start < each[1]]:
                del self.squares[known]
            if squares is not None:
                self.squares[start, end] = squares

    def norm(self, threads: int) -> Tensor:
        """Of all that are there, together."""
        own = self.there()
        if sum(end - start for start, end in self.squares) == sum(each.numel() for each in own.values()):
            return root(math.fsum(self.squares.values()))
        found: Tensor = torch.linalg.vector_norm(torch.stack([norm(each, threads=threads) for each in own.values()]))
        return found


class LocalGradients(Gradients):
    def __init__(self, state: ModelState, lanes: Lanes, host: Tier, accumulation: int, moved: set[str]) -> None:
        super().__init__(state, lanes, accumulation, moved)
        self._host = host
        self._sums: dict[str, DeviceSums] = {}  # by parameter
        self._there: Views = {}  # those on the device, when the step is through
        self._is_last = not self.adds_up  # the backward at hand, after which gradients are final
        self._counted: dict[int, set[str]] = {}  # by chunk, gradients of that backward that are there
        self._norms: dict[str, Tensor] = {}  # of final gradients that have left the device
        self._on_host: dict[int, HostGradients] = {}
        self._pass: int | None = None  # autograd's number of the step's backward that is under way
        self._taken: set[str] = set()  # gradients of this backward that came with their block's
        self._parted: set[str] = set()  # parameters of which another part came after that: autograd adds them up
        self._homes = {slot.name: (chunk, slot) for chunk in state.chunks if chunk.chunk.trainable for slot in chunk.chunk.slots}
        takers: list[tuple[ChunkState, Callable[[ChunkState, Slot], Hook]]] = []
        for chunk in state.chunks:
            if not chunk.chunk.trainable:
                continue
            if chunk.placement.gradients == "host":
                dtype = torch.float32 if self.adds_up else chunk.dtype
                flat = host.zeros(chunk.chunk.elements, dtype, crosses=not self.adds_up)
                self._on_host[chunk.index] = HostGradients(flat, chunk.views(flat), stretches_of(chunk.chunk.slots))
                takers.append((chunk, self._sender))
            elif self.adds_up and chunk.is_split:
                sums = DeviceSums.of(chunk, state.device)
                self._sums |= dict.fromkeys(sums.views, sums)
                self.device_bytes += sums.flat.nbytes
                takers.append((chunk, self._collector))
            elif chunk.placement.speculates:
                takers.append((chunk, self._counter))
        sizes = staging_bytes(state.chunks[index].chunk.bytes for index in self._on_host)
        self._staging = [ChunkStaging(torch.empty(size, dtype=torch.uint8, device=state.device)) for size in sizes]
        self._landings = Landings(lanes, host, max(sizes, default=0), len(sizes) if self.adds_up else 0)
        self.device_bytes += sum(staging.flat.nbytes for staging in self._staging)
        for chunk, taker in takers:
            for slot in chunk.chunk.slots:
                self._hook(slot.name, taker(chunk, slot))

    # ------------------------------------------------------------------ one by one, from autograd

    def _collector(self, state: ChunkState, slot: Slot) -> Hook:
        def collect(parameter: Tensor) -> None:
            with quietly():
                if parameter.grad is None:  # a hook of the user's has taken it
                    return
                refuse_sparse(slot.name, parameter.grad)
                self._heed_part(slot.name)
                self._add(state, {slot.name: parameter.grad})
                parameter.grad = None

        return collect

    def _counter(self, state: ChunkState, slot: Slot) -> Hook:
        def count(parameter: Tensor) -> None:
            with quietly():
                if parameter.grad is None:  # a hook of the user's has taken it
                    return
            self._heed_part(slot.name)
            self._count(state, (slot.name,))

        return count

    def _add(self, state: ChunkState, given: Mapping[str, Tensor]) -> None:
        """Gradients of one chunk, to its sums on the device."""
        self._sums[next(iter(given))].add(given)
        self._moved.update(given)
        if state.placement.speculates:
            self._count(state, given)

    def _count(self, state: ChunkState, names: Iterable[str]) -> None:
        """Gradients of a chunk whose gradients stay on the device are there."""
        if self._is_last and self._completed_by(state, names):
            self.on_complete(state)

    def _completed_by(self, state: ChunkState, names: Iterable[str]) -> bool:
        """Whether these are the last that a chunk waited for in the backward after which they are final."""
        there = self._counted.setdefault(state.index, set())
        before = len(there)
        if not there.isdisjoint(names := set(names)):
            self.on_late(state)
        there |= names
        return before < len(there) == len(state.chunk.slots)

    def _sender(self, state: ChunkState, slot: Slot) -> Hook:
        def send(parameter: Tensor) -> None:
            with quietly(), torch.no_grad() if torch.is_grad_enabled() else NOTHING_CHANGES:
                gradient, parameter.grad = parameter.grad, None
                if gradient is None:  # a hook of the user's has taken it
                    return
                refuse_sparse(slot.name, gradient)
                self._heed_part(slot.name)
                self._stage(state, {slot.name: gradient}, stays=True)

        return send

    # ------------------------------------------------------------------ those of a block

    def begin_backward(self, total: Tensor | None, *, is_last: bool) -> None:
        self._pass, self._taken = None, set()
        self._is_last = is_last or not self.adds_up
        if total is not None and total.grad_fn is not None:
            total.grad_fn.register_prehook(self._note_pass)

    def _note_pass(self, _slopes: Any) -> None:
        self._pass = torch._C._current_graph_task_id()

    def end_backward(self) -> None:
        self._pass = None

    def may_take(self, name: str) -> bool:
        """In the step's own backward, where no hook of the user's waits for it, and it does not come in parts. A backward inside
        of that gives its gradients to whoever began it: a checkpoint, code of the user's, a block that is tried."""
        parameter: Any = self._parameters[name]
        is_awaited = parameter._backward_hooks or len(parameter._post_accumulate_grad_hooks or ()) != (name in self._hooks)
        return self._pass == torch._C._current_graph_task_id() and not is_awaited and name not in self._parted

    def take(self, gradients: Mapping[str, Tensor]) -> None:
        by_chunk: dict[int, dict[str, Tensor]] = {}
        own: dict[str, Tensor] = {}
        self._parted |= self._taken & gradients.keys()  # of a block that is called twice
        self._taken |= gradients.keys()
        with quietly(), torch.no_grad():
            for name, gradient in gradients.items():
                if name in self._sums or self._homes[name][0].index in self._on_host:
                    by_chunk.setdefault(self._homes[name][0].index, {})[name] = gradient
                else:
                    own[name] = gradient
            for index, given in by_chunk.items():
                if index in self._on_host:
                    self._stage(self._state.chunks[index], given, stays=False)
                else:
                    self._add(self._state.chunks[index], given)
            if own:
                self._keep(own)

    def _heed_part(self, name: str) -> None:
        """Autograd has a gradient of it."""
        if name in self._taken:
            self._parted.add(name)

    def _keep(self, given: Mapping[str, Tensor]) -> None:
        """As autograd does: each is its parameter's gradient, or is added to that."""
        first = [name for name in given if self._parameters[name].grad is None]
        for name, gradient in zip(first, fresh([given[name] for name in first]), strict=True):
            self._parameters[name].grad = gradient
        for name in given.keys() - set(first):
            self._parameters[name].grad.add_(given[name])  # type: ignore[union-attr]
        for name in given:
            if name in self._hooks:
                self._count(self._homes[name][0], (name,))

    # ------------------------------------------------------------------ on their way to the host

    def _stage(self, state: ChunkState, given: Mapping[str, Tensor], *, stays: bool) -> None:
        """Puts gradients of a chunk beside the others of it. `stays`: their memory is not written over."""
        self._moved.update(given)
        if not self.adds_up:
            late = self._on_host[state.index].names.intersection(given)
            for name in late:
                self._add_late(state, name, given[name])
            given = {name: gradient for name, gradient in given.items() if name not in late} if late else given
            if not given:
                return
        staging = self._staging_for(state)
        if self.adds_up and not staging.slots.keys().isdisjoint(given):  # of the micro-batch before, whose chunk was not complete
            self._go_down(staging)
            staging = self._staging_for(state)
        completes = self.adds_up and self._is_last and self._completed_by(state, given)
        views, more = staging.filled_by(state)[1], staging.slots.keys() & given.keys()
        if more:
            staging.put_small()
            torch._foreach_add_([views[name] for name in more], [given[name] for name in more])
        new = [name for name in given if name not in more]
        if stays:
            for name in new:
                staging.put(views[name], given[name])
        elif new:
            torch._foreach_copy_([views[name] for name in new], [given[name] for name in new])
        staging.slots.update((name, self._homes[name][1]) for name in new)
        if completes or (new and len(staging.slots) == len(state.chunk.slots)):
            self._go_down(staging)
        if completes:
            self.on_complete(state)

    def _add_late(self, state: ChunkState, name: str, gradient: Tensor) -> None:
        """Where reentrant checkpoints share a parameter, backward gives it a second gradient: added to the one that has left."""
        self.on_late(state)
        home = self._on_host[state.index]
        if home.ticket is not None:
            home.ticket.wait()
        total = home.views[name]
        total.add_(gradient.to(total.device))
        on_cpu = self._state.device.type == "cpu"
        self._norms |= _norms({name: total}) if on_cpu else {name: norm(total, threads=self._threads)}

    def _staging_for(self, state: ChunkState) -> ChunkStaging:
        for staging in self._staging:
            if staging.state is state:
                return staging
        large = [each for each in self._staging if each.flat.nbytes >= state.chunk.bytes]
        free = (each for each in large if each.state is None)
        staging = min(free, key=lambda each: each.flat.nbytes, default=large[0])
        if staging.state is not None:  # the one that has waited longest for its chunk's other gradients
            self._go_down(staging)
        self._staging.remove(staging)
        self._staging.append(staging)
        self._lanes.hold_computation(staging.ticket)
        staging.state, staging.ticket = state, None
        return staging

    def _go_down(self, staging: ChunkStaging) -> None:
        state, slots = staging.state, list(staging.slots.values())
        assert state is not None
        staging.put_small()
        staging.empty()
        home = self._on_host[state.index]
        filled, views = staging.filled_by(state)
        stretches = home.stretches if len(slots) == len(home.views) else stretches_of(slots)
        if self.adds_up:
            staging.ticket = self._add_up(home, state, slots, filled, stretches)
            return
        self._norms |= _norms({slot.name: views[slot.name] for slot in slots})
        after = (self._lanes.so_far(), state.update.fresh, state.update.moments)
        home.ticket = staging.ticket = self._host.write(home.flat, filled, after, Label(Task.GRADIENTS, state.index), stretches)
        home.names.update(slot.name for slot in slots)
        if len(home.names) == len(state.chunk.slots):
            self.on_complete(state)

    def _add_up(self, home: HostGradients, state: ChunkState, slots: Sequence[Slot], filled: Tensor, stretches: Runs) -> Ticket:
        known = set(home.names)

        def add(summand: Tensor) -> None:
            for is_first in (True, False):
                now = [slot for slot in slots if (slot.name not in known) == is_first]
                home.add(now, summand, is_first=is_first, threads=self._threads)

        after = (self._lanes.so_far(), state.update.fresh)
        down, home.ticket = self._landings.add_up(state, filled, stretches, add, after, (home.ticket,))
        home.names.update(slot.name for slot in slots)
        return down

    def finish(self) -> Norms:
        """By parameter; of gradients that a GPU's host has added up, by chunk, in the place of its first."""
        for staging in self._staging:
            if staging.state is not None:
                self._go_down(staging)
        self._state.refuse_thawed()
        self._there = self._on_device(self._parameters)
        norms = self._norms | _norms(self._there)
        if self.adds_up:
            norms |= self._finish_sums()
        return Norms([norms[name] for name in self._parameters if name in norms])

    def _finish_sums(self) -> dict[str, Tensor]:
        on_cpu = self._state.device.type == "cpu"  # has torch's bits, which are those of the same model in plain PyTorch

        def finish(home: HostGradients) -> dict[str, Tensor]:
            if home.ticket is not None:
                home.ticket.wait()
            own = home.there()
            return {} if on_cpu or not own else {next(iter(own)): home.norm(self._threads)}

        found: dict[str, Tensor] = {}
        with ThreadPoolExecutor(self._threads, "anyfit gradients") as pool:
            for home, together in zip(self._on_host.values(), pool.map(finish, self._on_host.values()), strict=True):
                found |= _norms(home.there()) if on_cpu else together
        return found

    def _on_device(self, names: Iterable[str]) -> Views:
        """Of these parameters, where they have one: the sum of several micro-batches, or autograd's own."""
        with quietly():
            own = {name: each for name in names if (each := self._parameters[name].grad) is not None}
        sums = {name: self._sums[name].get(name) for name in names if name in self._sums}
        return own | {name: total for name, total in sums.items() if total is not None}

    def of(self, state: ChunkState) -> tuple[dict[str, Tensor], Ticket | None]:
        home = self._on_host.get(state.index)
        if home is not None:
            return home.there(), home.ticket
        names = [slot.name for slot in state.chunk.slots]
        if not self._there:  # the step goes on
            return self._on_device(names), None
        return {name: self._there[name] for name in names if name in self._there}, None

    def flat(self, state: ChunkState) -> Tensor | None:
        home = self._on_host.get(state.index) or self._sums.get(state.chunk.slots[0].name)
        return None if home is None else home.flat

    def clear(self) -> None:
        self._there, self._pass, self._is_last = {}, None, not self.adds_up
        for sums in self._sums.values():
            sums.names.clear()
        self._counted.clear()
        self._norms.clear()
        for staging in self._staging:
            staging.empty()
        for home in self._on_host.values():
            home.names.clear()
            home.squares.clear()
        super().clear()


def _norms(gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not gradients:
        return {}
    norms = torch._foreach_norm([_plain(each) for each in gradients.values()], 2, dtype=torch.float32)
    return dict(zip(gradients, norms, strict=True))


def _plain(gradient: Tensor) -> Tensor:
    """Real numbers with the same norm: of a sparse gradient those that there are, of complex ones their parts."""
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
