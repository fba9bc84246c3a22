"""A checkpoint on its way to the disk: on the thread that asked for it, or beside the steps that follow.

**Beside.** All ranks plan together what each of them writes; after that no collective is needed. What the next update would
change is copied into host memory that the plan leaves free, chunk by chunk on threads of its own, and an update waits for the
copy of its chunk alone: forward and backward hide most of it. Then the files are written. That all ranks have theirs is told
through the key-value store, and rank 0 puts the checkpoint in its place.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from anyfit.placing.stretches import Stretch, copy_on_host
from anyfit.placing.tiers import HostSlabs

from .boxes import boxes_of, whole
from .files import MANIFEST, FileRecord
from .storage import Writer, lie, results_of
from .team import Post, Team

COPIERS = 8  # threads: one does not keep up with the memory
NICE = 10  # of threads that write beside the steps: those that train come first
ALIGN_BYTES = 64


class Saving:
    """One checkpoint that is being written; `result` waits for it, and raises what went wrong."""

    def __init__(
        self, writer: Writer, planner: SavePlanner, plans: list[SavePlan], metadata: Metadata, team: Team | None
    ) -> None:
        self.folder: Path = writer.folder
        self.is_beside = False
        self.seconds = 0.0  # that it took in all
        self.then: Callable[[], None] = lambda: None  # on rank 0, once it is in its place
        self.copies: Copies | None = None
        self._writer, self._planner, self._plans, self._metadata, self._team = writer, planner, plans, metadata, team
        self._index = 0 if team is None else team.index
        self._post: Post | None = None if team is None else team.post()
        self._done: Future[None] = Future()
        self._written, self._lock = 0, threading.Lock()
        self._began = time.monotonic()
        self.bytes = sum(entry.bytes for _, entry in lie(self._plan.items))  # of this rank
        writer.wrote = self._wrote

    @property
    def _plan(self) -> SavePlan:
        return self._plans[self._index]

    def _wrote(self, count: int) -> None:
        with self._lock:
            self._written += count

    @property
    def share(self) -> float:
        """How much of this rank's part is written."""
        return min(self._written / max(self.bytes, 1), 1.0)

    @property
    def is_done(self) -> bool:
        return self._done.done()

    @property
    def has_failed(self) -> bool:
        return self.is_done and self._done.exception() is not None

    def result(self) -> None:
        """Waits until it is in its place."""
        self.wait()
        self._done.result()

    def wait(self) -> None:
        """However it ends."""
        with self._waiting():
            wait([self._done])

    def _waiting(self) -> AbstractContextManager[None]:
        what = f"word that {self.folder.name} is written"
        return contextlib.nullcontext() if self._team is None else self._team.waiting(what)

    def finish(self) -> None:
        """Writes it here and now."""
        self._writer.pinned = self._writer.device.type == "cuda"
        with self._waiting():
            self._run()
        self.result()

    def begin(self, copies: Copies) -> None:
        """Writes it beside what comes: once its copies are made, from them."""
        self.is_beside, self.copies = True, copies
        threading.Thread(target=self._run_beside, name="anyfit saving").start()

    def _run_beside(self) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own, as have those it starts
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        self._run()

    def _run(self) -> None:
        try:
            with on(self._writer.device):
                self._write()
            self.seconds = time.monotonic() - self._began
            self._done.set_result(None)
        except BaseException as error:
            if self._index == 0:
                self._writer.aside.remove()
            self._done.set_exception(error)
            if self.is_beside and not threading.main_thread().is_alive():
                print(f"anyfit: {error}", file=sys.stderr, flush=True)  # nobody else will say it
            if not isinstance(error, Exception):
                raise

    def _write(self) -> None:
        word: dict[str, Any]
        try:
            if self.copies is not None:
                self.copies.result()
            record = self._writer.write(self._plan, self._planner)
            word = {"bytes": record.bytes, "blocks": record.blocks}
        except Exception as error:
            word = {"error": _in_words(error)}
        if self._post is None:
            failed = word.get("error") or self._conclude([word])
        else:
            self._post.tell(json.dumps(word))
            if self._index == 0:
                failed = self._conclude([json.loads(each) for each in self._post.all_told()])
                self._post.conclude(failed or "")
            else:
                failed = self._post.conclusion()
        if failed:
            raise OSError(could_not_write(self.folder, failed))

    def _conclude(self, words: list[dict[str, Any]]) -> str:
        """Puts the files of all ranks together as a checkpoint; what went wrong, if anything."""
        failed = [f"rank {rank}: {word['error']}" for rank, word in enumerate(words) if "error" in word]
        if failed:
            self._writer.aside.remove()
            return "; ".join(failed) if len(words) > 1 else words[0]["error"]
        try:
            records = [FileRecord(word["bytes"], tuple(word["blocks"])) for word in words]
            self._writer.finish(self._metadata, [results_of(*each) for each in zip(self._plans, records, strict=True)])
        except Exception as error:
            self._writer.aside.remove()
            return _in_words(error)
        with contextlib.suppress(OSError):
            self.then()
        return ""


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def could_not_write(folder: Path, why: object) -> str:
    kept = f"; the checkpoint that was there is untouched in {folder}" if (folder / MANIFEST).exists() else ""
    return f"could not write a checkpoint to {folder}: {why}{kept}"


class Saved:
    """A tensor of the state as torch.distributed.checkpoint sees it: boxes of a whole, read when they are written."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch
        end = stretch.start + stretch.elements
        self._boxes = boxes_of(stretch.shape, stretch.start, end) if stretch.elements else [whole(stretch.shape)]
        sizes = itertools.accumulate((box.elements for box in self._boxes), initial=0)
        self._starts = dict(zip((box.offsets for box in self._boxes), sizes, strict=False))

    def __create_write_items__(self, name: str, _object: Any) -> list[WriteItem]:
        shape, properties = torch.Size(self.stretch.shape), TensorProperties(self.stretch.dtype)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, shape)
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Part:
        assert index.offset is not None
        return Part(self, self._starts[tuple(index.offset)])


@dataclass(frozen=True)
class Part:
    """A box of it."""

    saved: Saved
    first: int

    def read(self, start: int, end: int, out: Tensor) -> None:
        self.saved.stretch.read(self.first + start, self.first + end, out)


class Planner(DefaultSavePlanner):
    """Plans what each rank writes: of what several have, one does."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn].__get_tensor_shard__(index)


class Copies:
    """Host memory for one copy of what updates change of a rank's state, taken once; and what is being copied into it.

    An update may change a chunk once `wait_for` it has returned.
    """

    def __init__(self, slabs: HostSlabs, device: torch.device) -> None:
        self._slabs, self._device = slabs, device
        self._memory: dict[int, Tensor] = {}  # by chunk
        self._copying: dict[int, Future[None]] = {}

    def has_room(self, saved: Iterable[Saved]) -> bool:
        needed = {chunk: _bytes(of) for chunk, of in _by_chunk(saved).items()}
        return self._slabs.has_room(sum(size for chunk, size in needed.items() if self._lacks(chunk, size)))

    def _lacks(self, chunk: int, size: int) -> bool:
        return chunk not in self._memory or len(self._memory[chunk]) < size

    def begin(self, saved: Iterable[Saved], order: Callable[[int], Any]) -> None:
        """Starts to copy what these are read from, in the order in which chunks will be updated."""
        by_chunk = _by_chunk(saved)
        pool = ThreadPoolExecutor(COPIERS, "anyfit copying")
        self._copying = {chunk: pool.submit(self._copy, chunk, by_chunk[chunk]) for chunk in sorted(by_chunk, key=order)}
        pool.shutdown(wait=False)

    def _copy(self, chunk: int, saved: Sequence[Saved]) -> None:
        parts = [part for each in saved for part in _parts(each)]
        with on(self._device):
            if self._lacks(chunk, _bytes(saved)):
                self._memory[chunk] = self._slabs.apart(_bytes(saved), crosses=any(part.is_cuda for part in parts))
            memory, at, homes = self._memory[chunk], 0, []
            stream = torch.cuda.Stream() if any(part.is_cuda for part in parts) else None
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                for part in parts:
                    homes.append(memory[at : at + part.nbytes].view(part.dtype))
                    if part.is_cuda:
                        homes[-1].copy_(part, non_blocking=True)
                    else:
                        copy_on_host(part, homes[-1])
                    at += _aligned(part.nbytes)
            if stream is not None:
                stream.synchronize()
        left = iter(homes)
        for each in saved:
            values = next(left)
            each.stretch = replace(each.stretch, values=values, low=None if each.stretch.low is None else next(left), others=())

    def wait_for(self, chunk: int) -> None:
        """However it ends: a copy that fails is the save's concern, and not the update's."""
        if chunk in self._copying:
            wait([self._copying[chunk]])

    def result(self) -> None:
        """Waits for all; raises what went wrong."""
        for each in list(self._copying.values()):
            each.result()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """A thread's own GPU: each begins with the first."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _by_chunk(saved: Iterable[Saved]) -> dict[int, list[Saved]]:
    found: dict[int, list[Saved]] = {}
    for each in saved:
        found.setdefault(each.stretch.chunk, []).append(each)
    return found


def _parts(saved: Saved) -> list[Tensor]:
    return [part for part in (saved.stretch.values, saved.stretch.low) if part is not None]


def _bytes(saved: Iterable[Saved]) -> int:
    return sum(_aligned(part.nbytes) for each in saved for part in _parts(each))


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
