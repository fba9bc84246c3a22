"""The state of a placed model by tensor: of each, the flat stretch that this rank has of it, to be read and set piece by piece.

A checkpoint is written from these and read into them: nothing here puts a tensor together, or copies more than is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyfit.kernels.bytes import Move, move_all
from anyfit.values.cuts import Parted
from anyfit.values.layout import Slot

from ..kernels.split import put
from .disk_state import DiskChunk, Still
from .lanes import Label, Task
from .optimizer_state import OptimizerState
from .place import Placed
from .tiers import LOW

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
    parted: Parted | None = None  # the elements are of a rank's part of the tensor, and `start` counts in that

    @property
    def elements(self) -> int:
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype if self.low is None else torch.float32

    @property
    def copied_bytes(self) -> int:
        """Of an element, what a save beside the steps copies."""
        return self.dtype.itemsize if self.changes else 0

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

    def read_runs(self, at: Runs, start: int, end: int, out: Tensor, by: Fetcher) -> None:
        """The same of elements that do not lie together, counted along their runs."""
        parts = [part.detach() for part in (self.values, self.low) if part is not None]
        rows = FETCHED_BYTES // (at.run * sum(part.itemsize for part in parts)) - 1  # of the last, there may be but a bit
        if rows <= 0:  # each run by itself
            for row in range(start // at.run, -(-end // at.run)):
                first, last = max(start, row * at.run), min(end, (row + 1) * at.run)
                there = at.start + row * (at.step - at.run)
                self.read(there + first, there + last, out[first - start : last - start], by)
            return
        for first in range(start, end, rows * at.run):
            last = min(first + rows * at.run, end)
            values, *low = by.on_host([at.view(part, first, last) for part in parts])
            chosen = slice(first % at.run, first % at.run + last - first)
            picked = [each.reshape(-1)[chosen].contiguous() for each in (values, *low)]
            move_all([Move(picked[0], picked[1] if low else None, out[first - start : last - start])], past_cache=by.past_cache)

    def move(self, start: int, end: int, out: Tensor) -> Move:
        """The same, to be done, of one that is on the host."""
        return Move(self.values.detach()[start:end], None if self.low is None else self.low[start:end], out)

    def move_runs(self, at: Runs, out: Tensor) -> Move:
        values, *low = (
            at.view(part.detach(), 0, out.numel()).reshape(-1).contiguous()
            for part in (self.values, self.low)
            if part is not None
        )
        return Move(values, low[0] if low else None, out)

    def write(self, start: int, values: Tensor) -> None:
        """Sets some of its elements, from `start` of it on."""
        part = slice(start, start + values.numel())
        homes = [each[part] for each in (self.values, *self.others)]
        put(values, homes, None if self.low is None else self.low[part], is_split=self.low is not None)

    def write_runs(self, at: Runs, values: Tensor) -> None:
        """Sets all elements of these runs."""
        homes = [at.view(each, 0, values.numel()) for each in (self.values, *self.others)]
        flat = [torch.empty(values.numel(), dtype=each.dtype, device=each.device) for each in homes]
        low = None if self.low is None else torch.empty(values.numel(), dtype=self.low.dtype, device=self.low.device)
        put(values, flat, low, is_split=self.low is not None)
        for home, new in zip(homes, flat, strict=True):
            home.copy_(new.view(home.shape))
        if self.low is not None and low is not None:
            at.view(self.low, 0, values.numel()).copy_(low.view(homes[0].shape))


@dataclass(frozen=True)
class DiskStretch(Stretch):
    """One of which the low halves, or all, lie on the disk: `low` or `values` stand for a part there, from `at` of it on. Only
    what is asked for is in memory."""

    disk: DiskChunk | Still | None = None
    key: str = LOW
    at: int = 0

    def read(self, start: int, end: int, out: Tensor, by: Fetcher) -> None:
        assert self.disk is not None
        there = self.disk.some(self.key, self.at + start, self.at + end)
        values, low = (there, None) if self.low is None else (self.values[start:end], there)
        Stretch(self.name, self.shape, 0, values, low).read(0, end - start, out, by)

    @property
    def copied_bytes(self) -> int:
        """What lies on the disk stays there as long as it is held."""
        return 0 if self.low is None else self.values.itemsize

    @property
    def high(self) -> Stretch:
        """The half that is in memory."""
        return Stretch(self.name, self.shape, self.start, self.values, chunk=self.chunk, parted=self.parted)

    def held(self, still: Still) -> DiskStretch:
        """What of it lies on the disk, as it was."""
        return replace(self, disk=still) if self.low is None else replace(self, values=self.low, low=None, disk=still)

    def read_runs(self, at: Runs, start: int, end: int, out: Tensor, by: Fetcher) -> None:
        """Runs that are near each other are read with what lies between them."""
        rows = max(FETCHED_BYTES // (at.step * self.dtype.itemsize), 1)
        for first in range(start // at.run, -(-end // at.run), rows):
            last = min(first + rows, -(-end // at.run))
            span = slice(at.start + first * at.step, at.start + (last - 1) * at.step + at.run)
            part = torch.empty(span.stop - span.start, dtype=self.dtype)
            self.read(span.start, span.stop, part, by)
            chosen = slice(max(start, first * at.run), min(end, last * at.run))
            picked = Runs(0, at.run, at.step).view(part, chosen.start - first * at.run, chosen.stop - first * at.run)
            skipped = chosen.start % at.run
            flat = picked.reshape(-1)[skipped : skipped + chosen.stop - chosen.start]
            out[chosen.start - start : chosen.stop - start].copy_(flat)

    def write(self, start: int, values: Tensor) -> None:
        Stretch.write(self._at_hand(), start, values)

    def write_runs(self, at: Runs, values: Tensor) -> None:
        Stretch.write_runs(self._at_hand(), at, values)

    def _at_hand(self) -> Stretch:
        """In memory, until all is put away."""
        assert isinstance(self.disk, DiskChunk)
        there = self.disk.at_hand(self.key)[self.at : self.at + self.elements]
        return replace(self, values=there) if self.low is None else replace(self, low=there)


class Runs(NamedTuple):
    """Elements of a flat tensor: so many from `start`, and again from each `step` after it."""

    start: int
    run: int
    step: int

    def view(self, flat: Tensor, start: int, end: int) -> Tensor:
        """The runs that these elements of them are in, a row each."""
        first, last = start // self.run, -(-end // self.run)
        return flat.as_strided(
            (last - first, self.run), (self.step, 1), int(flat.storage_offset()) + self.start + first * self.step
        )


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
                    found.append(self._pinned[start:end].view(part.dtype).view(part.shape))
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
            start = 0 if mine is None else state.start_in(slot, mine)
            parted = placed.cuts.parameters.get(slot.name)
            elements = 0 if mine is None else _filled(mine.elements, start, parted)
            if slot.elements and not elements:
                continue
            part = slice(0, 0) if mine is None else slice(mine.offset, mine.offset + elements)
            home, *others = (home[part] for home in (state.on_host, state.own_on_device) if home is not None)  # the same
            low, changes = state.low[part] if state.is_split else None, state.chunk.is_updated
            shape = slot.shape if parted is None else parted.shape
            found = slot.name, shape, start, home, low, tuple(others), state.index, changes, parted
            yield Stretch(*found) if state.disk is None or low is None else DiskStretch(*found, state.disk, LOW, part.start)


def buffers_of(placed: Placed) -> Iterator[Stretch]:
    for name, buffer in placed.model.named_buffers():
        flat = buffer.detach()
        yield Stretch(name, tuple(buffer.shape), 0, flat.view(-1) if flat.is_contiguous() else flat.reshape(-1))


def moments_of(placed: Placed) -> Iterator[Stretch]:
    """What the optimizer keeps of every parameter that is no single number, under the parameter's name and its key."""
    for each in placed.updates.chunks:
        whole = {slot.name: slot for slot in each.state.chunk.slots}
        for mine, key, values in each.arrays():
            shape, start, parted, flat = tuple(values.shape), 0, None, values.reshape(-1)
            if values.shape == mine.shape:  # of each element
                parted = placed.cuts.parameters.get(mine.name)
                shape = whole[mine.name].shape if parted is None else parted.shape
                start = each.state.start_in(whole[mine.name], mine)
                flat = flat[: _filled(len(flat), start, parted)]
            if len(flat) or not values.numel():
                yield _of_moment(each, mine, key, shape, start, flat, parted)


def home_of(placed: Placed, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Stretch | None:
    """Where such a thing belongs that another run had; None where it is other ranks' alone."""
    parted = placed.cuts.parameters.get(name)
    parted = parted if parted is not None and shape == parted.shape else None
    found = placed.updates.home(name, key, shape if parted is None else parted.part, dtype)
    if found is None:
        return None
    each, values = found
    whole, mine = (next(slot for slot in chunk.slots if slot.name == name) for chunk in (each.state.chunk, each.state.own))
    start = each.state.start_in(whole, mine) if parted is not None or shape == whole.shape else 0
    flat = values.view(-1)[: _filled(values.numel(), start, parted)]
    if values.numel() and not len(flat):
        return None
    return _of_moment(each, mine, key, shape, start, flat, parted)


def _of_moment(
    each: OptimizerState, mine: Slot, key: str, shape: tuple[int, ...], start: int, flat: Tensor, parted: Parted | None
) -> Stretch:
    found = f"{mine.name}/{key}", shape, start, flat, None, (), each.state.index, True, parted
    is_there = each.state.disk is not None and flat.is_meta
    return DiskStretch(*found, each.state.disk, key, mine.offset) if is_there else Stretch(*found)


def _filled(elements: int, start: int, parted: Parted | None) -> int:
    """How many of a part's elements, from `start` of it on, are the tensor's: what fills up the last rank's part is nobody's."""
    return elements if parted is None else max(min(elements, parted.elements - start), 0)


def spread(placed: Placed) -> None:
    """After all was set: what lies on the disk goes there, and a rank that has all of a chunk gets what others have set of it.
    All ranks do it together."""
    placed.updates.put_away()
    for state in placed.state.chunks:
        whole, own = state.on_device, state.own_on_device
        if state.is_replicated and whole is not None and own is not None:
            state.ranks.gather("small", state.sharding, whole, own, Label(Task.GATHER, state.index))
