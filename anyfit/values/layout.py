"""Where each parameter lies: flat chunks in order of use. Pure arithmetic, so a plan knows its bytes before a run takes them.

A chunk holds parameters of one kind: same dtype, same optimizer group, trainable or not, cut over the tensor axis or not, on the
same places of a pipeline; of cut ones, this rank's parts. Its weights, low halves, gradient sums and moments are separate flat
buffers that share offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from .precision import Precision, precision_of

ALIGN_ELEMENTS = 128  # every parameter starts on a 256-byte boundary even in bf16: vector loads and CUDA kernels like that
Kind: TypeAlias = tuple[str, int, bool, int, bool, tuple[int, ...]]  # dtype, element_bytes, trainable, group, is_cut, holders
CHUNK_BYTES = 64 * 2**20  # of weights; larger ones only when a single parameter is


@dataclass(frozen=True)
class Slot:
    """One parameter inside a chunk."""

    name: str
    shape: tuple[int, ...]
    offset: int  # in elements, as `elements`
    elements: int


@dataclass(frozen=True)
class Chunk:
    dtype: str
    element_bytes: int
    trainable: bool
    group: int  # of the optimizer; -1 outside every group
    elements: int  # padding included
    slots: tuple[Slot, ...]
    is_cut: bool = False  # over the tensor axis: other ranks of it have other parts
    holders: tuple[int, ...] = ()  # places along the pipeline axis that have it, where more than one has

    @property
    def bytes(self) -> int:
        return self.elements * self.element_bytes

    @property
    def is_updated(self) -> bool:
        return self.trainable and self.group >= 0

    @property
    def precision(self) -> Precision:
        return precision_of(self.dtype)

    @property
    def is_split(self) -> bool:
        """Its masters are two halves."""
        return self.is_updated and self.precision.is_split

    def stretch(self, index: int, shards: int) -> tuple[int, int]:
        """(start, end) of one of so many equal parts, in elements."""
        size = self.elements // shards
        return index * size, (index + 1) * size

    def part(self, index: int, shards: int) -> Chunk:
        """What lies in that stretch, as a chunk of its own: parameters are cut where it ends, and flat."""
        if shards == 1:
            return self
        first, last = self.stretch(index, shards)
        pieces = []
        for slot in self.slots:
            start, end = max(slot.offset, first), min(slot.offset + slot.elements, last)
            if start < end:
                pieces.append(Slot(slot.name, (end - start,), start - first, end - start))
        return replace(self, elements=last - first, slots=tuple(pieces))


@dataclass(frozen=True)
class Placeable:
    """What a layout needs to know of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    element_bytes: int
    trainable: bool
    group: int
    is_cut: bool = False  # over the tensor axis; the shape is that of a rank's part
    holders: tuple[int, ...] = ()  # places along the pipeline axis that use it, where more than one does

    @property
    def kind(self) -> Kind:
        return self.dtype, self.element_bytes, self.trainable, self.group, self.is_cut, self.holders


def lay_out(parameters: Iterable[Placeable], chunk_bytes: int, ranks: int = 1) -> tuple[Chunk, ...]:
    """Parameters in the given order, in chunks of at most `chunk_bytes` (a larger parameter stands alone) that so many ranks can
    shard."""
    chunks: list[Chunk] = []
    open_chunks: dict[Kind, list[Slot]] = {}

    def close(kind: Kind) -> None:
        slots = open_chunks.pop(kind)
        elements = _rounded(_end(slots), ALIGN_ELEMENTS * ranks)
        dtype, element_bytes, trainable, group, is_cut, holders = kind
        chunks.append(Chunk(dtype, element_bytes, trainable, group, elements, tuple(slots), is_cut, holders))

    for parameter in parameters:
        kind = parameter.kind
        elements = math.prod(parameter.shape)
        slots = open_chunks.get(kind, [])
        if slots and _rounded(_end(slots) + elements, ALIGN_ELEMENTS * ranks) * parameter.element_bytes > chunk_bytes:
            close(kind)
            slots = []
        slots.append(Slot(parameter.name, parameter.shape, _end(slots), elements))
        open_chunks[kind] = slots
    for kind in list(open_chunks):
        close(kind)
    return tuple(chunks)


def _end(slots: list[Slot]) -> int:
    return _rounded(slots[-1].offset + slots[-1].elements, ALIGN_ELEMENTS) if slots else 0


def _rounded(elements: int, multiple: int) -> int:
    return -(-elements // multiple) * multiple
