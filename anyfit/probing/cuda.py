"""The few things of CUDA that the probe uses, behind types: torch.cuda's own constructors have none.

There are two clocks. `kernel_seconds` is the device's own time: all launches are queued behind a nap of the device, so
that it then runs without ever waiting for the host. `paced_seconds` is what a stream of launches takes, with the host
setting the pace where it is the slower one.

Pinned memory is registered here, not taken from torch's host allocator, which would keep it pinned for the rest of the process.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

_cuda: Any = torch.cuda

# The driver's queue takes 1024 launches and then makes the host wait. One run may launch a dozen kernels.
LONGEST_BURST = 64
NAP_CYCLES_PER_SECOND = 2e9  # a slower clock makes a longer nap, which does no harm
LEAST_NAP_SECONDS, LONGEST_NAP_SECONDS = 200e-6, 20e-3


def is_in_use() -> bool:
    """Whether this process has touched CUDA."""
    return bool(_cuda.is_initialized())


def new_event(**options: bool) -> torch.cuda.Event:
    event: torch.cuda.Event = _cuda.Event(**options)
    return event


def seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def kernel_seconds(work: Callable[[], object], times: int) -> float:
    """Seconds that one of so many runs keeps the device busy."""
    times = min(times, LONGEST_BURST)
    nap = LEAST_NAP_SECONDS
    if times > 1:  # what runs alone is long itself
        begun = time.perf_counter()
        work()
        nap += 1.5 * times * (time.perf_counter() - begun)
    while True:
        nap = min(nap, LONGEST_NAP_SECONDS)
        start, end = new_event(enable_timing=True), new_event(enable_timing=True)
        _cuda._sleep(int(nap * NAP_CYCLES_PER_SECOND))
        start.record()
        for _ in range(times):
            work()
        end.record()
        woke_too_early = bool(start.query())  # before all was queued
        seconds = seconds_between(start, end) / times
        if not woke_too_early or nap >= LONGEST_NAP_SECONDS:  # work that waits for the device ends every nap
            return seconds
        nap *= 3


def paced_seconds(work: Callable[[], object], times: int) -> float:
    """Seconds from the start of one of so many runs to the start of the next."""
    start, end = new_event(enable_timing=True), new_event(enable_timing=True)
    start.record()
    for _ in range(times):
        work()
    end.record()
    return seconds_between(start, end) / times


def forget_workspaces() -> None:
    """Gives the workspaces of matmul libraries back to torch's allocator; the next product takes them anew."""
    torch.cuda.synchronize()
    torch_bindings: Any = torch._C
    torch_bindings._cuda_clearCublasWorkspaces()


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
