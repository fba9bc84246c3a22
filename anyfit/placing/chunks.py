"""Model state in flat buffers: the bytes behind a layout, each where its placement says.

A bf16 chunk that is updated has a buffer of low halves beside its weights; together they are the exact fp32 masters. Weights
lie on the device, on the host, or, where the host updates weights that stay on the device, on both. All buffers of a sharded
chunk hold this rank's stretch alone (`own`); only weights on the device may be whole.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anyfit.values.demands import Demands
from anyfit.values.layout import Chunk, Slot
from anyfit.values.mesh import Sharding
from anyfit.values.plan import Placement

from ..kernels.split import WRITTEN_AT_ONCE, Masters, forget_low
from .disk_state import DiskChunk, DiskTier
from .filling import Piece, filled
from .lanes import Label, Over, Task, Ticket
from .ranks import ALONE, Ranks
from .stock import Stock
from .tiers import LOW, After, Tiers
from .weights import Elements, in_turn, of_tensor

quietly = torch._C.DisableTorchFunctionSubclass  # parameters that watch their use do not watch the engine's


class UpdatePhase(Enum):
    """How far the update of a chunk is. docs/architecture.md draws the way from one to the next."""

    SETTLED = auto()  # weights and moments are those of the last step; gradients are waited for, and their norm
    LIFTED = auto()  # streamed: its state is on the device, or on its way there, and the norm is not known
    SPECULATED = auto()  # updated into its second generation, as if nothing were clipped, and the norm is not known
    BEGUN = auto()  # resident: the GPU updates it, if the norm is a number, which the host does not know
    UPDATING = auto()  # its weights are old ones until the ticket `fresh`
    FAILED = auto()  # its update raised an error; whoever asks for the chunk next starts it again
    FINISHING = auto()  # two-phase: its weights are fresh, and its moments are still to come


class ChunkUpdate:
    """The life of one chunk's update: whoever starts a part of it, waits for one or drops one says so here."""

    def __init__(self) -> None:
        # Before the norm is known, of the step under way:
        self.lifted: Ticket | None = None  # of the state's way up
        self.speculated: Ticket | None = None  # of the second generation
        self.begun: dict[str, dict[str, Any]] | None = None  # what will be known of its parameters, if the norm is a number
        # After that, also while the next step runs:
        self.fresh: Ticket | None = None  # of its weights
        self.restart: Callable[[], Ticket] | None = None  # starts the update once more, should it have failed
        self.moments: Ticket | None = None  # of those that follow the weights: that job still reads the host's gradients
        self.last: Ticket | None = None  # of all that works with a state on the host

    @property
    def phase(self) -> UpdatePhase:
        """What was begun in the step under way comes before what is left of the last."""
        if self.begun is not None:
            return UpdatePhase.BEGUN
        if self.speculated is not None:
            return UpdatePhase.SPECULATED
        if self.lifted is not None:
            return UpdatePhase.LIFTED
        if self.fresh is not None:
            return UpdatePhase.UPDATING
        if self.restart is not None:
            return UpdatePhase.FAILED
        return UpdatePhase.FINISHING if self.moments_pending else UpdatePhase.SETTLED

    @property
    def moments_pending(self) -> bool:
        """Also while its weights are on their way."""
        return self.moments is not None and not self.moments.is_over

    @property
    def last_over(self) -> Ticket | None:
        """For what comes after the last, which may have failed, or not count any more."""
        return None if self.last is None else Over(self.last)

    def drop_speculated(self) -> None:
        """What was speculated does not count, and is not done where it has not begun. `last` still knows its ticket: what
        it has in hand is not to be touched before."""
        if self.speculated is not None:
            self.speculated.drop()
            self.speculated = None

    def finish(self) -> None:
        """Waits for moments that follow the weights."""
        if self.moments is not None:
            self.moments.wait()

    def forget_step(self) -> None:
        """The step is over: what was begun before its norm was known is not to be used by another."""
        self.begun = self.lifted = self.speculated = None


@dataclass(frozen=True)
class Carried:
    """All state of a model on its way from one placing to another, by parameter name. Each tensor is a view of the old buffers
    until its new chunk has it, and then of that: only the chunk at hand is held twice, and nothing is ever lost."""

    weights: dict[str, Tensor]
    low: dict[str, Tensor]  # halves of the masters, where there are any
    optimizer_state: dict[str, dict[str, Any]]
    optimizer: Optimizer
    demands: Demands


class ChunkState:
    """One chunk's buffers, and the update that is under way on it."""

    def __init__(
        self, index: int, chunk: Chunk, placement: Placement, device: torch.device, tiers: Tiers, ranks: Ranks = ALONE
    ) -> None:
        self.index, self.chunk, self.placement, self.ranks = index, chunk, placement, ranks
        sharding = Sharding.of_cut if chunk.is_cut else Sharding.over_data
        self.sharding = sharding(ranks.mesh, placement.optimizer_shards, chunk.holders)
        part, self.shards = self.sharding.part(ranks.index), self.sharding.shards
        self.stretch = slice(*chunk.stretch(part, self.shards))
        self.own = chunk.part(part, self.shards)
        self.dtype: torch.dtype = getattr(torch, chunk.dtype)
        self.is_split = chunk.is_split
        self.device, self._tiers = device, tiers
        self.on_device: Tensor | None = None
        self.on_host: Tensor | None = None  # of `own`
        if placement.weights == "device":
            there = self.own if self.is_gathered else chunk
            self.on_device = tiers["device"].zeros(there.elements, self.dtype)
        if placement.weights == "host" or (chunk.is_updated and placement.update == "host"):
            self.on_host = tiers["host"].zeros(self.own.elements, self.dtype)
        tier = tiers[placement.optimizer]
        self.disk = DiskChunk(tier, index, self.own.elements) if isinstance(tier, DiskTier) and chunk.is_updated else None
        self.low = self.optimizer_zeros(torch.int16, elements=self.own.elements if self.is_split else 0)
        self.update = ChunkUpdate()

    @property
    def is_gathered(self) -> bool:
        """Its weights are sharded, and all-gathered for each use."""
        return self.placement.weight_shards > 1

    @property
    def is_replicated(self) -> bool:
        """Its weights are whole on every rank; each updates its stretch, and they all-gather."""
        return self.shards > 1 and not self.is_gathered

    @property
    def own_on_device(self) -> Tensor | None:
        """This rank's stretch of weights that live on the device."""
        return self.on_device[self.stretch] if self.on_device is not None and self.is_replicated else self.on_device

    @property
    def weights(self) -> Tensor:
        """Where this rank's stretch of them lives. Between a step and the update's end they are the old ones."""
        weights = self.own_on_device if self.placement.weights == "device" else self.on_host
        assert weights is not None
        return weights

    def masters(self, weights: Tensor | None) -> Masters:
        """With these as the high halves: weights of `own` lie in more than one place."""
        assert weights is not None
        return Masters(weights, self.low if self.is_split else None)

    def optimizer_zeros(self, dtype: torch.dtype, elements: int | None = None) -> Tensor:
        """A flat buffer in the tier of the optimizer's state."""
        elements = self.own.elements if elements is None else elements
        return self._tiers[self.placement.optimizer].zeros(elements, dtype, crosses=self.placement.update == "device")

    def read_weights(self, into: Tensor, after: After) -> Ticket:
        """This rank's stretch of them, to the device."""
        return self._tiers[self.placement.weights].read(lambda: self.weights, into, after, Label(Task.FETCH, self.index))

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """Of a flat buffer with the offsets that the slot is from: the chunk's, or `own`'s."""
        return flat[slot.offset : slot.offset + slot.elements].view(slot.shape)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return {slot.name: self.view(flat, slot) for slot in self.chunk.slots}

    def pieces(self, values: Mapping[str, Elements]) -> Iterator[Piece]:
        """What sets all parameters, exactly where the chunk has masters. Of each, only what this rank holds is asked for. Low
        halves for the disk are in memory until `put_away`."""
        if self.disk is not None and self.is_split:
            self.low = self.disk.room(LOW)
        if self.is_replicated and self.on_device is not None:
            for slot in self.chunk.slots:
                yield from self._pieces(values[slot.name], 0, [self.view(self.on_device, slot).view(-1)], None)
        wholes = {slot.name: slot for slot in self.chunk.slots}
        for slot in self.own.slots:
            homes = [self.view(buffer, slot).view(-1) for buffer in (self.own_on_device, self.on_host) if buffer is not None]
            low = self.view(self.low, slot).view(-1) if self.is_split else None
            yield from self._pieces(values[slot.name], self.start_in(wholes[slot.name], slot), homes, low)

    def _pieces(self, given: Elements, first: int, homes: Sequence[Tensor], low: Tensor | None) -> Iterator[Piece]:
        for start in range(0, homes[0].numel(), WRITTEN_AT_ONCE):
            part = slice(start, min(start + WRITTEN_AT_ONCE, homes[0].numel()))
            there = [home[part] for home in homes]
            yield Piece(given, first + part.start, first + part.stop, there, None if low is None else low[part], self.is_split)

    def start_in(self, whole: Slot, own: Slot) -> int:
        """Where in a parameter this rank's piece of it begins."""
        return self.stretch.start + own.offset - whole.offset if self.shards > 1 else 0

    def put_away(self) -> None:
        """All pieces are written: low halves go to the disk, where they live there."""
        if self.disk is not None and self.is_split:
            self.disk.write_part(LOW, self.low)
            self.low = self.optimizer_zeros(torch.int16)

    def take_over(self, slot: Slot, carried: Carried) -> None:
        """Sets one parameter to what it was in another placing."""
        for home in (self.on_device, self.on_host):
            if home is not None:
                self.view(home, slot).copy_(carried.weights[slot.name])
        carried.weights[slot.name] = self.view(self.weights, slot)
        if self.is_split:
            self.view(self.low, slot).copy_(carried.low[slot.name])
            carried.low[slot.name] = self.view(self.low, slot)

    def read_all(self) -> dict[str, Tensor]:
        """Copies of all parameters on the host, fp32 masters where the chunk has any. Ranks that shard it do this together."""
        all_low = self.disk.read_part(LOW) if self.disk is not None else self.low
        masters, found = Masters(self.weights, all_low if self.is_split else None), {}
        whole = None if self.shards == 1 else self.whole(masters.exact())
        for slot in self.chunk.slots:
            if whole is None:  # one by one, which takes little scratch
                low = None if masters.low is None else self.view(masters.low, slot)
                exact = Masters(self.view(masters.weights, slot), low).exact()
            else:
                exact = self.view(whole, slot)
            found[slot.name] = exact.to("cpu", copy=True)
        return found

    def whole(self, own: Tensor) -> Tensor:
        """A flat buffer of `own`, all-gathered."""
        if self.shards == 1:
            return own
        flat = torch.empty(self.chunk.elements, dtype=own.dtype, device=self.device)
        self.ranks.gather("small", self.sharding, flat, own.to(self.device), Label(Task.GATHER, self.index))
        return flat

    def adopt(self, edited: Tensor, before: Tensor) -> None:
        """Takes over weights of `own` that the user edited: a changed bf16 weight is its own new master."""
        if self.is_split:
            is_edited = edited != before.to(edited.device)
            if self.disk is None:
                forget_low(self.low, is_edited)
            elif is_edited.any():
                low = self.disk.read_part(LOW)
                forget_low(low, is_edited)
                self.disk.write_part(LOW, low)
        for home in (self.own_on_device, self.on_host):
            if home is not None and home.data_ptr() != edited.data_ptr():
                home.copy_(edited)

    @property
    def device_bytes(self) -> int:
        there = [self.on_device, self.low if self.placement.optimizer == "device" else None]
        return sum(buffer.nbytes for buffer in there if buffer is not None)


class Absent:
    """Shapes without memory, for weights that are away. Whoever reads one unwatched gets nan; its address tells whose it is."""

    def __init__(self, layout: Sequence[Chunk], device: torch.device) -> None:
        self._flats: dict[torch.dtype, Tensor] = {}
        self._offsets: dict[str, int] = {}
        self._names: dict[torch.dtype, list[str]] = {}
        for chunk in layout:
            members = self._names.setdefault(getattr(torch, chunk.dtype), [])
            for slot in chunk.slots:
                self._offsets[slot.name] = len(members)
                members.append(slot.name)
        for dtype, names in self._names.items():
            nothing: Any = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
            self._flats[dtype] = torch.full((len(names),), nothing, dtype=dtype, device=device)

    def of(self, state: ChunkState, slot: Slot) -> Tensor:
        return self._flats[state.dtype][self._offsets[slot.name]].expand(slot.shape)

    def mark(self, names: Iterable[str]) -> None:
        """These stand for no number, and the others for one: to find out which of them are read."""
        marked = set(names)
        for dtype, members in self._names.items():
            if dtype.is_floating_point:
                values = [float("nan") if name in marked else 0.5 for name in members]
                self._flats[dtype].copy_(torch.tensor(values))


class ModelState:
    """All chunks of a model, and the model's parameters by name."""

    def __init__(
        self,
        model: nn.Module,
        layout: Sequence[Chunk],
        placements: Sequence[Placement],
        device: torch.device,
        tiers: Tiers,
        ranks: Ranks = ALONE,
        carried: Carried | None = None,
        elements: Mapping[str, Elements] | None = None,
        kept: Container[str] = (),
        stock: Stock | None = None,
        parted: Container[str] = (),
    ) -> None:
        """`parted`: parameters that are this rank's parts of rank 0's already. The `stock` is told how many bytes of host memory
        the model as it was built still has, as they become fewer."""
        self.device, self.ranks, self._parted = device, ranks, parted
        self.kept: dict[str, ChunkState] = {}  # of parameters that keep their own memory, which chunks mirror
        self.chunks: list[ChunkState] = []
        made = (
            ChunkState(index, chunk, placement, device, tiers, ranks)
            for index, (chunk, placement) in enumerate(zip(layout, placements, strict=True))
        )
        here = {slot.name for chunk in layout for slot in chunk.slots}  # others are of other places of a pipeline
        self.parameters: Mapping[str, nn.Parameter] = {name: each for name, each in model.named_parameters() if name in here}
        self.absent = Absent(layout, device)
        with torch.no_grad():
            if carried is None:  # all at once, so that their pages are made ready meanwhile
                self.chunks += made
                self._fill(elements or {}, kept, stock.model_takes if stock is not None else lambda _bytes: None)
                return
            for state in made:  # each when it is filled, as another's place is freed
                self.chunks.append(state)
                for slot in state.chunk.slots:
                    state.take_over(slot, carried)
                self._bind_first(state, kept)

    def _fill(self, elements: Mapping[str, Elements], kept: Container[str], built_takes: Callable[[int], None]) -> None:
        own = {name: each.nbytes for name, each in self.parameters.items() if each.is_cpu and name not in elements}
        left = sum(own.values())
        built_takes(left)
        for state in filled((each, each.pieces(self._agreed(each, elements))) for each in self.chunks):
            state.put_away()
            self._bind_first(state, kept)
            left -= sum(own.get(slot.name, 0) for slot in state.chunk.slots if slot.name not in kept)
            built_takes(left)

    def _bind_first(self, state: ChunkState, kept: Container[str]) -> None:
        """The parameters of a chunk that has their numbers; what they were before is freed."""
        for slot in state.chunk.slots:
            if slot.name in kept:
                self.kept[slot.name] = state
                home = self.parameters[slot.name].data.to(self.device, state.dtype)
                if state.is_split:  # rounded as the split does
                    home.copy_(state.view(state.weights, slot))
            elif state.on_device is not None and not state.is_gathered:
                home = state.view(state.on_device, slot)
            else:
                home = self.absent.of(state, slot)
            self.parameters[slot.name].data = home

    def _agreed(self, state: ChunkState, elements: Mapping[str, Elements]) -> dict[str, Elements]:
        """The chunk's parameters: as all ranks can read them, else as they were made, by rank 0 where there are several."""
        found: dict[str, Elements] = {}
        for slot in state.chunk.slots:
            if slot.name in elements:
                found[slot.name] = elements[slot.name]
                continue
            tensor = self.parameters[slot.name].data
            if self.ranks.are_several and slot.name not in self._parted:
                tensor = tensor.to(self.device).contiguous()
                self.ranks.broadcast(tensor)
                found[slot.name] = in_turn(tensor)  # before the next chunk's take memory
            else:
                found[slot.name] = of_tensor(tensor)
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """What this rank has of every parameter along a tensor axis, on the host: fp32 masters where there are any. All ranks do
        it together."""
        return {name: each for state in self.chunks for name, each in state.read_all().items()}

    def refuse_thawed(self) -> None:
        """Raises where a parameter that was frozen has a gradient."""
        frozen = (slot.name for each in self.chunks if not each.chunk.trainable for slot in each.chunk.slots)
        with quietly():
            thawed = next((name for name in frozen if self.parameters[name].grad is not None), None)
        if thawed is not None:
            raise RuntimeError(
                f"{thawed} was frozen when the run started and has a gradient now; "
                "requires_grad_(True) takes effect in a new run: anyfit.start"
            )

    def bind(self, state: ChunkState, flat: Tensor) -> None:
        """A chunk's parameters are views of a flat buffer."""
        with quietly():
            for slot in state.chunk.slots:
                self.parameters[slot.name].data = state.view(flat, slot)

    def snapshot(self) -> dict[int, Tensor]:
        """The weights of chunks that are nowhere but on the device, to tell later what the user edited."""
        return {state.index: state.weights.clone() for state in self.chunks if state.on_host is None and not state.is_gathered}

    def adopt_edits(self, before: Mapping[int, Tensor]) -> None:
        """Makes the user's edits of weights on the device part of the state."""
        with torch.no_grad(), quietly():
            for state in self.chunks:
                if state.on_device is None or state.is_gathered:
                    continue
                for slot in state.chunk.slots:
                    parameter, mine = self.parameters[slot.name], state.view(state.on_device, slot)
                    if slot.name in self.kept:
                        mine.copy_(parameter)
                    elif parameter.data_ptr() != mine.data_ptr():  # the user put another tensor there
                        if parameter.shape != mine.shape:
                            raise ValueError(
                                f"{slot.name} had shape {tuple(mine.shape)} and was replaced by {tuple(parameter.shape)}"
                            )
                        mine.copy_(parameter)
                        parameter.data = mine
                state.adopt(state.weights, before[state.index] if state.on_host is None else state.on_host)

    @property
    def device_bytes(self) -> int:
        return sum(state.device_bytes for state in self.chunks)
