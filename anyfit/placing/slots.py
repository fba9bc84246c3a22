"""Device slots: buffers on the device that weights from the host, or from all ranks, pass through; and what is saved of them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .chunks import ChunkState, ModelState, quietly
from .lanes import Label, Lanes, Task, Ticket
from .watched import Watched


def uses_of(tensor: Tensor) -> int:
    """How many tensors hold its memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def held_of(tensor: Tensor, others: Collection[Tensor]) -> int:
    """How many of these hold its memory."""
    own = tensor.untyped_storage()._cdata
    return sum(each.untyped_storage()._cdata == own for each in others)


class DeviceSlot:
    """A device buffer that weights of any chunk on the host can pass through. Its storage is its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.storage = self.flat.untyped_storage()
        # The same bytes in another storage, for those that fill them: a collective lets go of its tensors some time after it is
        # done, and ranks would differ in what they find free.
        is_real = not self.flat.is_meta  # where memory is only counted there is none to be shared
        self._filled = torch.utils.dlpack.from_dlpack(self.flat) if is_real else self.flat
        self.state: ChunkState | None = None
        self.is_bound = False  # parameters are views of it
        self.ticket: Ticket | None = None  # of the upload
        self._alone = uses_of(self.flat)

    @property
    def is_held(self) -> bool:
        """Somebody has a view of it besides the parameters bound to it."""
        bound = len(self.state.chunk.slots) if self.state is not None and self.is_bound else 0
        return uses_of(self.flat) != self._alone + bound

    def weights(self) -> Tensor:
        assert self.state is not None
        return self.flat[: self.state.chunk.bytes].view(self.state.dtype)

    def to_fill(self) -> Tensor:
        """The same, not counted as held."""
        assert self.state is not None
        return self._filled[: self.state.chunk.bytes].view(self.state.dtype)


class DeviceSlots:
    """As many as the plan has; more where a step needs more at once than it foresaw."""

    def __init__(self, state: ModelState, lanes: Lanes, chunks: set[int], count: int) -> None:
        self._state, self._lanes, self._most = state, lanes, len(chunks)
        self._slot_bytes = max((state.chunks[index].chunk.bytes for index in chunks), default=0)
        self.added = 0  # beyond the plan's
        self.on_growth: Callable[[Tensor], None] = lambda _memory: None  # is told of the memory of one, and may refuse it
        self.all = [DeviceSlot(self._slot_bytes, state.device) for _ in range(min(count, len(chunks)))]
        self.of_chunk: dict[int, DeviceSlot] = {}
        self.of_storage = {slot.storage._cdata: slot for slot in self.all}

    @property
    def empty(self) -> DeviceSlot | None:
        return next((slot for slot in self.all if slot.state is None and not slot.is_held), None)

    def one_more(self, index: int, needed: int) -> DeviceSlot:
        """A slot beyond the plan's: rather more memory than a run that ends. At most one for every chunk."""
        if self.added >= self._most:
            held = sum(slot.is_held for slot in self.all)
            raise RuntimeError(
                f"chunk {index} is needed and none of the {len(self.all)} device slots can be freed: this op needs "
                f"{needed}, and views of {held} are still held (by recomputed blocks, or by code that "
                "keeps weights); use a plan with more slots, or with smaller chunks"
            )
        with _disable_current_modes(), torch.inference_mode(False):
            slot = DeviceSlot(self._slot_bytes, self._state.device)
        self.on_growth(slot.flat)
        self.added += 1
        self.all.append(slot)
        self.of_storage[slot.storage._cdata] = slot
        return slot

    def give_back(self, drop: Callable[[ChunkState], None]) -> None:
        """Slots beyond the plan's, as far as nobody holds them."""
        for slot in [each for each in self.all if not each.is_held][: self.added]:
            if slot.state is not None:
                drop(slot.state)
            self.all.remove(slot)
            del self.of_storage[slot.storage._cdata]
            self.added -= 1

    def refuse_kept(self) -> None:
        """Before weights are updated: whoever keeps a view of them would have the old ones from then on."""
        held = [slot for slot in self.all if slot.state is not None and slot.state.chunk.is_updated and slot.is_held]
        if held:
            gc.collect()
        for slot in held:
            if slot.state is not None and slot.is_held:
                names = [each.name for each in slot.state.chunk.slots]
                raise RuntimeError(
                    f"a view of {' or '.join(names[:3])}{', …' if len(names) > 3 else ''} is kept from step to step, and these "
                    "weights live on the host, so that it would not follow the update; keep a clone() of it, take it anew in "
                    "every step, or use a plan with weights on the device"
                )

    @_disable_current_modes()  # whoever watches the model's ops (selective recomputation counts them) is not to see these
    def fetch(self, state: ChunkState, slot: DeviceSlot) -> DeviceSlot:
        slot.state, self.of_chunk[state.index] = state, slot
        whole = slot.to_fill()
        own = whole[state.stretch] if state.is_gathered else whole
        slot.ticket = state.read_weights(own, (self._lanes.so_far(), state.update.fresh))
        if state.is_gathered:
            label = Label(Task.GATHER, state.index)
            state.ranks.ask("gather", label)
            slot.ticket = self._lanes.gather.run(lambda: self._gather(state, whole, own, label), (slot.ticket,), label)
        return slot

    def _gather(self, state: ChunkState, whole: Tensor, own: Tensor, label: Label) -> None:
        ranks = state.ranks
        for rank, index in ranks.chosen("gather", state.sharding, state.index).items():
            if index != state.index:
                mine, other = (self._state.chunks[each].chunk.slots[0].name for each in (state.index, index))
                raise RuntimeError(
                    f"rank {ranks.index} needs the weights of chunk {state.index} ({mine}) where rank {rank} needs those of "
                    f"chunk {index} ({other}): with weights that are sharded over ranks every rank has to call the same modules; "
                    "use a plan with weight_shards 1"
                )
        ranks.gather("gather", state.sharding, whole, own, label)

    def bind(self, slot: DeviceSlot) -> None:
        """Parameters are views of the slot once the weights are in it, and not before: not all that read them ask first."""
        if slot.is_bound:
            return
        assert slot.state is not None
        with _disable_current_modes():
            self._state.bind(slot.state, slot.weights())
        slot.is_bound = True


@dataclass(frozen=True)
class Saved:
    """What a saved tensor is replaced by until backward asks for it: where it lies in a chunk, or in a storage on the host."""

    where: Any  # the chunk's index, or the storage
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, where: Any, tensor: Tensor) -> Saved:
        return cls(where, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def view(self, flat: Tensor) -> Tensor:
        """The same of bytes on the device."""
        usable = flat[: flat.numel() // self.dtype.itemsize * self.dtype.itemsize]
        return usable.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class SavedTensors:
    """`fetched`: chunks that pass through slots. It holds no residency: in such a ring, a lifted model's state would live on."""

    def __init__(self, state: ModelState, slots: DeviceSlots, fetched: set[int]) -> None:
        self._state, self._slots, self._fetched = state, slots, fetched

    @contextmanager
    def watching(self, unpack: Callable[[Tensor | Saved], Tensor]) -> Iterator[None]:
        if not self._slots.all:
            yield
            return
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, unpack):
                yield
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                error.add_note(
                    "this plan has weights on the host, which needs such hooks; use a plan with all state on the device"
                )
            raise

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        with quietly():
            has_storage = tensor.layout == torch.strided and not tensor.is_nested  # what is sparse or nested is nobody's weight
            slot = self._slots.of_storage.get(tensor.untyped_storage()._cdata) if has_storage else None
            if slot is None or slot.state is None:
                if isinstance(tensor, Watched) and hasattr(tensor, "anyfit") and tensor.anyfit[2] in self._fetched:
                    return self._place_of(tensor)
                # Without its history, which autograd keeps itself: an op's own output would tie the graph into a knot, and
                # one that never goes backward would stay for good.
                return tensor if tensor.grad_fn is None else tensor.detach()
            return Saved.of(slot.state.index, tensor)

    def _place_of(self, absent: Watched) -> Saved:
        """Of a parameter that is saved before anybody has read it: not the one that stands for it."""
        _, name, index = absent.anyfit
        offset = next(each.offset for each in self._state.chunks[index].chunk.slots if each.name == name)
        return Saved(index, absent.dtype, offset, absent.shape, torch.empty(absent.shape, device="meta").stride())

    def unpack(self, saved: Tensor | Saved, touch: Callable[[set[int]], None]) -> Tensor:
        """Once `touch` has brought the chunk."""
        if not isinstance(saved, Saved):
            return saved
        with quietly(), torch.no_grad():
            touch({saved.where})
            return saved.view(self._slots.of_chunk[saved.where].flat)


def is_saved_for_another() -> bool:
    """Whether somebody else looks at what is saved, such as a checkpoint of the user's around a block."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and getattr(top[0], "__module__", None) != __name__
