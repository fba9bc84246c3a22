"""Storage for torch.distributed.checkpoint with JSON metadata: its own is a pickle, which may run anything when it is read.

What torch.distributed.checkpoint saves and loads, DTensors in any layout too, `Writer` and `Reader` write and read:
dcp.save(state, storage_writer=Writer(folder)), dcp.load(state, storage_reader=Reader(folder)).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from . import files
from .boxes import Box, whole
from .files import DTYPES, MANIFEST, Aside, BlockFile, Content, Entry, FileRecord, Image, Whole, data_file, write_text
from .stored import Opened, StoredBox


def lie(items: Iterable[WriteItem]) -> list[tuple[WriteItem, Entry]]:
    """Where the boxes of a file lie: each at a multiple of its elements' size, else in their order."""
    found: list[tuple[WriteItem, Entry]] = []
    end = 0
    for item in sorted(items, key=lambda item: -_data(item).properties.dtype.itemsize):
        data = _data(item)
        if data.properties.dtype not in DTYPES:
            raise TypeError(f"a checkpoint cannot hold {item.index.fqn}: {data.properties.dtype}")
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        is_whole = box == whole(tuple(data.size))
        found.append((item, Entry(item.index.fqn, data.properties.dtype, box, is_whole, end)))
        end += found[-1][1].bytes
    return found


def _data(item: WriteItem) -> Any:
    if item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor; a checkpoint keeps what else there is as JSON")
    return item.tensor_data


def numbered(plans: Iterable[SavePlan]) -> list[SavePlan]:
    """Each with the rank whose file it is of."""
    return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]


@dataclass
class Writer(StorageWriter):
    """Writes a checkpoint to `folder`, where it is whole or is not."""

    folder: Path
    documents: Mapping[str, str] = field(default_factory=dict)  # other files of it, JSON, by name
    moments: Container[str] = ()  # names of tensors that are an optimizer's
    extra: Container[str] = ()  # and of those that are neither its nor the model's
    threads: int = files.THREADS  # that write a rank's file
    wrote: Callable[[int], None] = lambda _count: None  # is told of bytes on their way to the disk, from any thread

    def __post_init__(self) -> None:
        self.aside = Aside(self.folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.folder = Path(checkpoint_id)
            self.aside = Aside(self.folder)

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        if is_coordinator:
            self.aside.make()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return numbered(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        found: Future[list[WriteResult]] = Future()
        found.set_result(results_of(plan, self.write(plan, content_of(lie(plan.items), planner))))
        return found

    def write(self, plan: SavePlan, content: Content, image: Image | None = None) -> FileRecord:
        """This rank's file; from the image what that holds of it."""
        if not self.aside.path.is_dir():
            raise FileNotFoundError(f"{self.aside.path}, which rank 0 has made, is not seen here: all ranks save to one place")
        path = self.aside.path / data_file(plan.storage_data)
        with closing(BlockFile(path, content, self.wrote, image)) as file:
            return file.write(self.threads)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the other files, once all ranks have theirs, and puts the checkpoint in its place."""
        records: dict[str, FileRecord] = {}
        where: dict[MetadataIndex, tuple[int, int]] = {}
        for result in (each for rank in results for each in rank):
            rank, start, record = result.storage_data
            records[data_file(rank)] = record
            where[result.index] = rank, start
        sections: dict[str, dict[str, Any]] = {"weights": {}, "optimizer": {}, "extra": {}}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            boxes = [[list(each.offsets), list(each.sizes), *where[MetadataIndex(name, each.offsets)]] for each in tensor.chunks]
            found = {"dtype": DTYPES[tensor.properties.dtype], "shape": list(tensor.size), "boxes": boxes}
            section = "optimizer" if name in self.moments else "extra" if name in self.extra else "weights"
            sections[section][name] = found
        path = self.aside.path
        for name, text in {**self.documents, files.METADATA: json.dumps(sections, separators=(",", ":"))}.items():
            records[name] = write_text(path / name, text)
        manifest = {"anyfit": "checkpoint", "version": files.VERSION, "block_bytes": files.BLOCK_BYTES}
        manifest |= {"files": {name: records[name].to_json() for name in sorted(records)}}
        write_text(path / MANIFEST, json.dumps(manifest, indent=1))
        self.aside.put_in_place()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(checkpoint_id)


def content_of(lying: Iterable[tuple[WriteItem, Entry]], planner: SavePlanner) -> Content:
    """What a rank writes: the planner's data at these places in the file."""
    parts = []
    for item, entry in lying:
        data: Any = planner.resolve_data(item)
        parts.append((entry, Whole(data) if isinstance(data, Tensor) else data))
    return Content(parts)


def results_of(plan: SavePlan, record: FileRecord) -> list[WriteResult]:
    return [WriteResult(item.index, entry.bytes, (plan.storage_data, entry.start, record)) for item, entry in lie(plan.items)]


class Reader(StorageReader):
    def __init__(self, folder: str | Path | Opened) -> None:
        self._opened = folder if isinstance(folder, Opened) else Opened(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._opened = Opened(Path(checkpoint_id))

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        where: dict[MetadataIndex, StoredBox] = {}
        for name, tensor in self._opened.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(each.box.offsets), torch.Size(each.box.sizes)) for each in tensor.boxes]
            tensors[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), torch.Size(tensor.shape), chunks)
            where |= {MetadataIndex(name, each.box.offsets): each for each in tensor.boxes}
        return Metadata(tensors, storage_data=where)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        self._where: dict[MetadataIndex, StoredBox] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            if item.type != LoadItemType.TENSOR:
                raise TypeError(f"{item.storage_index.fqn}: a checkpoint holds tensors, and nothing that would be unpickled")
            part = Box(tuple(item.storage_offsets), tuple(item.lengths)).slices
            stored = self._opened.view(self._opened.tensors[item.storage_index.fqn], self._where[item.storage_index])[part]
            target = planner.resolve_tensor(item).detach()
            target.copy_(stored)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / MANIFEST).exists()
