"""The state of a placed model by tensor: of each, the flat stretch that this rank has of it, to be read and set piece by piece.

A checkpoint is written from these and read into them: nothing here puts a tensor together, or copies more than is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyfit.kernels.bytes import Move, move_all

from ..kernels.split import put
from .lanes import Label, Task
from .place import Placed

_cuda: Any = torch.cuda

BUFFERS = -1  # in place of a chunk
FETCHED_BYTES = 2**24  # from a GPU at once: with less, threads wait for Python more than for the link; and little to pin


@dataclass(frozen=True)
class Stretch:
    """Elements of one tensor, from `start` of it in row-major order: flat in a buffer, or in two that together are exact."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    values: Tensor
    low: Tensor | None = None  # halves; `values` are then the high ones
    others: tuple[Tensor, ...] = ()  # where the same values also lie
    chunk: int = BUFFERS  # the index of the one it is in
    changes: bool = True  # in a step

    @property
    def elements(self) -> int:
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype if self.low is None else torch.float32

    @property
    def is_on_device(self) -> bool:
        return self.values.is_cuda or (self.low is not None and self.low.is_cuda)

    def read(self, start: int, end: int, out: Tensor, by: Fetcher) -> None:
        """Some of its elements into a flat tensor on the host."""
        parts = [part.detach() for part in (self.values, self.low) if part is not None]
        at_once = FETCHED_BYTES // sum(part.itemsize for part in parts) if self.is_on_device else max(end - start, 1)
        for first in range(start, end, at_once):
            last = min(first + at_once, end)
            values, *low = by.on_host([part[first:last] for part in parts])
            move = Move(values, low[0] if low else None, out[first - start : last - start])
            move_all([move], past_cache=by.past_cache)

    def move(self, start: int, end: int, out: Tensor) -> Move:
        """The same, to be done, of one that is on the host."""
        return Move(self.values.detach()[start:end], None if self.low is None else self.low[start:end], out)

    def write(self, start: int, values: Tensor) -> None:
        """Sets some of its elements, from `start` of it on."""
        part = slice(start, start + values.numel())
        homes = [each[part] for each in (self.values, *self.others)]
        put(values, homes, None if self.low is None else self.low[part], is_split=self.low is not None)


class Fetcher:
    """What a thread reads state with: a GPU's on a stream of its own, so that no step is waited for, and through a little pinned
    memory, so that the GPU's own is not needed. `past_cache` is for what is not looked at again soon."""

    def __init__(self, *, past_cache: bool = False) -> None:
        self.past_cache = past_cache
        self._stream: Any = None
        self._pinned: Tensor | None = None

    def make_ready(self, device: torch.device) -> None:
        """Else the first call does that: to pin memory takes the driver a while, which serves nobody else meanwhile."""
        if self._stream is None and device.type == "cuda":
            self._stream = _cuda.Stream(device, priority=-1)  # torch has few others, which lanes may have as well
            with _cuda.device(device):  # a thread's own is the first, whosever that is
                self._pinned = torch.empty(FETCHED_BYTES, dtype=torch.uint8, pin_memory=True)

    def on_host(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        """The same numbers on the host, until the next call. They are FETCHED_BYTES at most."""
        device = next((part.device for part in parts if part.is_cuda), None)
        if device is None:
            return parts
        self.make_ready(device)
        assert self._pinned is not None
        found, end = [], 0
        with _cuda.stream(self._stream):
            for part in parts:
                if part.is_cuda:
                    start, end = end, end + part.nbytes
                    found.append(self._pinned[start:end].view(part.dtype))
                    found[-1].copy_(part, non_blocking=True)
                else:
                    found.append(part)
        self._stream.synchronize()
        return found


def copied_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As they are now; a GPU is waited for once, and not for each."""
    found = []
    for each in tensors:
        home = torch.empty(each.shape, dtype=each.dtype, pin_memory=each.is_cuda)
        found.append(home.copy_(each, non_blocking=True))
    for device in {each.device for each in tensors if each.is_cuda}:
        _cuda.current_stream(device).synchronize()
    return found


def weights_of(placed: Placed) -> Iterator[Stretch]:
    """Parameters under their names, as far as they are this rank's; an empty one is everybody's."""
    for state in placed.state.chunks:
        own = {slot.name: slot for slot in state.own.slots}
        for slot in state.chunk.slots:
            mine = own.get(slot.name)
            if mine is None and slot.elements:
                continue
            part = slice(0, 0) if mine is None else slice(mine.offset, mine.offset + mine.elements)
            start = 0 if mine is None else state.start_in(slot, mine)
            home, *others = (home[part] for home in (state.on_host, state.own_on_device) if home is not None)  # the same
            low, changes = state.low[part] if state.is_split else None, state.chunk.is_updated
            yield Stretch(slot.name, slot.shape, start, home, low, tuple(others), state.index, changes)


def buffers_of(placed: Placed) -> Iterator[Stretch]:
    for name, buffer in placed.model.named_buffers():
        flat = buffer.detach()
        yield Stretch(name, tuple(buffer.shape), 0, flat.view(-1) if flat.is_contiguous() else flat.reshape(-1))


def moments_of(placed: Placed) -> Iterator[Stretch]:
    """What the optimizer keeps of every parameter that is no single number, under the parameter's name and its key."""
    for each in placed.updates.chunks:
        whole = {slot.name: slot for slot in each.state.chunk.slots}
        for mine, key, values in each.arrays():
            shape, start = tuple(values.shape), 0
            if values.shape == mine.shape:  # of each element
                shape, start = whole[mine.name].shape, each.state.start_in(whole[mine.name], mine)
            yield Stretch(f"{mine.name}/{key}", shape, start, values.reshape(-1), chunk=each.state.index)


def home_of(placed: Placed, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Stretch | None:
    """Where such a thing belongs that another run had; None where it is other ranks' alone."""
    found = placed.updates.home(name, key, shape, dtype)
    if found is None:
        return None
    each, values = found
    whole, mine = (next(slot for slot in chunk.slots if slot.name == name) for chunk in (each.state.chunk, each.state.own))
    start = each.state.start_in(whole, mine) if shape == whole.shape else 0
    return Stretch(f"{name}/{key}", shape, start, values.view(-1), chunk=each.state.index)


def spread(placed: Placed) -> None:
    """After weights were set: a rank that has all of a chunk gets what others have set of it. All ranks do it together."""
    for state in placed.state.chunks:
        whole, own = state.on_device, state.own_on_device
        if state.is_replicated and whole is not None and own is not None:
            state.ranks.gather("small", state.sharding, whole, own, Label(Task.GATHER, state.index))
