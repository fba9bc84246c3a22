"""The host beside the devices: its cores, its memory and what really limits it, and how fast that memory is.

What may be pinned is an estimate, three quarters of the limit: on the H200 machine 90 of 125 GiB could be pinned, and to try it
would take most memory from everyone for a minute. RLIMIT_MEMLOCK bounds it only where the driver counts pinned pages against it;
one slab larger than the limit tells.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path

import psutil
import torch

from anyfit.values.calibration import Figure

from . import cgroups
from .cuda import pinned
from .meters import Effort, Meter, host_seconds, on_threads, rate_meter

PINNABLE_SHARE, PINNABLE_ERROR = 0.75, 0.1
TRIAL_BYTES = 64 * 2**20


def cores() -> int:
    """Cores this process may run on: its affinity, and its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, math.ceil(min(cgroups.cpu_limit(), allowed))))


def seconds_of_others() -> float:
    """Processor time that everyone but this process and its children has used since the machine started."""
    machine, own = psutil.cpu_times(), psutil.Process().cpu_times()
    busy = sum(getattr(machine, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    return float(busy - own.user - own.system - own.children_user - own.children_system)


def memory_figure() -> Figure:
    total = float(psutil.virtual_memory().total)
    limit = cgroups.memory_limit_bytes()
    if limit < total:
        return Figure(limit, 0.0, "measured: the control group's limit")
    return Figure(total, 0.0, "measured")


def own_memory_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def free_memory_bytes() -> float:
    """What this process may still take: of the machine's memory, and of its control group's limit."""
    left_of_limit = memory_figure().value - own_memory_bytes()
    return max(min(float(psutil.virtual_memory().available), left_of_limit), 0.0)


def left_memory_bytes() -> float:
    """What is left before the kernel ends a process: on the machine, and in the control group with all its processes."""
    return min(float(psutil.virtual_memory().available), cgroups.memory_left_bytes())


def pinnable_figure(memory_bytes: float) -> Figure:
    share = PINNABLE_SHARE * memory_bytes
    locked = _memlock_bytes()
    if locked < share and not _pins_beyond(locked):
        return Figure(float(locked), 0.0, "measured: RLIMIT_MEMLOCK (ulimit -l)")
    return Figure(share, PINNABLE_ERROR, "measured: estimated as three quarters of the memory limit")


def bandwidth_meter(effort: Effort) -> Meter:
    """Bytes/s, read and written, of a copy on all cores that is too large for most caches."""
    source, target = (torch.ones(effort.host_bytes // 4, dtype=torch.float32, device="cpu") for _ in range(2))
    touched = 2.0 * effort.host_bytes
    rate, _ = on_threads(cores(), lambda: rate_meter("host memory", lambda: target.copy_(source), touched, host_seconds, effort))
    return Meter(rate.label, lambda: on_threads(cores(), rate.read))


def processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _memlock_bytes() -> float:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return math.inf
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return math.inf if soft == resource.RLIM_INFINITY else float(soft)


def _pins_beyond(locked_bytes: float) -> bool:
    if not torch.cuda.is_available() or locked_bytes >= TRIAL_BYTES:
        return False
    try:
        with pinned(TRIAL_BYTES):
            return True
    except MemoryError:
        return False
