"""The machine file: measured once, then read, until the hardware, its limits or torch change.

A file that cannot be read, or not be written, costs a measurement and never an error: a cache is not worth a failed
start. The seconds of the calls that traced models make are kept in the same file, and go with it. What runs and checks have shown
of the forecasts for this machine lies in a file beside it, until the machine is measured anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from anyfit.values.compiled import BlockFigures, CompiledFigures
from anyfit.values.corrections import ClippedSteps, Correction, Corrections, Pace
from anyfit.values.cut_figures import CutFigures, SolvedLayouts
from anyfit.values.doing import doing
from anyfit.values.folder import cache_folder
from anyfit.values.machine import Device, Machine

from . import host, memory
from .calls import measure_calls
from .meters import Report
from .probe import measure

MOST_LAYOUTS = 200  # that are kept for a machine, the newest


def cached(effort: Literal["quick", "full"] = "quick") -> Machine:
    """This machine as it was measured last, or else now. For a quick measurement a full one does as well."""
    efforts = ("full",) if effort == "full" else ("full", "quick")
    files = [file for file in map(machine_file, efforts) if file.exists()]
    for file in sorted(files, key=_written, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            return Machine.load(file)
    with doing("measuring this machine, once"):
        return remeasured(effort)


def remeasured(effort: Literal["quick", "full"] = "quick", report: Report | None = None) -> Machine:
    """Measures now, and keeps the result for `cached`."""
    file = machine_file(effort)  # first: it asks for what others hold of a GPU before this process holds some
    machine = measure(effort, report)
    with contextlib.suppress(OSError):
        machine.save(file)
        _corrections_file(machine).unlink(missing_ok=True)
    return machine


def corrections_of(machine: Machine) -> Corrections:
    """What runs have shown of the forecasts for a machine; nothing where no file says so that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return Corrections.load(_corrections_file(machine))
    return Corrections(machine.fingerprint)


def keep_correction(machine: Machine, correction: Correction) -> None:
    with contextlib.suppress(OSError):
        corrections_of(machine).with_one(correction).save(_corrections_file(machine))


def keep_pace(machine: Machine, pace: Pace) -> None:
    with contextlib.suppress(OSError):
        corrections_of(machine).with_pace(pace).save(_corrections_file(machine))


def keep_clipped_steps(machine: Machine, seen: ClippedSteps) -> None:
    with contextlib.suppress(OSError):
        corrections_of(machine).with_clipped_steps(seen).save(_corrections_file(machine))


def compiled_of(machine: Machine) -> CompiledFigures:
    """What is known of compiled blocks on a machine; nothing where no file says so that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return CompiledFigures.load(_compiled_file(machine))
    return CompiledFigures(machine.fingerprint)


def keep_compiled(machine: Machine, found: Iterable[BlockFigures]) -> None:
    with contextlib.suppress(OSError):
        compiled_of(machine).with_all(found).save(_compiled_file(machine))


def _compiled_file(machine: Machine) -> Path:
    return cache_folder() / f"compiled-{machine.fingerprint}.json"


def layouts_of(machine: Machine) -> SolvedLayouts:
    """What was solved of blocks cut over a tensor axis of a machine; nothing where no file says so that can be read."""
    with contextlib.suppress(OSError, ValueError):
        return SolvedLayouts.load(_layouts_file(machine))
    return SolvedLayouts(machine.fingerprint, {})


def keep_layouts(machine: Machine, found: Mapping[str, tuple[CutFigures, ...]]) -> None:
    with contextlib.suppress(OSError):
        layouts_of(machine).with_all(found, MOST_LAYOUTS).save(_layouts_file(machine))


def _layouts_file(machine: Machine) -> Path:
    """However many nodes there are: a tensor axis is inside one."""
    return cache_folder() / f"layouts-{replace(machine, nodes=1).fingerprint}.json"


def compiler_versions() -> str:
    """Of what makes compiled code: other versions make other code."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return f"torch {torch.__version__}, triton {triton}"


def forget_corrections() -> list[str]:
    """Drops what runs and checks have shown of forecasts, of whatever machine; says what that was."""
    said: list[str] = []
    for file in sorted(cache_folder().glob("corrections-*.json")):
        with contextlib.suppress(OSError, ValueError):
            known = Corrections.load(file)
            said += [f"{each.model}: a margin of {each.error:.0%} of its memory ({each.date})" for each in known.models]
            said += [f"{each.model}: {each.choice} ({each.date})" for each in known.paces]
            said += [f"{each.model}: {each.clipped} of {each.steps} steps clipped ({each.date})" for each in known.clipped]
        file.unlink(missing_ok=True)
    return said


def _corrections_file(machine: Machine) -> Path:
    return cache_folder() / f"corrections-{machine.fingerprint}.json"


def with_calls(machine: Machine, weights: Mapping[str, float], budget_seconds: float, report: Report | None = None) -> Machine:
    """The machine with the seconds of the calls in `weights`: read from its file, and those that are missing measured and kept.

    A machine that was not measured here, a preset or another's file, is given back as it is. So is one whose device is a CPU: it
    takes a thousand times as long for a call, so that timing a model's would keep its user waiting longer than it is worth.
    """
    file = _file_of(machine) if machine.device.kind == "cuda" else None
    if file is None:
        return machine
    kept = Machine.load(file)
    known = {**kept.device.measured, **machine.device.measured}
    found = measure_calls(torch.device("cuda", 0), weights, known, budget_seconds, report)
    measured = {**known, **found}
    if found:
        with contextlib.suppress(OSError):
            replace(kept, device=replace(kept.device, measured=measured)).save(file)
    return replace(machine, device=replace(machine.device, measured=measured))


def _file_of(machine: Machine) -> Path | None:
    """The file of this computer that holds the very rates of a machine."""

    def rates(device: Device) -> Device:
        return replace(device, count=1, measured={})

    for file in map(machine_file, ("full", "quick")):
        with contextlib.suppress(OSError, ValueError):
            if rates(Machine.load(file).device) == rates(machine.device):
                return file
    return None


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
