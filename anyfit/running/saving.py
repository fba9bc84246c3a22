"""A checkpoint on its way to the disk: on the thread that asked for it, or beside the steps that follow.

**Beside.** All ranks plan together what each writes; after that no collective is needed. What the next update would change is
copied into host memory that the plan leaves free, each byte where it will lie in the file, chunk by chunk on threads of its own.
An update waits for the copy of its own chunk, and forward and backward hide most of that; where updates write a second
generation, the saved one stays whole until the step after next. Then the file is written from that image, with no further copy.
Ranks tell each other through the key-value store when theirs is written, and rank 0 puts the checkpoint in its place.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import json
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from anyfit.kernels.bytes import move_all, populate
from anyfit.kernels.pages import in_huge_pages
from anyfit.placing.disk_state import DiskChunk, Still
from anyfit.placing.stretches import DiskStretch, Fetcher
from anyfit.placing.tiers import HostSlabs

from .acts import Post
from .files import MANIFEST, Content, FileRecord, Image, Piece, Readable, joined, padded
from .saved import Part, StillPart
from .storage import Writer, results_of
from .team import Team

COPIERS = 8  # threads: one does not keep up with the memory
WRITERS = 2  # threads that write beside the steps: more would only take cores from those that train
NICE = 10  # of work beside the steps that can wait: what trains comes first
TOUCHED_AT_ONCE = 2**21  # bytes: while the kernel is at them, whoever else wants memory of this process waits
PAGE_BYTES = 4096


class Saving:
    """One checkpoint that is being written; `result` waits for it, and raises what went wrong."""

    def __init__(self, writer: Writer, content: Content, plans: list[SavePlan], metadata: Metadata, team: Team | None) -> None:
        self.folder: Path = writer.folder
        self.is_beside = False
        self.seconds = 0.0  # that it took in all
        self.copied_seconds = 0.0  # until the steps could change what they like
        self.then: Callable[[], None] = lambda: None  # on rank 0, once it is in its place
        self.copies: Copies | None = None
        self._writer, self._plans, self._metadata, self._team = writer, plans, metadata, team
        self._index = 0 if team is None else team.index
        self._post: Post | None = None if team is None else team.post()
        self._done: Future[None] = Future()
        self._written, self._lock = 0, threading.Lock()
        self._began = time.monotonic()
        self.bytes = content.bytes  # of this rank's file
        self._content: Content | None = content  # while it is not written
        writer.wrote = self._wrote

    def _wrote(self, count: int) -> None:
        with self._lock:
            self._written += count

    @property
    def share(self) -> float:
        return self._written / self.bytes

    @property
    def is_done(self) -> bool:
        return self._done.done()

    @property
    def has_failed(self) -> bool:
        return self.is_done and self._done.exception() is not None

    def result(self) -> None:
        self.wait()
        atexit.unregister(self._last_word)
        self._done.result()

    def _last_word(self) -> None:
        """A script that has ended without asking is told what went wrong: Python ends when the writing has."""
        if self.has_failed:
            print(f"anyfit: {self._done.exception()}", file=sys.stderr, flush=True)

    def wait(self) -> None:
        """Waits for it, however it ends."""
        with self._waiting():
            wait([self._done])

    def _waiting(self) -> AbstractContextManager[None]:
        what = f"word that {self.folder.name} is written"
        return contextlib.nullcontext() if self._team is None else self._team.store.waiting(what)

    def finish(self) -> None:
        with self._waiting():
            self._run()
        self.result()

    def begin(self, copies: Copies) -> None:
        """Writes it beside the steps that follow, from its copies."""
        self.is_beside, self.copies, self._writer.threads = True, copies, WRITERS
        atexit.register(self._last_word)
        threading.Thread(target=self._run, name="anyfit saving").start()

    def _run(self) -> None:
        try:
            self._write()
            self.seconds = time.monotonic() - self._began
            self._done.set_result(None)
        except BaseException as error:
            if self._index == 0:
                self._writer.aside.remove()
            self._done.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _write(self) -> None:
        word: dict[str, Any]
        try:
            if self.copies is not None:
                self.copies.result()
                self.copied_seconds = time.monotonic() - self._began
            assert self._content is not None
            image = None if self.copies is None else self.copies.image
            record = self._writer.write(self._plans[self._index], self._content, image)
            word = {"bytes": record.bytes, "blocks": record.blocks}
        except Exception as error:
            word = {"error": _in_words(error)}
        finally:
            if self.copies is not None:
                self.copies.let_go()
        self._content = None
        if self._post is None:
            failed = self._conclude([word])
        else:
            failed = self._post.settle(json.dumps(word), lambda words: self._conclude([json.loads(each) for each in words]))
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


class Copies:
    """Host memory for one copy of what updates change of a rank's state, taken once; and what is being copied into it.

    It is an image of the rank's file: what is not copied (weights that are not trained) are pages in it that nobody touches, and
    that take no memory. Of a chunk with state on the disk only weights are copied: the rest is held there until it is read beside
    the steps, and put together with them. An update may change a chunk once `wait_for` it has returned.
    """

    def __init__(self, slabs: HostSlabs, device: torch.device) -> None:
        self._slabs, self._device = slabs, device
        self._memory: Tensor | None = None
        self._held = 0  # bytes of it that count
        self._touching: threading.Thread | None = None
        self._ends = ctypes.c_int32()  # not 0: memory that is being made ready is not wanted any more
        self._copying: dict[int, Future[None]] = {}
        self._fetchers: queue.SimpleQueue[Fetcher] = queue.SimpleQueue()
        for _ in range(COPIERS):
            self._fetchers.put(Fetcher(past_cache=True))
        self.image: Image | None = None  # of the file at hand, once `result` has returned
        self._still: dict[int, Still] = {}  # by chunk, what lies on the disk, while the file is written
        self.waited_seconds = 0.0  # for the copies at hand, by updates

    def has_room(self, content: Content) -> bool:
        return self._slabs.has_room(_bytes(content) - self._held)

    def make_room(self, size: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Where there is room: takes memory for a file of so many bytes, of which these are copied, and has a thread touch it."""
        held = sum(end - start for start, end in ranges)
        if self._memory is None and not self._copying and self._slabs.has_room(held):
            self._take(size, held)
            self._touching = threading.Thread(target=self._touch, args=(self._memory, ranges), name="anyfit room", daemon=True)
            self._touching.start()

    @property
    def is_touching(self) -> bool:
        return self._touching is not None and self._touching.is_alive()

    def _take(self, size: int, held: int) -> None:
        """Takes memory of this size, `held` of which counts; keeps what there is, where it is large enough."""
        if self._memory is None or len(self._memory) < size:
            self._slabs.give_back(self._held)
            self._memory, self._held = None, 0
        self._slabs.hold_apart(max(held - self._held, 0))
        self._held = max(held, self._held)
        if self._memory is None:
            self._memory = in_huge_pages(padded(size))

    def _touch(self, memory: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
        for _ in range(COPIERS):
            by = self._fetchers.get()
            by.make_ready(self._device)
            self._fetchers.put(by)
        for start, end in ranges:
            whole = memory[start - start % PAGE_BYTES : end]
            if populate(whole, TOUCHED_AT_ONCE, nice=NICE, ends=self._ends):
                continue
            for part in whole.split(TOUCHED_AT_ONCE):
                if self._ends.value:
                    return
                part.numpy()[::PAGE_BYTES] = 0  # a kernel that cannot; nothing is written there yet

    def begin(self, content: Content, order: Callable[[int], Any], finish: Callable[[int], None]) -> None:
        """Starts to copy what updates change, in the order in which they will; of each chunk once `finish` has returned."""
        by_chunk: dict[int, list[Piece]] = {}
        for piece in _changing(content):
            by_chunk.setdefault(_part(piece).stretch.chunk, []).append(piece)
        self._hold(content)
        self.image, self.waited_seconds = None, 0.0
        pool = ThreadPoolExecutor(COPIERS, "anyfit copying")
        ready = pool.submit(self._make_ready, content)
        self._copying = {
            chunk: pool.submit(self._copy, by_chunk[chunk], ready, functools.partial(finish, chunk))
            for chunk in sorted(by_chunk, key=order)
        }
        pool.shutdown(wait=False)

    def _hold(self, content: Content) -> None:
        """What lies on the disk is from now on read as it is, whatever the steps write."""
        chunks: dict[int, DiskChunk] = {}
        elements: dict[int, Counter[str]] = {}
        for _, piece, part in _on_disk(content):
            stretch = _of_disk(part)
            assert isinstance(stretch.disk, DiskChunk)
            chunks[stretch.chunk] = stretch.disk
            elements.setdefault(stretch.chunk, Counter())[stretch.key] += (piece.end - piece.start) // piece.dtype.itemsize
        self._still = {index: chunk.still(elements[index]) for index, chunk in chunks.items()}

    def let_go(self) -> None:
        """Nobody reads what lies on the disk any more."""
        while self._still:
            self._still.popitem()[1].let_go()

    def _make_ready(self, content: Content) -> Image:
        if self._touching is not None:
            self._touching.join()
            self._touching = None
        self._take(padded(content.bytes), _bytes(content))
        assert self._memory is not None
        for number, piece, part in _on_disk(content):
            stretch = _of_disk(part)
            still = self._still[stretch.chunk]
            high = None if stretch.low is None else _place(piece, stretch, self._memory)
            source = StillPart(replace(part, stretch=stretch.held(still)), still, stretch.key, high)
            content.pieces[number] = replace(piece, source=source)
        image = Image(self._memory, [content.header, *_changing(content)])
        self._read(content.header.source, self._memory[: content.header.end])
        self.image = image
        return image

    def _copy(self, pieces: Sequence[Piece], ready: Future[Image], finish: Callable[[], None]) -> None:
        """One chunk. What is on the host is copied in one call at a low priority, so that what trains comes first."""
        image, moves = ready.result(), []
        finish()
        for piece in pieces:
            part = _part(piece)
            if isinstance(part.stretch, DiskStretch):
                place, part = _place(piece, part.stretch, image.memory), replace(part, stretch=part.stretch.high)
            else:
                place = image.memory[piece.start : piece.end].view(piece.dtype)
            if part.stretch.is_on_device:
                self._read(part, place)
            else:
                moves.append(part.move(place))
        move_all(moves, past_cache=True, nice=NICE)

    def _read(self, source: Readable, place: Tensor) -> None:
        by = self._fetchers.get()
        try:
            source.read(0, place.numel(), place, by)
        finally:
            self._fetchers.put(by)

    def wait_for(self, chunk: int) -> None:
        """Waits for a copy, however it ends: a failed one is the save's concern, not the update's."""
        copying = self._copying.get(chunk)
        if copying is not None and not copying.done():
            began = time.monotonic()
            wait([copying])
            self.waited_seconds += time.monotonic() - began

    def result(self) -> None:
        for each in list(self._copying.values()):
            each.result()

    def close(self) -> None:
        """Memory that is being made ready is not wanted any more."""
        self._ends.value = 1


def _changing(content: Content) -> list[Piece]:
    """What the next update changes in memory: a save beside the steps copies it."""
    return [each for each in content.pieces if isinstance(each.source, Part) and each.source.stretch.copied_bytes]


def _on_disk(content: Content) -> list[tuple[int, Piece, Part]]:
    """What lies on the disk, by number."""
    found = [(number, piece, piece.source) for number, piece in enumerate(content.pieces) if isinstance(piece.source, Part)]
    return [each for each in found if isinstance(each[2].stretch, DiskStretch)]


def _of_disk(part: Part) -> DiskStretch:
    assert isinstance(part.stretch, DiskStretch)
    return part.stretch


def _part(piece: Piece) -> Part:
    assert isinstance(piece.source, Part)
    return piece.source


def _copied_end(piece: Piece) -> int:
    """Where what is copied of it ends in the memory for it."""
    return piece.start + (piece.end - piece.start) // piece.dtype.itemsize * _part(piece).stretch.copied_bytes


def _place(piece: Piece, stretch: DiskStretch, memory: Tensor) -> Tensor:
    """For the half of it that does not lie on the disk."""
    return memory[piece.start : _copied_end(piece)].view(stretch.values.dtype)


def _copied(content: Content) -> list[tuple[int, int]]:
    return [(0, content.header.end), *((each.start, _copied_end(each)) for each in _changing(content))]


def copied_ranges(content: Content) -> list[tuple[int, int]]:
    """What a save beside the steps copies of a file."""
    return joined(_copied(content))


def _bytes(content: Content) -> int:
    return sum(end - start for start, end in _copied(content))
