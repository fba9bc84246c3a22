"""Host memory in huge pages: a kernel that goes through gigabytes looks up fewer addresses, and pinning is quicker.

Where memory has several nodes, a page lies on that of the thread which touches it first.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from .cores import Nodes

HUGE_PAGE_BYTES = 2**21
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python does not name it


def in_huge_pages(size: int) -> Tensor:
    """Bytes, all zero, that take no memory before they are written. In small pages where the kernel has no others."""
    memory = mmap.mmap(-1, max(size, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def touch(memory: Tensor, nodes: Nodes) -> Tensor:
    """The same, all pages touched, which keep what is written meanwhile; where the kernel cannot, whoever writes first does. Of
    several nodes each gets the part of the bytes that its threads will update, were they one array."""
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


def advise(memory: Tensor, advice: int) -> bool:
    """Whether the kernel has followed it; without Python's lock, which mmap's own would keep."""
    if sys.platform != "linux":
        return False
    return not ctypes.CDLL(None).madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(len(memory)), advice)
