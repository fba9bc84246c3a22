"""What the optimizer knows of one chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from anyfit.values.layout import Slot

from ..kernels.split import Masters
from .chunks import ChunkState, ChunkUpdate
from .disk import Stored
from .lanes import Ticket
from .tiers import Scratch, Tier

Entries = dict[str, dict[str, Any]]  # by parameter, as in `optimizer.state`
Views = dict[str, Tensor]  # of flat buffers, by name


class OptimizerState:
    """Flat moments in the optimizer's tier, and by parameter what is not an array of its shape."""

    def __init__(self, state: ChunkState) -> None:
        self.state = state
        self.moments: dict[str, Tensor] = {}
        self.rest: Entries = {}  # also says which parameters have been stepped before
        self.second: Second | None = None
        self.live: Entries = {}  # entries of a resident chunk, whose arrays never move

    @property
    def update(self) -> ChunkUpdate:
        return self.state.update

    def upload(self) -> None:
        """Fresh weights to the device."""
        on_device, source = self.fresh_weights()
        on_device.copy_(source, non_blocking=True)

    def fresh_weights(self) -> tuple[Tensor, Tensor]:
        """Where they live on the device, and where they come from: the host's copy, or, of a streamed update, the generation that
        was taken over."""
        source, on_device = self.state.on_host, self.state.own_on_device
        if source is None:
            assert self.second is not None
            source = self.second.weights
        assert on_device is not None
        return on_device, source

    def zeros(self, _key: str = "") -> Tensor:
        """A buffer for one more moment."""
        return self.state.optimizer_zeros(torch.float32)

    def flat(self, key: str) -> Tensor:
        """Of a moment, to be changed; one on the disk is at hand."""
        return self.moments[key] if self.state.disk is None else self.state.disk.at_hand(key)

    def clear_moments(self) -> None:
        """All are zero."""
        if self.state.disk is not None:
            self.state.disk.forget(list(self.moments))
            return
        for flat in self.moments.values():
            flat.zero_()

    def moments_here(self) -> Views:
        """To be read; those on the disk, as copies in memory."""
        disk = self.state.disk
        return self.moments if disk is None else {key: disk.read_part(key) for key in self.moments}

    def entries(self, moments: Mapping[str, Tensor], names: Iterable[str], *, cloned: bool = True) -> Entries:
        """What the optimizer knows of each parameter, with moments from these flat buffers; empty before its first step."""
        slots = {slot.name: slot for slot in self.own_slots}

        def known(name: str, key: str, value: Any) -> Any:
            if isinstance(value, Flat):
                return self.state.view(moments[key], slots[name])
            return value.clone() if cloned and isinstance(value, Tensor) else value

        return {name: {key: known(name, key, each) for key, each in self.rest.get(name, {}).items()} for name in names}

    def arrays(self) -> Iterator[tuple[Slot, str, Tensor]]:
        """What is kept for each element of a parameter, by parameter and key, and what else is no single number."""
        for slot in self.own_slots:
            for key, value in self.rest.get(slot.name, {}).items():
                if _is_array(value):
                    yield slot, key, self.state.view(self.moments[key], slot) if isinstance(value, Flat) else value

    def scalars(self) -> Entries:
        """The rest: step counts, and what is not a tensor."""
        return {name: {key: each for key, each in entry.items() if not _is_array(each)} for name, entry in self.rest.items()}

    @property
    def own_slots(self) -> tuple[Slot, ...]:
        return self.state.own.slots

    def keep(
        self, made: Mapping[str, Mapping[str, Any]], moments: Views | None = None, zeros: Callable[[str], Tensor] | None = None
    ) -> None:
        """Takes over what a step left: arrays of a parameter's shape into the flat buffers, its own or those that are given; the
        rest as it is. What only some parameters have (Adafactor keeps rows and columns of others) gets no flat buffer."""
        flat_of = self.flat if moments is None else moments.__getitem__
        moments, zeros = self.moments if moments is None else moments, zeros or self.zeros
        slots = {slot.name: slot for slot in self.own_slots}
        common = set(moments).union(set.intersection(*map(set, made.values())) if made else ())
        for name, entry in made.items():
            rest, slot = dict(entry), slots[name]
            for key, value in entry.items():
                is_like = isinstance(value, Tensor) and value.dim() > 0 and value.shape == slot.shape
                if key in common and is_like and value.dtype == torch.float32:
                    if key not in moments:
                        moments[key] = zeros(key)
                    home = self.state.view(flat_of(key), slot)
                    if home.data_ptr() != value.data_ptr():
                        home.copy_(value)
                    rest[key] = Flat()
            self.rest[name] = rest

    @property
    def tensors(self) -> list[Tensor]:
        others = [item for rest in self.rest.values() for item in rest.values() if isinstance(item, Tensor) and item.dim()]
        return [*self.moments.values(), *others]


class Flat:
    """Stands for an array that lies in a flat buffer."""


def _is_array(value: Any) -> bool:
    return isinstance(value, Flat) or (isinstance(value, Tensor) and value.dim() > 0)


class Generation(Protocol):
    """A chunk's state, in buffers on the host: what it is before an update, or is made by one."""

    weights: Tensor
    low: Tensor  # halves of the masters, where there are any
    moments: dict[str, Tensor]
    made: Entries  # what is then known of its parameters

    def zeros(self, key: str, /) -> Tensor:
        """A buffer for one more moment."""


@dataclass(eq=False)
class Load:
    """A chunk on its way to a streamed update and back."""

    gradients: dict[str, Tensor]
    second: Generation | None  # where it goes to, if not home
    source: Generation | None = None  # where low halves and moments come from, if not from home
    carrier: Scratch | None = None  # on the device
    is_ahead: bool = False  # it is lifted, and nothing more was begun
    weights: Tensor | None = None  # before the step, and then after it
    flat: Tensor | None = None  # the gradients, where they lie in one
    moments: dict[str, Tensor] = field(default_factory=dict)
    rest: Entries = field(default_factory=dict)
    ticket: Ticket | None = None  # of the last that was asked of it
    is_wanted: Callable[[], bool] = lambda: True  # else nothing more is done with it


class Second:
    """The second generation of a chunk's state, on the host: what it will be if nothing is clipped. It has weights too, also of
    chunks whose weights live on the device: backward still reads the old ones. What lies on the disk has it there."""

    def __init__(self, state: ChunkState, host: Tier) -> None:
        self._state, elements = state, state.own.elements
        self.weights = host.zeros(elements, state.dtype)
        self.low = state.optimizer_zeros(torch.int16, elements=elements if state.is_split else 0)
        self.moments: dict[str, Tensor] = {}
        self.made: Entries = {}
        self.stored: dict[str, Stored] = {}  # low halves and moments, of a chunk whose state lies on the disk
        self.may_be_read = False  # it was the state when somebody began to read that

    def zeros(self, _key: str, /) -> Tensor:
        return self._state.optimizer_zeros(torch.float32)

    @property
    def masters(self) -> Masters:
        return Masters(self.weights, self.low if self._state.is_split else None)
