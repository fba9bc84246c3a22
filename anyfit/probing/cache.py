"""The machine file: measured once, then read, until the hardware, its limits or torch change.

A file that cannot be read, or not be written, costs a measurement and never an error: a cache is not worth a failed
start.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Literal

import torch

from anyfit.values.machine import Machine

from . import host, memory
from .folder import cache_folder
from .meters import Report
from .probe import measure


def cached(effort: Literal["quick", "full"] = "quick", report: Report | None = None) -> Machine:
    """This machine as it was measured last, or else now. For a quick measurement a full one does as well."""
    efforts = ("full",) if effort == "full" else ("full", "quick")
    files = [file for file in map(machine_file, efforts) if file.exists()]
    for file in sorted(files, key=_written, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            return Machine.load(file)
    return remeasured(effort, report)


def remeasured(effort: Literal["quick", "full"] = "quick", report: Report | None = None) -> Machine:
    """Measures now, and keeps the result for `cached`."""
    file = machine_file(effort)  # first: it asks for what others hold of a GPU before this process holds some
    machine = measure(effort, report)
    with contextlib.suppress(OSError):
        machine.save(file)
    return machine


def machine_file(effort: str) -> Path:
    return cache_folder() / f"machine-{_hardware()}-{effort}.json"


def _written(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0  # gone since it was seen


def _hardware() -> str:
    """A short name for all that a measurement depends on: another GPU, limit or torch is another file."""
    memory.gpus_before_use()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    parts = [
        Machine.version,
        str(torch.__version__),
        # On a CPU device the rates are those of so many threads. Beside a GPU they are not: torchrun may set what it likes.
        None if gpus else torch.get_num_threads(),
        host.processor_name(),
        host.cores(),
        host.memory_figure().value,
        [[gpu.name, gpu.total_memory] for gpu in gpus],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
