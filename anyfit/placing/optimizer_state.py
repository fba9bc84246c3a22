"""One chunk that the optimizer updates: what it knows of the chunk's parameters, and how far the update under way is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from anyfit.values.layout import Slot

from .chunks import ChunkState
from .lanes import Ticket
from .masters import Masters
from .tiers import HostSlabs, Scratch

Entries = dict[str, dict[str, Any]]  # by parameter, as in `optimizer.state`


class Phase(Enum):
    """How far the update of a chunk is. docs/architecture.md draws the way from one to the next."""

    SETTLED = auto()  # weights and moments are those of the last step; gradients are waited for, and their norm
    LIFTED = auto()  # streamed: its state is on the device, or on its way there, and the norm is not known
    SPECULATED = auto()  # updated into its second generation, as if nothing were clipped, and the norm is not known
    BEGUN = auto()  # resident: the GPU updates it, if the norm is a number, which the host does not know
    UPDATING = auto()  # its weights are old ones until the ticket `fresh`
    FAILED = auto()  # its update raised an error; whoever asks for the chunk next starts it again
    FINISHING = auto()  # two-phase: its weights are fresh, and its moments are still to come


class OptimizerState:
    """Flat moments in the optimizer's tier, and by parameter what is not an array of its shape."""

    def __init__(self, state: ChunkState) -> None:
        self.state = state
        self.moments: dict[str, Tensor] = {}
        self.rest: Entries = {}  # also says which parameters have been stepped before
        self.second: Second | None = None
        self.home: Ticket | None = None  # of the last update of a state that is on the host
        self.live: Entries = {}  # entries of a resident chunk, whose arrays never move
        self.lifted: Load | None = None
        self.begun: Entries | None = None  # what will be known of its parameters, if the norm is a number

    @property
    def phase(self) -> Phase:
        if self.begun is not None:
            return Phase.BEGUN
        if self.second is not None and self.second.ticket is not None:
            return Phase.SPECULATED
        if self.lifted is not None:
            return Phase.LIFTED
        if self.state.fresh is not None:
            return Phase.UPDATING
        if self.state.again is not None:
            return Phase.FAILED
        return Phase.FINISHING if self.moments_pending else Phase.SETTLED

    @property
    def moments_pending(self) -> bool:
        """Also while its weights are on their way."""
        return self.state.left is not None and not self.state.left.is_over

    def forget_step(self) -> None:
        """The step is over: what was begun before its norm was known is not to be used by another."""
        self.begun = self.lifted = None
        if self.second is not None:
            self.second.ticket = None

    def upload(self) -> None:
        """Fresh weights to the device: from the host's copy, or, of a streamed update, from the generation taken over."""
        source, on_device = self.state.on_host, self.state.own_on_device
        if source is None:
            assert self.second is not None
            source = self.second.weights
        assert on_device is not None
        on_device.copy_(source, non_blocking=True)

    def zeros(self, _key: str = "") -> Tensor:
        """A buffer for one more moment."""
        return self.state.optimizer_zeros(torch.float32)

    def entries(self, moments: Mapping[str, Tensor], names: Iterable[str], *, cloned: bool = True) -> Entries:
        """What the optimizer knows of each parameter, with moments from these flat buffers; empty before its first step."""
        slots = {slot.name: slot for slot in self.own_slots}
        found: Entries = {}
        for name in names:
            found[name] = {}
            for key, value in self.rest.get(name, {}).items():
                if isinstance(value, Flat):
                    found[name][key] = self.state.view(moments[key], slots[name])
                else:
                    found[name][key] = value.clone() if cloned and isinstance(value, Tensor) else value
        return found

    def arrays(self) -> Iterator[tuple[Slot, str, Tensor]]:
        """What is kept for each element of a parameter, by parameter and key, and what else is no single number."""
        for slot in self.own_slots:
            for key, value in self.rest.get(slot.name, {}).items():
                if isinstance(value, Flat):
                    yield slot, key, self.state.view(self.moments[key], slot)
                elif isinstance(value, Tensor) and value.dim():
                    yield slot, key, value

    def scalars(self) -> Entries:
        """The rest: step counts, and what is not a tensor."""
        return {name: {key: each for key, each in entry.items() if not _is_array(each)} for name, entry in self.rest.items()}

    @property
    def own_slots(self) -> tuple[Slot, ...]:
        return self.state.own.slots

    def keep(
        self,
        made: Mapping[str, Mapping[str, Any]],
        moments: dict[str, Tensor] | None = None,
        zeros: Callable[[str], Tensor] | None = None,
    ) -> None:
        """Takes over what a step left: arrays of a parameter's shape into the flat buffers, its own or those that are given; the
        rest as it is. What only some parameters have (Adafactor keeps rows and columns of the others) is no reason for a buffer
        of all."""
        moments, zeros = self.moments if moments is None else moments, zeros or self.zeros
        slots = {slot.name: slot for slot in self.own_slots}
        common = set(moments).union(set.intersection(*map(set, made.values())) if made else ())
        for name, entry in made.items():
            rest: dict[str, Any] = {}
            for key, value in entry.items():
                slot = slots[name]
                if isinstance(value, Flat):
                    rest[key] = value
                elif key in common and _is_like(value, slot):
                    if key not in moments:
                        moments[key] = zeros(key)
                    home = self.state.view(moments[key], slot)
                    if home.data_ptr() != value.data_ptr():
                        home.copy_(value)
                    rest[key] = Flat()
                else:
                    rest[key] = value
            self.rest[name] = rest

    @property
    def tensors(self) -> list[Tensor]:
        others = [item for rest in self.rest.values() for item in rest.values() if isinstance(item, Tensor) and item.dim()]
        return [*self.moments.values(), *others]


class Flat:
    """Stands for an array that lies in a flat buffer."""


def _is_like(value: Any, slot: Slot) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == slot.shape and value.dtype == torch.float32


def _is_array(value: Any) -> bool:
    return isinstance(value, Flat) or (isinstance(value, Tensor) and value.dim() > 0)


@dataclass(eq=False)
class Load:
    """A chunk on its way to a streamed update and back."""

    gradients: dict[str, Tensor]
    second: Second | None  # where it goes to, if not home
    carrier: Scratch | None = None  # on the device
    is_ahead: bool = False  # it is lifted, and nothing more was begun
    weights: Tensor | None = None  # before the step, and then after it
    flat: Tensor | None = None  # the gradients, where they lie in one
    moments: dict[str, Tensor] = field(default_factory=dict)
    rest: Entries = field(default_factory=dict)
    ticket: Ticket | None = None  # of the last that was asked of it


class Second:
    """The second generation of a chunk's state, on the host: what it will be if the step counts as it is. Weights that live on
    the device have theirs here too: backward still reads the old ones."""

    def __init__(self, state: ChunkState, slabs: HostSlabs) -> None:
        self._state, elements = state, state.own.elements
        self.weights = slabs.zeros(elements, state.dtype, crosses=True)
        self.low = state.optimizer_zeros(torch.int16, elements=elements if state.is_split else 0)
        self.moments: dict[str, Tensor] = {}
        self.made: Entries = {}
        self.ticket: Ticket | None = None  # of the update that fills it; None: not begun in this step
        self.may_be_read = False  # it was the state when somebody began to read that

    @property
    def masters(self) -> Masters:
        return Masters(self.weights, self.low if self._state.is_split else None)
