"""What a checkpoint writes of the state: tensors as torch.distributed.checkpoint plans them, each part read from where it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from anyfit.kernels.bytes import Move, move_all
from anyfit.placing.disk_state import Still
from anyfit.placing.stretches import Fetcher, Runs, Stretch

from .boxes import Strip, strips_of, whole


class Saved:
    """A tensor of the state as torch.distributed.checkpoint sees it: boxes of a whole, read when they are written."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch

    @cached_property
    def _strips(self) -> dict[tuple[int, ...], Strip]:
        """By the offsets of a box in the tensor, where its elements are in the stretch."""
        stretch = self.stretch
        found = strips_of(stretch.shape, stretch.start, stretch.start + stretch.elements, stretch.parted)
        return {each.box.offsets: each for each in found or [Strip(whole(stretch.shape), 0, 0, 0)]}

    def __create_write_items__(self, name: str, _object: Any) -> list[WriteItem]:
        shape, properties = torch.Size(self.stretch.shape), TensorProperties(self.stretch.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, shape)
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = (each.box for each in self._strips.values())
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Part:
        assert index.offset is not None
        return Part(self.stretch, self._strips[tuple(index.offset)])


@dataclass(frozen=True)
class Part:
    stretch: Stretch
    strip: Strip

    def read(self, start: int, end: int, out: Tensor, by: Fetcher) -> None:
        first, strip = self.strip.start, self.strip
        if strip.run == strip.box.elements:
            self.stretch.read(first + start, first + end, out, by)
        else:
            self.stretch.read_runs(Runs(*strip[1:]), start, end, out, by)

    def move(self, out: Tensor) -> Move:
        """All of it, as elements of `out`, where it is on the host."""
        first, strip = self.strip.start, self.strip
        if strip.run == strip.box.elements:
            return self.stretch.move(first, first + out.numel(), out)
        return self.stretch.move_runs(Runs(*strip[1:]), out)


@dataclass(frozen=True)
class StillPart:
    """A part of what lies on the disk, as it was when the save began."""

    part: Part
    still: Still
    key: str
    high: Tensor | None  # a copy of the half that does not lie there

    def read(self, start: int, end: int, out: Tensor, by: Fetcher) -> None:
        if self.high is None:
            self.part.read(start, end, out, by)
        else:
            low = torch.empty(end - start, dtype=torch.int16)
            self.part.read(start, end, low, by)
            move_all([Move(self.high[start:end], low, out)], past_cache=by.past_cache)
        self.still.was_read(self.key, end - start)


class Planner(DefaultSavePlanner):
    """Plans what each rank writes: of replicas one does."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)
