"""Gradients of one step: one flow, from autograd to where the update finds them.

    collect   autograd's own gradient is used as it is, or a hook takes it as soon as it is complete
    stage     gradients of a chunk are put side by side in a staging buffer on the device
    reduce    ranks reduce-scatter them (reduction.py); a rank alone has them already (local_gradients.py)
    land      they are copied to the tier that the chunk's placement says, on the host in one copy
    sum       those of several micro-batches add up in fp32, on the device or on the host

A parameter counts when its gradient came; which ones a step uses may change from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from anyfit.values.layout import ALIGN_ELEMENTS, Slot
from anyfit.values.machine import update_threads

from .chunks import ChunkState, ModelState, quietly
from .lanes import Label, Lanes, Task, Ticket
from .tiers import After, Ranges, Tier

Views = dict[str, Tensor]  # made once: a step has many, and each costs the thread that launches


@dataclass(frozen=True, eq=False)
class Norms:
    """How large this rank's gradients are, by part: a parameter, in the model's order, or a chunk."""

    parts: Sequence[Tensor]
    shares: Sequence[float] = ()  # of each part, where several ranks have the same

    def together(self, device: torch.device) -> Tensor:
        """The norm of all, as torch's clip_grad_norm_ combines it."""
        parts = [each if each.device == device else each.to(device, non_blocking=True) for each in self.parts]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(parts))
        return norm

    def squares(self, device: torch.device) -> Tensor:
        """The sum of squares of this rank's share: those of all ranks add up to the whole."""
        pairs = zip(self.parts, self.shares, strict=True)
        found = [part.to(device, torch.float64).square() * share for part, share in pairs]
        return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64, device=device)


@dataclass(eq=False)
class StagingBuffer:
    flat: Tensor  # bytes, on the device, of a whole chunk
    ticket: Ticket | None = None  # of the last that used it


@dataclass(eq=False)
class DeviceSums:
    """What the gradients of one chunk come to over micro-batches, in fp32 beside the chunk."""

    flat: Tensor
    views: Views
    names: set[str] = field(default_factory=set)  # of parameters that have one

    @classmethod
    def of(cls, state: ChunkState, device: torch.device) -> DeviceSums:
        flat = torch.zeros(state.chunk.elements, dtype=torch.float32, device=device)
        return cls(flat, state.views(flat))

    def add(self, given: Mapping[str, Tensor]) -> None:
        for add, names in ((torch._foreach_add_, self.names & given.keys()), (torch._foreach_copy_, given.keys() - self.names)):
            if names:
                add([self.views[name] for name in names], [given[name] for name in names])
        self.names.update(given)

    def get(self, name: str) -> Tensor | None:
        return self.views[name] if name in self.names else None


class Landings:
    """Pinned buffers that summands are copied to before the host adds them up."""

    def __init__(self, lanes: Lanes, host: Tier, size: int, count: int) -> None:
        self._lanes, self._host = lanes, host
        zeros = (host.zeros(size, torch.uint8) for _ in range(count))
        self._buffers: list[tuple[Tensor, Ticket | None]] = [(each, None) for each in zeros]

    def add_up(
        self, state: ChunkState, staged: Tensor, stretches: Ranges, add: Callable[[Tensor], None], after: After, last: After
    ) -> tuple[Ticket, Ticket]:
        """Copies these stretches to the host, after the tickets `after`, and adds them up, after `last`; the tickets of both."""
        buffer, taken = self._buffers.pop(0)
        summand = buffer[: staged.nbytes].view(staged.dtype)
        down = self._host.write(summand, staged, (*after, taken), Label(Task.GRADIENTS, state.index), stretches)
        added = self._lanes.host.run(lambda: add(summand), (down, *last, state.update.moments), Label(Task.ADD, state.index))
        self._buffers.append((buffer, added))
        return down, added


class Gradients:
    """`on_complete` is told of a chunk whose gradients are all there, or on their way to the host, while backward still runs;
    `on_late`, that one of them changes after all. `moved` gets the names of those that have left autograd."""

    def __init__(self, state: ModelState, lanes: Lanes, accumulation: int, moved: set[str]) -> None:
        self._state, self._lanes, self._parameters = state, lanes, state.parameters
        self.adds_up = accumulation > 1  # over micro-batches
        self._threads = update_threads(torch.get_num_threads())
        self._moved = moved
        self.on_complete: Callable[[ChunkState], None] = lambda _state: None
        self.on_late: Callable[[ChunkState], None] = lambda _state: None
        self.device_bytes = 0
        self._hooks: dict[str, RemovableHandle] = {}
        self._names = {id(each): name for name, each in self._parameters.items()}

    def _hook(self, name: str, take: Callable[[Tensor], None]) -> None:
        """To be called when all memory is there: where it is not, the parameters are as they were."""
        self._hooks[name] = self._parameters[name].register_post_accumulate_grad_hook(take)

    def close(self) -> None:
        """Gradients are autograd's again."""
        while self._hooks:
            self._hooks.popitem()[1].remove()

    def name_of(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]

    def may_take(self, name: str) -> bool:
        """Whether `take` may be given the gradient of this parameter, past autograd."""
        return False

    def take(self, gradients: Mapping[str, Tensor]) -> None:
        """Those of a block, all at once. Nobody reads them later: their memory is written over."""
        raise NotImplementedError

    def begin_backward(self, total: Tensor | None, *, is_last: bool) -> None:
        """Of one micro-batch, from this loss where it is one: whether it is the step's last, in which gradients become final."""

    def end_backward(self) -> None:
        """Of one micro-batch: what was not complete goes on too."""

    def sum_over_places(self) -> None:
        """After the last backward of a step: over the places of a pipeline that hold a parameter together."""

    def finish(self) -> Norms:
        """Every gradient of the step is where it belongs, or on its way."""
        raise NotImplementedError

    def missing(self) -> list[str]:
        """Trainable parameters without a gradient on this rank, where others may have one."""
        return []

    def count_out(self) -> None:
        """This rank's gradients are zeros that stand for none."""

    def count_in(self, names: Sequence[str]) -> None:
        """These have a gradient on another rank. An update that began without them does not count."""

    def of(self, state: ChunkState) -> tuple[dict[str, Tensor], Ticket | None]:
        """This rank's part of a chunk's gradients by name, in the tier its placement says; the ticket of what is on its way."""
        raise NotImplementedError

    def flat(self, state: ChunkState) -> Tensor | None:
        """The buffer that holds these at the chunk's offsets, where autograd's own are not used as they are."""
        raise NotImplementedError

    def clear(self) -> None:
        """Forgets the step's gradients. Those that an update still works with are kept by it."""
        self._moved.clear()
        with quietly():
            for parameter in self._parameters.values():
                parameter.grad = None


def stretches_of(slots: Sequence[Slot], apart: int = ALIGN_ELEMENTS) -> list[tuple[int, int]]:
    """(start, end) of runs of neighbouring parameters: one copy each, with the padding between them if less than `apart`."""
    found: list[list[int]] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if not found or slot.offset - found[-1][1] >= apart:
            found.append([slot.offset, slot.offset])
        found[-1][1] = slot.offset + slot.elements
    return [(start, end) for start, end in found]


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """Where gradients are gathered in flat buffers."""
    if gradient.layout != torch.strided:
        raise RuntimeError(
            f"{name} has a sparse gradient, and this plan gathers the gradients of its chunk; build its layer with sparse=False, "
            "or use a plan with all state on the device and one micro-batch"
        )


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """What scales gradients of this norm down to `clip_norm`, never up (torch's clip_grad_norm_, to the bit)."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
