"""The few things of CUDA that the probe uses, behind types: torch.cuda's own constructors have none.

Pinned memory is registered here, not taken from torch's host allocator, which would keep it pinned for the rest of the
process.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import torch

_cuda: Any = torch.cuda


def is_in_use() -> bool:
    """Whether this process has touched CUDA."""
    return bool(_cuda.is_initialized())


def timing_event() -> torch.cuda.Event:
    event: torch.cuda.Event = _cuda.Event(enable_timing=True)
    return event


def sleeping_event() -> torch.cuda.Event:
    """An event whose waiter sleeps: a spinning one would take a core from what is measured."""
    event: torch.cuda.Event = _cuda.Event(blocking=True)
    return event


def seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def new_stream(device: torch.device) -> torch.cuda.Stream:
    stream: torch.cuda.Stream = _cuda.Stream(device)
    return stream


@contextlib.contextmanager
def pinned(size: int) -> Iterator[torch.Tensor]:
    """Bytes of host memory that the device reaches without a detour."""
    # Pages of its own: a page that two buffers share cannot be registered for both.
    buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8).fill_(1)
    runtime = _cuda.cudart()
    error = int(runtime.cudaHostRegister(buffer.data_ptr(), size, 0))
    if error:
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")  # CUDA reports the failure once more, at the next kernel: let it be this one
        raise MemoryError(f"{size} bytes of host memory could not be pinned (CUDA error {error}); try: ulimit -l unlimited")
    try:
        yield buffer
    finally:
        torch.cuda.synchronize()
        runtime.cudaHostUnregister(buffer.data_ptr())
