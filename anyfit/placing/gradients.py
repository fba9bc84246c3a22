"""Gradients of one step: where they add up over micro-batches, how large they are, and whether they are finite.

On the device: with one micro-batch autograd's own gradient is used as it is. With several, fp32 gradients add up where autograd
put them; bf16 ones are added in fp32 to a buffer beside the chunk as soon as each is complete, and freed.

On the host: gradients of a chunk are gathered in a staging buffer on the device, which goes down in one copy when all are
there, or when another chunk needs the buffer. With several micro-batches the host adds them up in fp32. A parameter counts when
its gradient came; which ones a step uses may change from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from anyfit.kernels.sums import add, norm, root
from anyfit.values.engine import GRADIENT_STAGES
from anyfit.values.layout import ALIGN_ELEMENTS, Slot
from anyfit.values.machine import update_threads

from .chunks import ChunkState, ModelState, quietly
from .lanes import Lanes, Ticket
from .tiers import HostSlabs

Views = dict[str, Tensor]  # made once: a step has many, and each costs the thread that launches


@dataclass(eq=False)
class Stage:
    flat: Tensor  # bytes, on the device
    state: ChunkState | None = None
    slots: dict[str, Slot] = field(default_factory=dict)  # of parameters whose gradient is in it
    ticket: Ticket | None = None  # of the copy that empties it
    _known: dict[int, tuple[Tensor, Views]] = field(default_factory=dict)

    def filled_by(self, state: ChunkState) -> tuple[Tensor, Views]:
        """The buffer as a chunk's gradients fill it: all of them, and each by name."""
        if state.index not in self._known:
            filled = self.flat[: state.chunk.bytes].view(state.dtype)
            self._known[state.index] = filled, views_of(state, filled)
        return self._known[state.index]


@dataclass(eq=False)
class HostGradients:
    """What one chunk's gradients come to on the host."""

    flat: Tensor  # as they came, or in fp32 where micro-batches add up
    views: Views  # of it, by name
    stretches: tuple[tuple[int, int], ...]  # that all of them take
    names: set[str] = field(default_factory=set)  # of parameters that have one
    ticket: Ticket | None = None  # of the last that came
    squares: dict[tuple[int, int], float] = field(default_factory=dict)  # sums of them, by stretch, as far as they are known

    def add(self, slots: Sequence[Slot], summand: Tensor, *, is_first: bool, threads: int) -> None:
        """To the gradients of these parameters, or in their place, from a buffer with the same offsets."""
        for start, end in _stretches(slots, apart=1):  # what lies in the padding is nobody's
            squares = add(self.flat[start:end], summand[start:end], is_first=is_first, threads=threads)
            for known in [each for each in self.squares if each[0] < end and start < each[1]]:
                del self.squares[known]
            if squares is not None:
                self.squares[start, end] = squares

    def norm(self, threads: int) -> Tensor:
        """Of all that are there, together."""
        own = _there(self)
        if sum(end - start for start, end in self.squares) == sum(each.numel() for each in own.values()):
            return root(math.fsum(self.squares.values()))
        vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm
        return vector_norm(torch.stack([norm(each, threads=threads) for each in own.values()]))


class Gradients:
    """`on_complete` is told of a chunk whose gradients are all there, or on their way to the host, while backward still runs;
    `on_late`, that one of them changes after all."""

    def __init__(self, state: ModelState, lanes: Lanes, slabs: HostSlabs, accumulation: int, moved: set[str]) -> None:
        self._state, self._lanes, self._parameters = state, lanes, state.parameters
        self.adds_up = accumulation > 1  # over micro-batches
        self._threads = update_threads(torch.get_num_threads())
        self._moved = moved
        self.on_complete: Callable[[ChunkState], None] = lambda _state: None
        self.on_late: Callable[[ChunkState], None] = lambda _state: None
        self._sums: dict[str, Tensor] = {}  # fp32, views of flat buffers on the device
        self._flat_sums: dict[int, Tensor] = {}  # these, by chunk
        self._filled: set[str] = set()
        self._counted: dict[int, set[str]] = {}  # by chunk that speculates, gradients that are there
        self._norms: dict[str, Tensor] = {}  # of final gradients that have left the device
        self._on_host: dict[int, HostGradients] = {}
        self._hooks: list[RemovableHandle] = []
        self._wanted: list[tuple[str, Callable[[Tensor], None]]] = []
        self.device_bytes = 0
        for each in state.chunks:
            if not each.chunk.trainable:
                continue
            if each.placement.gradients == "host":
                dtype = torch.float32 if self.adds_up else each.dtype
                flat = slabs.zeros(each.chunk.elements, dtype, crosses=not self.adds_up)
                self._on_host[each.index] = HostGradients(flat, views_of(each, flat), tuple(_stretches(each.chunk.slots)))
                for slot in each.chunk.slots:
                    self._hook(slot.name, self._sender(each, slot))
            elif self.adds_up and each.is_split:
                self._accumulate(each)
            elif each.placement.speculates and not self.adds_up:
                for slot in each.chunk.slots:
                    self._hook(slot.name, self._counter(each, slot.name))
        largest = max((state.chunks[index].chunk.bytes for index in self._on_host), default=0)
        count = min(GRADIENT_STAGES, len(self._on_host))
        self._stages = [Stage(torch.empty(largest, dtype=torch.uint8, device=state.device)) for _ in range(count)]
        self._landings: list[tuple[Tensor, Ticket | None]] = []  # where summands come down to
        if self.adds_up:
            self._landings = [(slabs.zeros(largest, torch.uint8, crosses=True), None) for _ in range(count)]
        self.device_bytes += sum(stage.flat.nbytes for stage in self._stages)
        while self._wanted:  # when all memory is there: where it is not, the parameters are as they were
            name, hook = self._wanted.pop(0)
            self._hooks.append(self._parameters[name].register_post_accumulate_grad_hook(hook))

    def _hook(self, name: str, hook: Callable[[Tensor], None]) -> None:
        self._wanted.append((name, hook))

    def close(self) -> None:
        """Gradients are autograd's again."""
        while self._hooks:
            self._hooks.pop().remove()

    # ------------------------------------------------------------------ on the device

    def _accumulate(self, state: ChunkState) -> None:
        flat = torch.zeros(state.chunk.elements, dtype=torch.float32, device=self._state.device)
        self.device_bytes += flat.nbytes
        self._flat_sums[state.index] = flat
        for slot in state.chunk.slots:
            self._sums[slot.name] = state.view(flat, slot)
            self._hook(slot.name, self._collector(slot.name))

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            with quietly():
                if parameter.grad is None:  # a hook of the user's has taken it
                    return
                refuse_sparse(name, parameter.grad)
                if name in self._filled:
                    self._sums[name].add_(parameter.grad)
                else:
                    self._sums[name].copy_(parameter.grad)
                    self._filled.add(name)
                parameter.grad = None
                self._moved.add(name)

        return collect

    def _counter(self, state: ChunkState, name: str) -> Callable[[Tensor], None]:
        """Counts the gradients of a chunk that stay on the device."""

        def count(parameter: Tensor) -> None:
            with quietly():
                if parameter.grad is None:  # a hook of the user's has taken it
                    return
            there = self._counted.setdefault(state.index, set())
            if name in there:
                self.on_late(state)
                return
            there.add(name)
            if len(there) == len(state.chunk.slots):
                self.on_complete(state)

        return count

    # ------------------------------------------------------------------ on the way to the host

    def _sender(self, state: ChunkState, slot: Slot) -> Callable[[Tensor], None]:
        def send(parameter: Tensor) -> None:
            with quietly(), torch.no_grad():
                gradient, parameter.grad = parameter.grad, None
                if gradient is None:  # a hook of the user's has taken it
                    return
                refuse_sparse(slot.name, gradient)
                self._moved.add(slot.name)
                if not self.adds_up and slot.name in self._on_host[state.index].names:
                    self._add_late(state, slot, gradient)
                    return
                stage = self._stage_for(state)
                if slot.name in stage.slots and self.adds_up:  # of the micro-batch before, in which the chunk was not complete
                    self._go_down(stage)
                    stage = self._stage_for(state)
                staged = stage.filled_by(state)[1][slot.name]
                if slot.name in stage.slots:
                    staged.add_(gradient)
                    return
                staged.copy_(gradient)
                stage.slots[slot.name] = slot
                if len(stage.slots) == len(state.chunk.slots):
                    self._go_down(stage)

        return send

    def _add_late(self, state: ChunkState, slot: Slot, gradient: Tensor) -> None:
        """Backward may give a parameter a gradient more than once: where reentrant checkpoints share it. It is added to the
        one that has already left."""
        self.on_late(state)
        home = self._on_host[state.index]
        if home.ticket is not None:
            home.ticket.wait()
        total = home.views[slot.name]
        total.add_(gradient.to(total.device))
        on_cpu = self._state.device.type == "cpu"
        self._norms |= _norms({slot.name: total}) if on_cpu else {slot.name: norm(total, threads=self._threads)}

    def _stage_for(self, state: ChunkState) -> Stage:
        for stage in self._stages:
            if stage.state is state:
                return stage
        stage = next((each for each in self._stages if each.state is None), self._stages[0])
        if stage.state is not None:  # the one that has waited longest for its chunk's other gradients
            self._go_down(stage)
        self._stages.remove(stage)
        self._stages.append(stage)
        self._lanes.hold_computation(stage.ticket)
        stage.state, stage.ticket = state, None
        return stage

    def _go_down(self, stage: Stage) -> None:
        state, slots = stage.state, list(stage.slots.values())
        assert state is not None
        stage.state, stage.slots = None, {}
        home = self._on_host[state.index]
        filled, views = stage.filled_by(state)
        if self.adds_up:
            stage.ticket = self._land(home, state, slots, filled)
            return
        flat = home.flat
        self._norms |= _norms({slot.name: views[slot.name] for slot in slots})

        stretches = home.stretches if len(slots) == len(home.views) else tuple(_stretches(slots))

        def copy() -> None:
            for start, end in stretches:
                flat[start:end].copy_(filled[start:end], non_blocking=True)

        label, after = f"gradients of chunk {state.index}", (self._lanes.so_far(), state.fresh, state.left)
        home.ticket = stage.ticket = self._lanes.down.run(copy, after, label)
        home.names.update(slot.name for slot in slots)
        if len(home.names) == len(state.chunk.slots):
            self.on_complete(state)

    def _land(self, home: HostGradients, state: ChunkState, slots: Sequence[Slot], filled: Tensor) -> Ticket:
        landing, taken = self._landings.pop(0)
        summand = landing[: state.chunk.bytes].view(state.dtype)

        def copy() -> None:
            for start, end in _stretches(slots):
                summand[start:end].copy_(filled[start:end], non_blocking=True)

        label, after = f"gradients of chunk {state.index}", (self._lanes.so_far(), taken, state.fresh)
        down = self._lanes.down.run(copy, after, label)
        known = set(home.names)

        def add_up() -> None:
            for is_first in (True, False):
                now = [slot for slot in slots if (slot.name not in known) == is_first]
                home.add(now, summand, is_first=is_first, threads=self._threads)

        home.ticket = self._lanes.host.run(add_up, after=(down, home.ticket, state.left), label=f"add {label}")
        self._landings.append((landing, home.ticket))
        home.names.update(slot.name for slot in slots)
        return down

    # ------------------------------------------------------------------ at the end of a step

    def finish(self) -> dict[str, Tensor]:
        """Every gradient of the step is where it belongs; by name, in the model's order, the norm of each, or of a chunk's under
        the name of its first. Parameters without a gradient are not there."""
        for stage in self._stages:
            if stage.state is not None:
                self._go_down(stage)
        on_device = self._of_device()
        norms = self._norms | _norms(on_device)
        if self.adds_up:
            norms |= self._finish_sums()
        return {name: norms[name] for name in self._parameters if name in norms}

    def _finish_sums(self) -> dict[str, Tensor]:
        on_cpu = self._state.device.type == "cpu"  # has torch's bits, which are those of the same model in plain PyTorch

        def finish(home: HostGradients) -> dict[str, Tensor]:
            if home.ticket is not None:
                home.ticket.wait()
            own = _there(home)
            return {} if on_cpu or not own else {next(iter(own)): home.norm(self._threads)}

        found: dict[str, Tensor] = {}
        with ThreadPoolExecutor(self._threads, "anyfit gradients") as pool:
            for home, together in zip(self._on_host.values(), pool.map(finish, self._on_host.values()), strict=True):
                found |= _norms(_there(home)) if on_cpu else together
        return found

    def _of_device(self) -> dict[str, Tensor]:
        found = {}
        self._state.refuse_thawed()
        with quietly():
            for name, parameter in self._parameters.items():
                if name in self._filled:
                    found[name] = self._sums[name]
                elif parameter.grad is not None:
                    found[name] = parameter.grad
        return found

    def of(self, state: ChunkState) -> tuple[dict[str, Tensor], Ticket | None]:
        """A chunk's gradients by name, in the tier its placement says, and the ticket of what is still on its way."""
        home = self._on_host.get(state.index)
        if home is not None:
            return _there(home), home.ticket
        own = {}
        with quietly():
            for slot in state.chunk.slots:
                gradient = self._sums[slot.name] if slot.name in self._filled else self._parameters[slot.name].grad
                if gradient is not None:
                    own[slot.name] = gradient
        return own, None

    def flat(self, state: ChunkState) -> Tensor | None:
        """The buffer that holds a chunk's gradients at its offsets, where autograd's own are not used as they are."""
        home = self._on_host.get(state.index)
        return self._flat_sums.get(state.index) if home is None else home.flat

    def clear(self) -> None:
        """Forgets the step's gradients. Those that an update still works with are kept by it."""
        self._filled.clear()
        self._counted.clear()
        self._norms.clear()
        self._moved.clear()
        for stage in self._stages:
            stage.state, stage.slots = None, {}
        for home in self._on_host.values():
            home.names.clear()
            home.squares.clear()
        with quietly():
            for parameter in self._parameters.values():
                parameter.grad = None


def views_of(state: ChunkState, flat: Tensor) -> Views:
    return {slot.name: state.view(flat, slot) for slot in state.chunk.slots}


def _there(home: HostGradients) -> Views:
    """Those that came, for the caller to keep."""
    if len(home.names) == len(home.views):
        return dict(home.views)
    return {name: view for name, view in home.views.items() if name in home.names}


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


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """Where gradients are gathered in flat buffers."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"{name} has a sparse gradient, and this plan gathers the gradients of its chunk; build its layer with sparse=False, "
            "or use a plan with all state on the device and one micro-batch"
        )


def _stretches(slots: Sequence[Slot], apart: int = ALIGN_ELEMENTS) -> Iterator[tuple[int, int]]:
    """(start, end) of runs of neighbouring parameters: one copy each. The padding between them, if less than `apart`, goes
    along."""
    ordered = sorted(slots, key=lambda slot: slot.offset)
    start = end = None
    for slot in ordered:
        if end is not None and start is not None and slot.offset - end >= apart:  # more than padding lies between
            yield start, end
            start = None
        if start is None:
            start = slot.offset
        end = slot.offset + slot.elements
    if start is not None and end is not None:
        yield start, end


def total_norm(norms: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """The norm of all gradients together: of the norms of each, in order, as torch's clip_grad_norm_ combines them."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack([each.to(device, non_blocking=True) for each in norms.values()]))
    return norm


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """What scales gradients of this norm down to `clip_norm`, never up (torch's clip_grad_norm_, to the bit)."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
