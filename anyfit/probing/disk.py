"""Disk rates by requests in flight, past the page cache (O_DIRECT), as chunks of model state will be read and written: one way
alone, and both at once.

Requests are 4 MiB, aligned, one thread for each in flight. A few GiB are written in all, however fast the disk is, to a file that
is unlinked as soon as it is open, so that nothing is left behind whatever happens. It is written once before it is measured, so
that writes are overwrites: what training does from its second step on. A file system that refuses O_DIRECT is measured through
the page cache, and its source says so.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from anyfit.values.calibration import Figure
from anyfit.values.engine import DISK_BLOCK_BYTES, DISK_REQUESTS
from anyfit.values.machine import ASSUMED_ENDURANCE, Disk

from .meters import Effort, Ladder, Meter

Way = Literal["read", "write"]
REQUEST_BYTES = DISK_BLOCK_BYTES
DEPTHS = (1, 4, DISK_REQUESTS)
LEAST_REQUESTS = 2 * max(DEPTHS)
FREE_SHARE = 0.05  # of the free space, at most, is written
FILL_SECONDS = 1.5  # a slow disk gets a smaller file
READING_SECONDS = 0.08
MOST_REQUESTS = 48  # of one reading, each way: 192 MiB
FREE_ERROR = 0.05  # others write too

DIRECT = "measured"
THROUGH_CACHE = "measured: through the page cache, because this file system refuses O_DIRECT"


@contextlib.contextmanager
def disk_ladders(folders: Iterable[Path], effort: Effort) -> Iterator[DiskLadders | None]:
    """Measures the first folder that can be written; None where none can, or none has room."""
    for folder in folders:
        opened = _opened(folder)
        if opened is None:
            continue
        ladders = DiskLadders(folder, *opened, DEPTHS if effort.stride == 1 else DEPTHS[-1:])
        try:
            if ladders.fill(min(effort.disk_bytes, FREE_SHARE * shutil.disk_usage(folder).free)):
                yield ladders
                return
        finally:
            ladders.close()
    yield None


def _opened(folder: Path) -> tuple[int, str] | None:
    """A descriptor of a file that no longer has a name, and how its rates are to be marked."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix="anyfit-probe-")
    except OSError:
        return None
    os.close(handle)
    try:
        with contextlib.suppress(OSError, AttributeError):  # no O_DIRECT in the file system, or in the operating system
            return os.open(name, os.O_RDWR | os.O_DIRECT), DIRECT
        return os.open(name, os.O_RDWR), THROUGH_CACHE
    finally:
        Path(name).unlink()


class DiskLadders:
    """Rates of an open file, with as many aligned buffers as requests may be in flight."""

    def __init__(self, folder: Path, descriptor: int, source: str, depths: Sequence[int]) -> None:
        self.folder, self.descriptor, self.source = folder, descriptor, source
        self.read, self.write = self._ladder(depths, "read"), self._ladder(depths, "write")
        self.both = self._ladder(depths[-1:], "read", "write")
        self.requests = 0  # that the file holds
        self.buffers = [mmap.mmap(-1, REQUEST_BYTES) for _ in range(2 * max(DEPTHS))]
        content = os.urandom(REQUEST_BYTES)  # some drives compress
        for buffer in self.buffers:
            buffer[:] = content
        self.threads = ThreadPoolExecutor(len(self.buffers), thread_name_prefix="anyfit-probe-disk")

    def close(self) -> None:
        self.threads.shutdown()
        os.close(self.descriptor)
        for buffer in self.buffers:
            buffer.close()

    def fill(self, wanted_bytes: float) -> bool:
        """Whether the file now holds enough to measure."""
        deadline = time.perf_counter() + FILL_SECONDS
        wanted = int(wanted_bytes) // REQUEST_BYTES
        if wanted < LEAST_REQUESTS:
            return False
        with contextlib.suppress(OSError):  # a quota, or a full disk: what was written may still do
            while self.requests < wanted and time.perf_counter() < deadline:
                self._transfer("write", 0, self.requests)
                self.requests += 1
        return self.requests >= LEAST_REQUESTS

    @property
    def meters(self) -> list[Meter]:
        return self.read.meters + self.write.meters + self.both.meters

    def disk(self) -> Disk:
        free = Figure(float(shutil.disk_usage(self.folder).free), FREE_ERROR, "measured")
        read, write, both = (each.curve(self.source) for each in (self.read, self.write, self.both))
        return Disk(free, read, write, both, ASSUMED_ENDURANCE)

    def _ladder(self, depths: Sequence[int], *ways: Way) -> Ladder:
        label = f"disk {' and '.join(ways)}"
        return Ladder({depth: Meter(label, functools.partial(self._bytes_per_second, ways, depth)) for depth in depths})

    def _bytes_per_second(self, ways: tuple[Way, ...], depth: int) -> float:
        """Of all ways together, with so many requests in flight each way."""
        if "read" in ways and self.source != DIRECT and hasattr(os, "posix_fadvise"):
            os.fsync(self.descriptor)
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        deadline = start + READING_SECONDS

        def keep_in_flight(lane: int) -> int:
            way, first, done = ways[lane // depth], lane % depth, 0
            if way != ways[0]:
                first += self.requests // 2  # nobody reads what is being written
            while done == 0 or (time.perf_counter() < deadline and done < MOST_REQUESTS // depth):
                self._transfer(way, lane, (first + done * depth) % self.requests)
                done += 1
            return done

        requests = sum(self.threads.map(keep_in_flight, range(len(ways) * depth)))
        if "write" in ways and self.source != DIRECT:
            os.fsync(self.descriptor)
        return requests * REQUEST_BYTES / (time.perf_counter() - start)

    def _transfer(self, way: Way, lane: int, request: int) -> None:
        operation = os.preadv if way == "read" else os.pwritev
        moved = operation(self.descriptor, [self.buffers[lane]], request * REQUEST_BYTES)
        if moved != REQUEST_BYTES:
            raise OSError(f"the disk moved {moved} of {REQUEST_BYTES} bytes in one {way}")
