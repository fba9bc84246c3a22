"""Host memory: which cores are near which part of it, and huge pages of it.

A machine of several sockets, or a socket that is divided into clusters, has a part of the memory beside each: a *node*. Cores
reach another node's memory over a link that is slower than all of them together. A page lies on the node of the thread that
touches it first. With huge pages a kernel that goes through gigabytes looks up fewer addresses, and pinning is quicker.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anyfit.values.units import show_bytes

FOLDER = Path("/sys/devices/system/node")
HUGE_PAGE_BYTES = 2**21
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python does not name it
Nodes = tuple[tuple[int, ...], ...]  # the processors of each, at least one

_kernel: Any = ctypes.CDLL(None, use_errno=True)  # its calls are made without Python's lock
if sys.platform == "linux":
    _pointer, _size, _number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    _kernel.mmap.argtypes, _kernel.mmap.restype = [_pointer, _size, *[_number] * 3, ctypes.c_int64], _pointer
    _kernel.munmap.argtypes, _kernel.munmap.restype = [_pointer, _size], _number
    _kernel.madvise.argtypes, _kernel.madvise.restype = [_pointer, _size, _number], _number


def nodes(folder: Path = FOLDER, allowed: Collection[int] | None = None) -> Nodes:
    """The processors that the calling thread may use (or `allowed`), by node; all in one where the system does not say."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    try:
        found = [[each for each in _numbers(file.read_text()) if each in allowed] for file in files]
    except (OSError, ValueError):
        found = []
    if sorted(each for node in found for each in node) != sorted(allowed):
        return (tuple(sorted(allowed)),)
    return tuple(tuple(node) for node in found if node)


def _numbers(ranges: str) -> list[int]:
    """`0-3,8` as the kernel writes it, or nothing: 0, 1, 2, 3, 8."""
    pairs = [part.partition("-") for part in ranges.strip().split(",") if part]
    return [each for first, _, last in pairs for each in range(int(first), int(last or first) + 1)]


def in_huge_pages(size: int) -> Tensor:
    """Bytes, all zero, that take no memory before they are written; in small pages where the kernel has no others. A forked child
    does not have them before `show_to_children`: what is written while a data loader's workers live would be in memory twice."""
    if sys.platform != "linux":
        return torch.zeros(max(size, 1), dtype=torch.uint8)
    return Mapped.reserve(max(size, 1)).bytes()


def show_to_children(memory: Tensor | torch.UntypedStorage) -> None:
    """Children that are forked from now on have it too, as any other memory."""
    if sys.platform == "linux":
        advise(memory, mmap.MADV_DOFORK)


class Mapped:
    """Addresses that are given back when no tensor is there any more.

    The mapping is private: of a shared one, which is Python's own default, the kernel makes huge pages only where it is set up
    to. A forked child, which has nothing at these addresses, gives back nothing: other memory of its own may lie there by then.
    """

    def __init__(self, address: int, size: int) -> None:
        self._address, self._size, self._process = address, size, os.getpid()
        # What numpy makes an array of, and keeps as long as the array.
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    @classmethod
    def reserve(cls, size: int) -> Mapped:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _kernel.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise MemoryError(f"no {show_bytes(size)} of addresses: {os.strerror(ctypes.get_errno())}; see ulimit -v")
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            _kernel.madvise(address, size, advice)
        return cls(address, size)

    def bytes(self) -> Tensor:
        """All of them, those too that are cut off later."""
        return torch.from_numpy(np.asarray(self))

    def cut(self, size: int) -> Mapped | None:
        """The first so many bytes, which go back by themselves from now on; None where there are fewer. A multiple of pages."""
        if size > self._size:
            return None
        first = Mapped(self._address, size)
        self._address, self._size = self._address + size, self._size - size
        return first

    def __del__(self, _kernel: Any = _kernel, _process: Any = os.getpid) -> None:  # which outlive what a module holds
        if _process() == self._process:
            _kernel.munmap(self._address, self._size)


def touch(memory: Tensor, nodes: Nodes) -> Tensor:
    """The same, all pages touched where the kernel can. Each of several nodes gets the bytes that its threads will update."""
    if len(nodes) == 1:
        _populate(memory)
        return memory
    threads = [threading.Thread(target=_populate_from, args=each, name="anyfit pages") for each in parts(memory, nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return memory


def parts(memory: Tensor, nodes: Nodes) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The bytes of each node, beside its processors: in proportion to these, as adamw.cpp divides, to the nearest huge page."""
    address, cores, cores_so_far, start = memory.data_ptr(), sum(map(len, nodes)), 0, 0
    for processors in nodes:
        cores_so_far += len(processors)
        exact = address + memory.numel() * cores_so_far // cores
        nearest = (exact + HUGE_PAGE_BYTES // 2) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES - address
        end = memory.numel() if cores_so_far == cores else min(max(nearest, start), memory.numel())
        if start < end:
            yield processors, memory[start:end]
        start = end


def _populate_from(processors: tuple[int, ...], memory: Tensor) -> None:
    with contextlib.suppress(OSError):  # none is allowed any more: memory is then further away, and that is all
        os.sched_setaffinity(0, processors)
    _populate(memory)


def _populate(memory: Tensor) -> None:
    advise(memory, MADV_POPULATE_WRITE)


def advise(memory: Tensor | torch.UntypedStorage, advice: int) -> bool:
    """Whether the kernel has followed it; without Python's lock, which mmap's own would keep."""
    return sys.platform == "linux" and not _kernel.madvise(memory.data_ptr(), len(memory), advice)
