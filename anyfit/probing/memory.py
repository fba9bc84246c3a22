"""The device's memory: how fast element-wise ops go through it, and how much of it one process gets.

The curve is `a + b` with a freshly allocated result, by bytes read and written, on the same buffers again and again:
small sizes therefore come from the caches, as the activation that the last op wrote does in training.

What a process gets of a GPU: total = others + context + what torch's allocator may reserve. CUDA tells total and free only, so
what others hold is asked of nvidia-smi before this process has a context of its own. Where that cannot be told, or others came
since, it is counted as context as long as one may be so large: the allocator's share, the difference of the two figures, comes
out right either way. Of that share, matmul libraries keep workspaces, one for each thread that asks for products: forward's and
backward's.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Mapping

import torch
from torch.nn import functional

from anyfit.values.calibration import Figure

from .cuda import forget_workspaces, is_in_use
from .meters import LEAST_ERROR, Effort, Ladder, Work, climb, timer_of

ELEMENTWISE_BYTES = {
    "cpu": tuple(2**10 * size for size in (3, 12, 48, 192, 768, 3072, 12288, 49152, 196608)),
    "cuda": tuple(2**10 * size for size in (3, 48, 768, 3072, 12288, 49152, 196608, 786432, 3145728)),
}
MOST_CONTEXT_BYTES = 2 * 2**30  # an H200's takes 0.9 GiB with the kernels of a large model
CONTEXT_ERROR = 0.1  # which kernels are loaded depends on the model


def elementwise_ladder(device: torch.device, effort: Effort, room_bytes: float) -> Ladder:
    """Bytes/s, read and written, by bytes of one op."""

    def prepare(size: int) -> tuple[float, Work]:
        elements = size // 12  # two float32 read, one written
        left, right = (torch.full((elements,), 1.5, dtype=torch.float32, device=device) for _ in range(2))
        return 12.0 * elements, lambda: left + right

    sizes = [size for size in ELEMENTWISE_BYTES[device.type] if size <= room_bytes]
    return climb("element-wise ops", sizes, prepare, timer_of(device), effort)


@functools.cache
def gpus_before_use() -> Mapping[str, tuple[float, str]]:
    """By GPU UUID: bytes that other processes hold, and the driver's version. Empty where nvidia-smi cannot say.

    Cached because it means something only before this process's own context; whoever is first to touch CUDA asks first.
    """
    command = shutil.which("nvidia-smi")
    if command is None or is_in_use():
        return {}
    query = [command, "--query-gpu=uuid,memory.used,driver_version", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.strip()]
        return {uuid.removeprefix("GPU-"): (float(used_mib) * 2**20, driver) for uuid, used_mib, driver in rows}
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}  # a container without the tool's rights, or a MIG slice that answers "[N/A]"


def gpu_figures(device: torch.device) -> tuple[Figure, Figure]:
    """Usable bytes, and the bytes of those outside torch's allocator. Ask last: kernels are loaded at first use."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    others, _ = gpus_before_use().get(uuid, (0.0, ""))
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    context = total - free - torch.cuda.memory_reserved(device) - others
    others += max(context - MOST_CONTEXT_BYTES, 0.0)
    context = min(context, MOST_CONTEXT_BYTES)
    usable = Figure(float(total), 0.0, "measured")
    if others:
        usable = Figure(total - others, LEAST_ERROR, "measured: the total less what other processes hold")
    return usable, Figure(max(context, 0.0), CONTEXT_ERROR, "measured")


def workspace_figure(device: torch.device) -> Figure:
    """What a forward and a backward product leave behind in torch's allocator."""
    if device.type == "cpu":
        return Figure(0.0, 0.0, "measured: a CPU's libraries take nothing of torch's allocator")
    forget_workspaces()  # of products that this process has made before
    before = torch.cuda.memory_allocated(device)
    _one_training_product(device)
    return Figure(float(max(torch.cuda.memory_allocated(device) - before, 0)), 0.0, "measured")


def _one_training_product(device: torch.device) -> None:
    inputs, weight = (torch.ones(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    bias = torch.ones(256, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.enable_grad():
        functional.linear(inputs, weight, bias).sum().backward()
