"""A file for state that memory has no room for: without a name, past the page cache, in blocks with checksums.

The file has no name from the start, so nothing of it is left however the process ends. It is a row of blocks of one size. What is
written goes to blocks that nothing lies in, in the order in which they became free, and is there when all of it is: whoever
writes keeps what he had until then, and gives it back after. So what is broken off changes nothing. Every block has a checksum,
which is kept in memory and compared when the block is read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anyfit.kernels.bytes import crc32
from anyfit.kernels.pages import in_huge_pages
from anyfit.values.engine import DISK_BLOCK_BYTES, DISK_REQUESTS
from anyfit.values.graph import PAGE_BYTES
from anyfit.values.units import show_bytes

from .disk_rate import DiskRate
from .tiers import HostSlabs

BLOCK_BYTES, REQUESTS = DISK_BLOCK_BYTES, DISK_REQUESTS
LOOKED_AT = 16  # blocks that are kept for whoever reads a piece at a time
OTHER_FOLDER = "name a folder on another disk with --disk-folder, or anyfit.start(disk_folder=)"

# The calls to the system, which tests have fail.
_read_at: Callable[[int, Sequence[Any], int], int] = os.preadv
_write_at: Callable[[int, Sequence[Any], int], int] = os.pwritev


class DiskError(OSError):
    """What went wrong with state on the disk: what, where and why."""


def padded(size: int) -> int:
    """What past the page cache is read and written at once is a multiple of this."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def room_for(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros that can be read and written past the page cache."""
    size = elements * dtype.itemsize
    return in_huge_pages(padded(size))[:size].view(dtype)


def with_padding(flat: Tensor) -> Tensor:
    """The bytes of such a tensor, up to the next multiple."""
    return flat.view(torch.uint8).as_strided((padded(flat.nbytes),), (1,))


@dataclass(frozen=True, eq=False)
class Stored:
    """Bytes that are all on the disk."""

    size: int  # in bytes, with padding; the last block may have more
    blocks: tuple[int, ...]
    checksums: tuple[int, ...]
    memory: Tensor | None = None  # where they are instead: the disk would not take them


class DiskFile:
    """`limit_bytes` in all. What it cannot write may be kept in host memory, of `slabs`."""

    def __init__(self, folder: Path, block_bytes: int, limit_bytes: int, slabs: HostSlabs) -> None:
        self.folder, self.block_bytes = folder, min(padded(block_bytes), BLOCK_BYTES)
        self._limit, self._slabs = limit_bytes, slabs
        self._file, self.is_direct = _opened(folder)
        self._pools = [ThreadPoolExecutor(REQUESTS, f"anyfit disk {way}") for way in ("reads", "writes")]
        self.close = weakref.finalize(self, _close, self._file, self._pools)
        self._lock = threading.Condition()  # and word of blocks that become free
        self._count = 0  # blocks that the file has
        self.written_bytes = 0
        self._free: deque[int] = deque()
        self._held: Counter[Stored] = Counter()  # by whoever reads them beside the steps
        self._late: set[Stored] = set()  # of these, what is to become free
        self._looked_at: OrderedDict[int, Tensor] = OrderedDict()
        self.rate = DiskRate()

    @property
    def bytes(self) -> int:
        return self._count * self.block_bytes

    def blocks_of(self, size: int) -> int:
        return -(-padded(size) // self.block_bytes)

    def reserve(self, blocks: int) -> None:
        """Takes room on the disk for so many more blocks, or says how much it lacks."""
        size, before = blocks * self.block_bytes, self.bytes
        if before + size > self._limit:
            raise DiskError(
                f"the plan's disk is {show_bytes(self._limit)}, and {show_bytes(before + size)} are needed in {self.folder}; "
                "allow more, or place less on the disk"
            )
        free = os.fstatvfs(self._file)
        if size > free.f_bavail * free.f_frsize:
            raise DiskError(
                f"{show_bytes(before + size)} of optimizer state are to lie in {self.folder}, where "
                f"{show_bytes(before + free.f_bavail * free.f_frsize)} are free; {OTHER_FOLDER}"
            )
        try:
            _take_room(self._file, before, size)
        except OSError as error:
            raise DiskError(f"{show_bytes(size)} could not be taken in {self.folder}: {error}; {OTHER_FOLDER}") from error
        self._free.extend(range(self._count, self._count + blocks))
        self._count += blocks

    def write(self, flats: Sequence[Tensor], what: str) -> list[Stored]:
        """Each, in blocks that nothing lies in; those that are held are waited for where the disk has no room for more."""
        parts = [with_padding(flat).split(self.block_bytes) for flat in flats]
        with self._lock:
            while (missing := sum(map(len, parts)) - len(self._free)) > 0:
                try:
                    self.reserve(missing)
                except DiskError:
                    if not self._late:
                        raise
                    self._lock.wait()
            taken = [[self._free.popleft() for _ in part] for part in parts]
        pairs = [
            (memory, block) for part, blocks in zip(parts, taken, strict=True) for memory, block in zip(part, blocks, strict=True)
        ]
        try:
            checksums = iter(_all(self._pools[1], self._write_block, [(*pair, what) for pair in pairs]))
        except BaseException:
            with self._lock:
                self._free.extend(block for _, block in pairs)
                self._lock.notify_all()
            raise
        sizes = [padded(flat.nbytes) for flat in flats]
        with self._lock:
            self.written_bytes += sum(sizes)
        return [
            Stored(size, tuple(blocks), tuple(next(checksums) for _ in blocks)) for size, blocks in zip(sizes, taken, strict=True)
        ]

    def keep(self, flats: Sequence[Tensor]) -> list[Stored]:
        """The same in host memory."""
        self._slabs.hold_apart(sum(padded(flat.nbytes) for flat in flats))
        return [Stored(padded(flat.nbytes), (), (), with_padding(flat).clone()) for flat in flats]

    def free(self, stored: Iterable[Stored]) -> None:
        """Nothing lies there any more, as soon as nobody holds it."""
        with self._lock:
            for each in stored:
                if each in self._held:
                    self._late.add(each)
                else:
                    self._free_now(each)

    def _free_now(self, stored: Stored) -> None:
        for block in stored.blocks:
            self._looked_at.pop(block, None)
        self._free.extend(stored.blocks)
        self._lock.notify_all()
        if stored.memory is not None:
            self._slabs.give_back(stored.memory.nbytes)

    def hold(self, stored: Stored) -> None:
        """It stays as it is until it is let go, whatever is written meanwhile."""
        with self._lock:
            self._held[stored] += 1

    def let_go(self, stored: Stored) -> None:
        with self._lock:
            self._held[stored] -= 1
            if self._held[stored]:
                return
            del self._held[stored]
            if stored in self._late:
                self._late.discard(stored)
                self._free_now(stored)

    def read(self, given: Sequence[tuple[Stored, Tensor]], what: str) -> None:
        """Each into a flat tensor of its size."""
        reads: list[tuple[Tensor, int, int, str]] = []
        for stored, flat in given:
            if stored.memory is not None:
                with_padding(flat).copy_(stored.memory)
                continue
            parts = with_padding(flat).split(self.block_bytes)
            for part, block, checksum in zip(parts, stored.blocks, stored.checksums, strict=True):
                reads.append((part, block, checksum, what))
        _all(self._pools[0], self._read_block, reads)

    def some(self, stored: Stored, start: int, end: int, what: str) -> Tensor:
        """Some of its bytes. Blocks that were looked at last are not read again."""
        if stored.memory is not None:
            return stored.memory[start:end].clone()
        found, size = torch.empty(end - start, dtype=torch.uint8), self.block_bytes
        for number in range(start // size, -(-end // size)):
            first, last = max(start, number * size), min(end, (number + 1) * size)
            block = self._look_at(stored, number, what)
            found[first - start : last - start] = block[first - number * size : last - number * size]
        return found

    def _look_at(self, stored: Stored, number: int, what: str) -> Tensor:
        block = stored.blocks[number]
        with self._lock:
            known = self._looked_at.get(block)
        if known is None:
            known = in_huge_pages(min(self.block_bytes, stored.size - number * self.block_bytes))
            self._read_block(known, block, stored.checksums[number], what)
            with self._lock:
                self._looked_at[block] = known
                while len(self._looked_at) > LOOKED_AT:
                    self._looked_at.popitem(last=False)
        return known

    def _write_block(self, memory: Tensor, block: int, what: str) -> int:
        checksum = crc32(memory)
        with self.rate.moving(memory.nbytes):
            self._move(_write_at, memory, block, f"{what} could not be written to")
        return checksum

    def _read_block(self, memory: Tensor, block: int, checksum: int, what: str) -> None:
        with self.rate.moving(memory.nbytes):
            self._move(_read_at, memory, block, f"{what} could not be read from")
        found = crc32(memory)
        if found != checksum:
            raise self._failed(f"{what} could not be read from", f"its checksum is {found:08x}, and was {checksum:08x}")

    def _move(self, call: Callable[[int, Sequence[Any], int], int], memory: Tensor, block: int, what: str) -> None:
        """All of it. A call may move less than it was asked to, and is then asked for the rest."""
        array: Any = memory.numpy()
        view, done = memoryview(array), 0
        assert memory.data_ptr() % PAGE_BYTES == 0
        while done < len(view):
            try:
                moved = call(self._file, [view[done:]], block * self.block_bytes + done)
            except OSError as error:
                raise self._failed(what, str(error)) from error
            moved -= moved % PAGE_BYTES
            if moved <= 0:
                raise self._failed(what, f"it ends after {done} of {len(view)} bytes")
            done += moved

    def _failed(self, what: str, why: str) -> DiskError:
        return DiskError(f"{what} anyfit's file in {self.folder}: {why}")


def _all(pool: ThreadPoolExecutor, call: Callable[..., Any], given: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The results of such calls, once nothing is at work any more. Each thread takes the next: a future for each block would have
    threads wait for Python's lock."""
    results, left = [None] * len(given), deque(enumerate(given))

    def work() -> None:
        while True:
            try:
                number, one = left.popleft()
            except IndexError:
                return
            try:
                results[number] = call(*one)
            except BaseException:
                left.clear()
                raise

    working = [pool.submit(work) for _ in range(min(REQUESTS, len(given)))]
    wait(working)
    for each in working:
        each.result()
    return results


def _opened(folder: Path) -> tuple[int, bool]:
    """A file that has no name, and whether it is past the page cache: not every file system can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for flags in (getattr(os, "O_DIRECT", 0), 0):
            with contextlib.suppress(OSError):
                return _unnamed(folder, flags), bool(flags)
        return _unnamed(folder, 0), False
    except OSError as error:
        raise DiskError(f"no file for optimizer state could be made in {folder}: {error}; {OTHER_FOLDER}") from error


def _unnamed(folder: Path, flags: int) -> int:
    with contextlib.suppress(OSError, AttributeError):  # a file system, or an operating system, that has none
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | flags, 0o600)
    handle, name = tempfile.mkstemp(dir=folder, prefix=".anyfit-")
    os.close(handle)
    try:
        return os.open(name, os.O_RDWR | flags)
    finally:
        Path(name).unlink()


def _take_room(file: int, start: int, size: int) -> None:
    """So that no later write finds the disk full; where the file system cannot promise that, it may."""
    try:
        if size:
            os.posix_fallocate(file, start, size)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.ftruncate(file, start + size)


def _close(file: int, pools: Sequence[ThreadPoolExecutor]) -> None:
    for pool in pools:
        pool.shutdown()
    os.close(file)
