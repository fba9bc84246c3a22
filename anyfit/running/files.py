"""The files of a checkpoint: safetensors and JSON, written block by block beside their place.

    manifest.json              of every other file its bytes, and the CRC-32 of each 16 MiB of them; written last
    metadata.json              every tensor: dtype, shape, and its boxes (offsets, sizes, whose rank's file, at which byte)
    data-<rank>.safetensors    the boxes that a rank wrote: a whole tensor under its name, a part of one as name@offsets
    …                          JSON of whoever saves

A file is a row of blocks. Each thread takes the next one, puts it together in a buffer, computes its checksum and writes it past
the page cache. So only a few blocks of the state are held; what lies in memory as it will in the file is written from there.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from anyfit.kernels.bytes import copy, crc32
from anyfit.kernels.pages import in_huge_pages
from anyfit.placing import weights
from anyfit.placing.stretches import Fetcher
from anyfit.values.disk_folder import free_bytes
from anyfit.values.tensor_files import header_bytes
from anyfit.values.units import show_bytes

from .boxes import Box

VERSION, FORMER_VERSION = 3, 2  # both are read
MANIFEST, METADATA = "manifest.json", "metadata.json"
DATA = re.compile(r"data-\d{5,7}\.safetensors")
BLOCK_BYTES = 2**24
THREADS = 8  # that write blocks, or read them, while training waits: the disk has its four when others put theirs together
DIRECT_BYTES = 4096  # writes past the page cache begin and end at multiples of these
DTYPES = {dtype: name for name, dtype in weights.DTYPES.items()}  # as safetensors names them
MOST_ITEM_BYTES = max(dtype.itemsize for dtype in DTYPES)


@dataclass(frozen=True)
class Entry:
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
    found: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for each in entries:
        offsets = [each.start, each.start + each.bytes]
        found[each.name] = {"dtype": DTYPES[each.dtype], "shape": list(each.box.sizes), "data_offsets": offsets}
    return found


class Readable(Protocol):
    """What can be written piece by piece."""

    def read(self, start: int, end: int, out: Tensor, by: Fetcher) -> None:
        """Some of its elements, in row-major order, into a flat tensor on the host."""
        ...


@dataclass(frozen=True)
class Whole:
    tensor: Tensor

    def read(self, start: int, end: int, out: Tensor, _by: Fetcher) -> None:
        part = self.tensor.detach().reshape(-1)[start:end]
        if part.is_cpu:
            copy(part, out)
        else:  # after whatever has been asked of the device so far
            out.copy_(part)


@dataclass(frozen=True)
class Piece:
    """Bytes of a file that come from one source."""

    start: int
    end: int
    dtype: torch.dtype
    source: Readable

    def read(self, start: int, end: int, out: Tensor, by: Fetcher) -> None:
        """Those from byte `start` of the file to byte `end`: whole elements, since blocks begin at multiples of their sizes."""
        size = self.dtype.itemsize
        assert (start - self.start) % size == (end - self.start) % size == 0
        self.source.read((start - self.start) // size, (end - self.start) // size, out.view(self.dtype), by)


class Content:
    """A data file before it is written: its header, and its boxes one after another."""

    def __init__(self, parts: Sequence[tuple[Entry, Readable]]) -> None:
        header = header_bytes(header_of([entry for entry, _ in parts]))
        self.header = Piece(0, len(header), torch.uint8, Whole(torch.frombuffer(bytearray(header), dtype=torch.uint8)))
        self.pieces = [self.header]
        for entry, source in parts:
            start = len(header) + entry.start
            assert start == self.pieces[-1].end
            assert start % entry.dtype.itemsize == 0
            if entry.bytes:
                self.pieces.append(Piece(start, start + entry.bytes, entry.dtype, source))
        self._starts = [piece.start for piece in self.pieces]

    @property
    def bytes(self) -> int:
        return self.pieces[-1].end

    def between(self, start: int, end: int) -> Sequence[Piece]:
        return self.pieces[bisect.bisect_right(self._starts, start) - 1 : bisect.bisect_left(self._starts, end)]


class Image:
    """Memory where some of a file's bytes, those of `pieces`, lie as they will in the file."""

    def __init__(self, memory: Tensor, pieces: Iterable[Piece]) -> None:
        self.memory = memory
        self.ranges = joined((piece.start, piece.end) for piece in pieces)

    def holds(self, start: int, end: int) -> bool:
        index = bisect.bisect_right(self.ranges, start, key=lambda each: each[0]) - 1
        return index >= 0 and end <= self.ranges[index][1]


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """
    >>> joined([(4, 6), (0, 2), (2, 4), (9, 10)])
    [(0, 6), (9, 10)]
    """
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found


def padded(size: int) -> int:
    """Up to a multiple of DIRECT_BYTES."""
    return -(-size // DIRECT_BYTES) * DIRECT_BYTES


class BlockFile:
    """A safetensors file of this content, what the image holds from there. Threads take block by block; an error ends all."""

    def __init__(self, path: Path, content: Content, wrote: Callable[[int], None], image: Image | None = None) -> None:
        assert BLOCK_BYTES % MOST_ITEM_BYTES == 0
        self._content, self._wrote, self._image = content, wrote, image
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._direct: int | None = None  # the same, past the page cache
        if BLOCK_BYTES % DIRECT_BYTES == 0 and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # where the file system does not know it; what else is wrong the first write meets
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        self._left = iter(range(0, content.bytes, BLOCK_BYTES))
        self._sums: dict[int, int] = {}  # by where a block begins
        self._lock = threading.Lock()
        # Through the page cache the kernel takes one at a time as well, and has the others burn their cores meanwhile.
        self._turn = threading.Lock()
        self._failed: BaseException | None = None

    def write(self, threads: int) -> FileRecord:
        if self._direct is not None:  # as long as it will be: writes that lengthen a file wait for each other
            os.ftruncate(self._file, padded(self._content.bytes))
        # Not a pool of concurrent.futures: those take no work any more while Python waits, at its end, for a save under way.
        working: list[threading.Thread] = []
        try:
            for _ in range(threads):
                thread = threading.Thread(target=self._work, name="anyfit saving", daemon=True)
                thread.start()
                working.append(thread)
            for thread in working:
                thread.join()
        except BaseException as error:
            self._fail(error)
            for thread in working:
                thread.join()
        if self._failed is not None:
            raise self._failed
        os.ftruncate(self._file, self._content.bytes)
        os.fsync(self._file)
        return FileRecord(self._content.bytes, tuple(self._sums[at] for at in sorted(self._sums)))

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failed = self._failed or error

    def _work(self) -> None:
        try:
            by, room = Fetcher(), None
            while self._failed is None:
                with self._lock:
                    start = next(self._left, None)
                if start is None:
                    return
                end = min(start + BLOCK_BYTES, self._content.bytes)
                if self._image is not None and self._image.holds(start, end):
                    block = self._image.memory[start : start + padded(end - start)]
                else:
                    room = in_huge_pages(padded(BLOCK_BYTES)) if room is None else room
                    block = room[: padded(end - start)]
                    self._put_together(start, end, block, by)
                self._add_up_and_write(block, end - start, start)
        except BaseException as error:
            self._fail(error)

    def _put_together(self, start: int, end: int, block: Tensor, by: Fetcher) -> None:
        for piece in self._content.between(start, end):
            first, last = max(piece.start, start), min(piece.end, end)
            place = block[first - start : last - start]
            if self._image is not None and self._image.holds(first, last):
                copy(self._image.memory[first:last], place)
            else:
                piece.read(first, last, place, by)

    def _add_up_and_write(self, block: Tensor, count: int, at: int) -> None:
        """`block` is longer than `count` where it has to be, to be written past the page cache."""
        data, done = block.numpy().data, 0
        self._sums[at] = crc32(data[:count])
        try:
            while self._direct is not None and done < count:
                done += os.pwrite(self._direct, data[done:], at + done)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it lets one open a file so, and not write it, or not such a rest
                raise
        with self._turn:
            while done < count:
                done += os.pwrite(self._file, data[done:count], at + done)
        self._wrote(count)

    def close(self) -> None:
        for file in (self._file, self._direct):
            if file is not None:
                os.close(file)


def write_text(path: Path, text: str) -> FileRecord:
    data = text.encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    starts = range(0, len(data), BLOCK_BYTES)
    return FileRecord(len(data), tuple(crc32(data[start : start + BLOCK_BYTES]) for start in starts))


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

    def refuse_without_room(self, size: int) -> None:
        free = free_bytes(self.path)
        if size > free:
            self.remove()
            raise OSError(
                f"it takes {show_bytes(size)}, and its disk has {show_bytes(free)} left; save to another disk, or remove older "
                "checkpoints"
            )

    def put_in_place(self) -> None:
        """A folder cannot replace another in one move: the old one steps aside first, and is looked for there too."""
        sync(self.path)
        old = stepped_aside(self.folder)
        if self.folder.exists():
            _remove(old)
            self.folder.rename(old)
        self.path.rename(self.folder)
        sync(self.folder.parent)
        _remove(old)
        self._unlock()

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove(path: Path) -> None:
    """A folder, or a link to one, which may be anybody's."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def stepped_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def remove_left_behind(parent: Path) -> None:
    """Removes what processes left that were killed while they saved."""
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
