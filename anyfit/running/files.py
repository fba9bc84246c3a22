"""The files of a checkpoint: safetensors and JSON, written block by block beside their place.

    manifest.json              of every other file its bytes, and the CRC-32 of each 16 MiB of them; written last
    metadata.json              every tensor: dtype, shape, and its boxes: where they begin, how large they are, in which rank's
                               file, at which byte
    data-<rank>.safetensors    the boxes that a rank wrote: a whole tensor under its name, a part of one as name@offsets
    …                          JSON of whoever saves

A file is a row of blocks. The writer fills one after another, and threads add them up and write them, so that neither reading the
state nor checksums wait for the disk, nor it for them; no more of the state than a few blocks is ever held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import re
import shutil
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anyfit.values.tensor_files import header_bytes

from .boxes import Box

VERSION = 2
MANIFEST, METADATA = "manifest.json", "metadata.json"
DATA = re.compile(r"data-\d{5,7}\.safetensors")
BLOCK_BYTES = 2**24
THREADS = 4  # that add up and write blocks, or read them
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A box of a tensor in a file."""

    tensor: str
    dtype: torch.dtype
    box: Box
    is_whole: bool
    start: int  # in bytes, after the header

    @property
    def bytes(self) -> int:
        return self.box.elements * self.dtype.itemsize

    @property
    def name(self) -> str:
        return self.tensor if self.is_whole else f"{self.tensor}@{','.join(map(str, self.box.offsets))}"


@dataclass(frozen=True)
class FileRecord:
    """What a manifest says of a file."""

    bytes: int
    blocks: tuple[int, ...]  # CRC-32 of each

    def to_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "crc32": [f"{each:08x}" for each in self.blocks]}

    @classmethod
    def from_json(cls, document: Any, block_bytes: int) -> FileRecord:
        size, blocks = document["bytes"], tuple(int(each, 16) for each in document["crc32"])
        if type(size) is not int or size < 0 or len(blocks) != -(-size // block_bytes):
            raise ValueError(f"{size!r} bytes in {len(blocks)} blocks of {block_bytes}")
        return cls(size, blocks)


def data_file(rank: int) -> str:
    return f"data-{rank:05d}.safetensors"


def header_of(entries: Sequence[Entry]) -> dict[str, Any]:
    """What a safetensors file begins with."""
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for each in entries:
        offsets = [each.start, each.start + each.bytes]
        found[each.name] = {"dtype": DTYPES[each.dtype], "shape": list(each.box.sizes), "data_offsets": offsets}
    return found


class Readable(Protocol):
    """What can be written without being there as a whole."""

    def read(self, start: int, end: int, out: Tensor) -> None:
        """Some of its elements, in row-major order, into a flat tensor on the host."""
        ...


class BlockFile:
    """A file that is filled block by block; threads write what is full."""

    def __init__(self, path: Path, wrote: Callable[[int], None], *, pinned: bool = False) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._wrote, self._pinned = wrote, pinned
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[Tensor, int, int] | None] = queue.SimpleQueue()
        # Not a pool of concurrent.futures: those take no work any more while Python waits, at its end, for a save under way.
        self._threads = [threading.Thread(target=self._work, name="anyfit saving", daemon=True) for _ in range(THREADS)]
        self._made = 0
        self._block: Tensor | None = None
        self._filled = self._bytes = 0
        self._sums: dict[int, int] = {}  # by where a block begins
        self._turn = threading.Lock()  # the kernel takes one at a time as well, and has the others burn their cores meanwhile
        self._failed: BaseException | None = None
        for thread in self._threads:
            thread.start()

    def room(self) -> Tensor:
        """What is left of the block at hand."""
        if self._failed is not None:
            raise self._failed
        if self._block is None:
            if self._made < 2 * THREADS and self._free.empty():
                self._made += 1
                self._free.put(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._pinned))
            self._block, self._filled = self._free.get(), 0
        return self._block[self._filled :]

    def fill(self, count: int) -> None:
        """So many bytes of the room have been filled."""
        self._filled += count
        if self._filled == BLOCK_BYTES:
            self._send()

    def write(self, data: bytes) -> None:
        while data:
            room = self.room()
            part = data[: len(room)]
            room[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
            self.fill(len(part))
            data = data[len(part) :]

    def _send(self) -> None:
        assert self._block is not None
        self._full.put((self._block, self._filled, self._bytes))
        self._block, self._bytes = None, self._bytes + self._filled

    def _work(self) -> None:
        while (work := self._full.get()) is not None:
            block, count, at = work
            try:
                if self._failed is None:
                    self._add_up_and_write(block.numpy().data[:count], at)
            except BaseException as error:
                self._failed = error
            finally:
                self._free.put(block)

    def _add_up_and_write(self, data: memoryview, at: int) -> None:
        self._sums[at] = zlib.crc32(data)
        done = 0
        with self._turn:
            while done < len(data):
                done += os.pwrite(self._file, data[done:], at + done)
        self._wrote(len(data))

    def finish(self) -> FileRecord:
        """All that was filled is on the disk."""
        if self._block is not None and self._filled:
            self._send()
        self._stop()
        if self._failed is not None:
            raise self._failed
        os.fsync(self._file)
        return FileRecord(self._bytes, tuple(self._sums[at] for at in sorted(self._sums)))

    def _stop(self) -> None:
        for _ in self._threads:
            self._full.put(None)
        while self._threads:
            self._threads.pop().join()

    def close(self) -> None:
        self._stop()
        os.close(self._file)


def write_tensors(
    path: Path, parts: Sequence[tuple[Entry, Readable]], wrote: Callable[[int], None], *, pinned: bool = False
) -> FileRecord:
    """A safetensors file of these boxes, little by little."""
    file = BlockFile(path, wrote, pinned=pinned)
    try:
        file.write(header_bytes(header_of([entry for entry, _ in parts])))
        for entry, source in parts:
            done, size = 0, entry.dtype.itemsize
            while done < entry.box.elements:
                room = file.room()
                count = min(len(room) // size, entry.box.elements - done)
                source.read(done, done + count, room[: count * size].view(entry.dtype))
                file.fill(count * size)
                done += count
        return file.finish()
    finally:
        file.close()


def write_text(path: Path, text: str) -> FileRecord:
    data = text.encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    starts = range(0, len(data), BLOCK_BYTES)
    return FileRecord(len(data), tuple(zlib.crc32(data[start : start + BLOCK_BYTES]) for start in starts))


# ---------------------------------------------------------------------- whole or not there


class Aside:
    """The folder that a checkpoint is written in, beside its place; locked, so that nobody takes it for one that was left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.path = self.folder.with_name(f".{self.folder.name}.writing")
        self._lock: int | None = None

    def refuse_foreign(self) -> None:
        folder = self.folder
        if folder.exists() and not (folder / MANIFEST).exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} exists and is not a checkpoint; choose another folder, or remove it")

    def make(self) -> None:
        self.refuse_foreign()
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        remove_left_behind(self.folder.parent)
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        self._lock = os.open(self.path, os.O_RDONLY)
        with contextlib.suppress(OSError):  # some network file systems lock no folders
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def put_in_place(self) -> None:
        """A folder cannot replace another in one move: the old one steps aside first, and is looked for there too."""
        sync(self.path)
        old = stepped_aside(self.folder)
        if self.folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            self.folder.rename(old)
        self.path.rename(self.folder)
        sync(self.folder.parent)
        shutil.rmtree(old, ignore_errors=True)
        self._unlock()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def stepped_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def remove_left_behind(parent: Path) -> None:
    """What processes left in a folder of checkpoints that were killed while they saved."""
    for path in parent.glob(".*.writing"):
        with contextlib.suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where somebody is writing
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(handle)
    for path in parent.glob(".*.old"):
        folder = path.with_name(path.name.removeprefix(".").removesuffix(".old"))
        if (folder / MANIFEST).exists():
            shutil.rmtree(path, ignore_errors=True)
        elif (path / MANIFEST).exists() and not folder.exists():
            with contextlib.suppress(OSError):
                path.rename(folder)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
