"""The whole probe: every subject sets up its meters, all meters are read in rounds, and the readings become a Machine.

When `measure` returns, torch's thread count and random state are what they were, and the disk's file and the pinned buffers are
gone. Run it in one process of a node at a time: two probes side by side measure each other.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from anyfit.values.calibration import Calibration, Figure
from anyfit.values.disk_folder import DiskFolder
from anyfit.values.machine import NO_LAUNCH_SLOWDOWN, Beside, Collective, Copies, Device, Disk, Host, Limits, Machine

from . import compute, host, memory, operations
from .copies import CopyLadders, copy_ladders
from .disk import DiskLadders, disk_ladders
from .links import LinksFailed, measure_links
from .meters import FULL, QUICK, Effort, Ladder, Load, Meter, Report, read_in_rounds, together
from .update import device_loads, host_load, update_ladders, updating

EFFORTS: Mapping[str, Effort] = {"quick": QUICK, "full": FULL}
SETUP_SHARE, READING_SHARE = 0.2, 0.7  # of the progress bar; links have the rest
GPU_PATIENCE = 3  # a GPU has more to measure: copies, and more sizes
QUIET_CORES = 0.3  # others may use this much before it is remarked upon
WORKING_SHARE = 1 / 16  # of the free memory: what one measure may hold


def measure(effort: Literal["quick", "full"], report: Report | None = None) -> Machine:
    """This machine: `quick` looks at few sizes, `full` takes its time."""
    if effort not in EFFORTS:
        raise ValueError(f'no effort {effort!r}: write "quick" or "full"')
    level, tell = EFFORTS[effort], report or (lambda _label, _done: None)
    memory.gpus_before_use()  # while this process holds nothing on the GPU
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    tell("setting up", 0.0)
    others, started = host.seconds_of_others(), time.perf_counter()
    own, beside, copies, disk = _measured(device, level, tell)
    busy_cores = (host.seconds_of_others() - others) / (time.perf_counter() - started)
    remarks = [f"{effort} probe"]
    if busy_cores > QUIET_CORES:
        remarks.append(f"other processes kept {busy_cores:.1f} cores busy; measure again when they do not: anyfit probe")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the links, and whoever called, need the memory
    tell("links between GPUs", SETUP_SHARE + READING_SHARE)
    collectives, trouble = _links(device, level)
    tell("done", 1.0)
    return Machine(
        name=own.name if own.count == 1 else f"{own.count} x {own.name}",
        nodes=1,
        device=own,
        host=beside,
        copies=copies,
        disk=disk,
        collectives=collectives,
        limits=Limits(),
        date=datetime.date.today().isoformat(),
        versions=_versions(device),
        comment="; ".join([*remarks, *trouble]),
    )


@dataclass(frozen=True)
class Subjects:
    """Everything that is read in rounds."""

    ladders: Mapping[str, Mapping[str, Ladder]]  # by field of Device, and there by dtype or op
    elementwise: Ladder
    launch: Meter
    training: Meter
    slowdowns: Mapping[Beside, Meter]  # of launches, by what is beside them
    bandwidth: Meter
    update: Ladder
    update_loaded: Ladder
    copies: CopyLadders | None
    disk: DiskLadders | None

    @property
    def meters(self) -> list[Meter]:
        named = [ladder for ladders in self.ladders.values() for ladder in ladders.values()]
        ladders = [*named, self.elementwise, self.update, self.update_loaded]
        alone = [meter for ladder in ladders for meter in ladder.meters] + [self.launch, self.training, self.bandwidth]
        alone += self.slowdowns.values()
        return alone + (self.copies.meters if self.copies else []) + (self.disk.meters if self.disk else [])


def _measured(device: torch.device, level: Effort, tell: Report) -> tuple[Device, Host, Copies | None, Disk | None]:
    """All that is measured in this process. What the meters hold is free again when it returns."""
    patience = level.patience_seconds * (GPU_PATIENCE if device.type == "cuda" else 1)
    deadline = time.perf_counter() + patience
    threads = torch.get_num_threads()
    try:
        # Dropout and the weights of layers draw from torch's own generators.
        drawn_from = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(drawn_from), torch.no_grad(), ExitStack() as stack:
            subjects = _set_up(device, level, stack, lambda label, done: tell(label, SETUP_SHARE * done))
            read_in_rounds(subjects.meters, level, deadline, lambda label, done: tell(label, SETUP_SHARE + READING_SHARE * done))
    finally:
        torch.set_num_threads(threads)
    copies = subjects.copies.copies() if subjects.copies else None
    return _device(device, subjects), _host(subjects), copies, subjects.disk.disk() if subjects.disk else None


def _set_up(device: torch.device, level: Effort, stack: ExitStack, tell: Report) -> Subjects:
    """Builds and warms up every meter. What must be undone is left on the stack."""
    on_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else psutil.virtual_memory().available
    room = WORKING_SHARE * free
    ladders: dict[str, Mapping[str, Ladder]] = {}
    for name, workload in compute.WORKLOADS.items():
        tell(workload.label, 0.1 * len(ladders))
        ladders[name] = workload.ladders(device, level, room)
    tell("device memory", 0.5)
    elementwise = memory.elementwise_ladder(device, level, room)
    ladders["operations"] = operations.operation_ladders(device, level.brief, room)
    launch, training = compute.launch_meter(device, level), compute.host_meter(device, level)
    tell("host memory", 0.7)
    bandwidth = host.bandwidth_meter(level)
    loads = stack.enter_context(device_loads(device)) if on_gpu else None
    updates = update_ladders(host.cores(), level, loads.all if loads else host_load)
    tell("copies and disk", 0.8)
    busy_host = updating(host.cores(), level)
    copies = stack.enter_context(copy_ladders(device, level, busy_host)) if on_gpu else None
    slowdowns: dict[Beside, Meter] = {}
    if loads:
        beside: dict[Beside, Load] = {"updates": busy_host, "copies": loads.copies, "both": together(busy_host, loads.copies)}
        slowdowns = compute.launch_slowdown_meters(device, level, beside)
    disk = stack.enter_context(disk_ladders(_disk_folders(), level)) if level.disk_bytes else None
    return Subjects(ladders, elementwise, launch, training, slowdowns, bandwidth, *updates, copies, disk)


def _disk_folders() -> tuple[Path, ...]:
    """Where state would lie; none where no usual folder is on a disk of this machine."""
    try:
        return (DiskFolder().found(),)
    except ValueError:
        return ()


def _device(device: torch.device, subjects: Subjects) -> Device:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        # GPUs of other kinds in the same node are left alone: a Machine has one kind.
        count = sum(torch.cuda.get_device_name(index) == name for index in range(torch.cuda.device_count()))
        usable, context = memory.gpu_figures(device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    else:
        name, count, processors = host.processor_name(), 1, 0
        # Of a CPU device's memory, a limit counts tensors only: the interpreter's own share is no part of it.
        usable, context = host.memory_figure(), Figure(0.0, 0.0, "measured: a CPU has no context outside the allocator")
    return Device(
        kind="cuda" if device.type == "cuda" else "cpu",
        name=name,
        count=count,
        memory_bytes=usable,
        context_bytes=context,
        memory=subjects.elementwise.curve(),
        launch_seconds=subjects.launch.figure(),
        host_seconds=subjects.training.figure(),
        launch_slowdown={name: meter.figure() for name, meter in subjects.slowdowns.items()} or dict(NO_LAUNCH_SLOWDOWN),
        workspace_bytes=memory.workspace_figure(device),
        measured={},
        processors=Figure(processors, 0.0, "measured"),
        calibration=Calibration.of(device.type),
        **{name: {key: ladder.curve() for key, ladder in ladders.items()} for name, ladders in subjects.ladders.items()},
    )


def _host(subjects: Subjects) -> Host:
    limit = host.memory_figure()
    return Host(
        cores=host.cores(),
        memory_bytes=limit,
        pinnable_bytes=host.pinnable_figure(limit.value),
        bytes_per_second=subjects.bandwidth.figure(),
        update=subjects.update.curve(),
        update_loaded=subjects.update_loaded.curve(),
    )


def _links(device: torch.device, level: Effort) -> tuple[tuple[Collective, ...], list[str]]:
    """The collectives, and what is to be said where they could not be measured: the rest is still of use."""
    if device.type == "cpu" or torch.cuda.device_count() == 1:
        return (), []
    try:
        return measure_links("nccl", torch.cuda.device_count(), level), []
    except LinksFailed as failure:
        return (), [f"links between GPUs were not measured: {failure}"]


def _versions(device: torch.device) -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": str(torch.__version__), "system": platform.platform()}
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda or torch.version.hip)
        drivers = {driver for _, driver in memory.gpus_before_use().values()}
        if drivers:
            versions["driver"] = ", ".join(sorted(drivers))
    return versions
