"""What autograd saves for backward: a view of weights that pass through a slot is written down as a place, and fetched again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from .chunks import ModelState, quietly
from .slots import DeviceSlots
from .watched import Watched


@dataclass(frozen=True)
class Saved:
    """What a saved tensor that is a view of a slot is replaced by, until backward asks for it."""

    chunk: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class SavedTensors:
    """`fetched`: the chunks whose weights pass through slots."""

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
            return Saved(slot.state.index, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

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
            touch({saved.chunk})
            flat = self._slots.of_chunk[saved.chunk].flat
            usable = flat[: flat.numel() // saved.dtype.itemsize * saved.dtype.itemsize]
            return usable.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)
