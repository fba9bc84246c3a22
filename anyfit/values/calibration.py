"""What recorded runs say beyond what a probe can measure: how much slower, larger or less certain real training is.

A figure is fitted to runs on one device; `benchmarks/calibrate.py` holds it to the recorded ones. For another device of the same
kind it is borrowed, and `device` says from which.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import ClassVar, Self

from .record import Record


@dataclass(frozen=True)
class Figure:
    former_keys: ClassVar = {"spread": "measurement_error"}

    value: float
    measurement_error: float  # relative: how far repeated measurements lay from their median, at most
    source: str  # "measured" or "measured: <how>", "datasheet: <where it is printed, what was taken off>", "fitted: <to what>"


@dataclass(frozen=True)
class Calibration(Record):
    kind: ClassVar[str] = "calibration"
    version: ClassVar[int] = 1

    device: str  # that the runs were on
    # The computation
    curve_slowdown: Figure  # seconds of an op in a run, over those by the probe's curves
    call_slowdown: Figure  # the same of a call that was measured by itself
    host_call_factor: Figure  # host seconds of a call of a real model, over those of a call of the probe's tiny blocks
    selective_call_factor: Figure  # host calls that selective recomputation adds to every call, as it looks at each
    accumulation_calls: Figure  # host calls to add up one parameter's gradient over micro-batches
    update_calls: Figure  # host calls to update one parameter
    one_pass_calls: Figure  # the same where a chunk is updated in one pass: those that the device waits for
    launch_slowdown_share: Figure  # of what the probe finds launches slowed by, beside updates and copies without a pause
    # What the engine has the host do, in host calls
    watched_calls: Figure  # for an op that takes a parameter whose weights are fetched
    gradient_calls: Figure  # to put one gradient in a staging buffer
    fetch_calls: Figure  # to fetch a chunk
    bind_calls: Figure  # to give a parameter its weights, fetched or fresh
    offload_calls: Figure  # to move a saved tensor to the host, and to bring it back
    recompute_calls: Figure  # to note what a block's forward sees and to put it back, where it is recomputed
    recompute_call_factor: Figure  # that recomputing adds to every call of such a forward, both times together
    taken_calls: Figure  # to take over a gradient that comes with all of its replayed block
    replay_calls: Figure  # to replay a recording, with what is copied before and after it
    split_update_bytes: Figure  # that torch's own update of a bf16 parameter moves besides the optimizer's
    # Beside the computation
    overlap_slowdown: Figure  # seconds of the computation beside copies, updates and exchanges, over those without
    host_update_share: Figure  # of the rate at which an otherwise idle host updates
    update_launch_seconds: Figure  # that the host takes to start one chunk's update, while the device has nothing to do
    lift_seconds: Figure  # of a streamed update, beside its copies: its parts wait for each other
    download_weight: Figure  # how much more a byte copied to the host slows the host's updates than one copied to the device
    disk_share: Figure  # of the disk's rates alone that updates with their state there reach
    fragmentation: Figure  # what torch's allocator adds, as a share of what is live beyond the pools
    process_bytes: Figure  # of the host, that a process with a GPU takes beside its plan's
    pinned_share: Figure  # of the plan's bytes of the host, that the kernel takes besides to keep them pinned
    # From building to the first step
    start_seconds: Figure
    placed_parameters_per_second: Figure
    readied_bytes_per_second: Figure  # of host memory
    # Links that nobody has measured: inside a node, and between nodes
    link_latency_seconds: Figure
    link_bytes_per_second: Figure
    network_latency_seconds: Figure
    network_bytes_per_second: Figure
    link_error: Figure
    # How far forecasts lay from recorded runs
    time_error: Figure
    rough_time_error: Figure  # of convolutions and routed experts, and of a GPU that waits for its host
    measured_time_error: Figure  # where nearly all calls were measured by themselves
    offload_time_error: Figure  # where part of the state is on the host
    peak_error: Figure
    reserved_error: Figure  # with all state on the device
    offload_peak_error: Figure
    offload_reserved_error: Figure

    def beside_bytes(self, host_bytes: int) -> int:
        """That a process takes of the host besides the so many bytes of its plan."""
        return int(self.process_bytes.value) + int(self.pinned_share.value * host_bytes)

    @classmethod
    @cache
    def of(cls, kind: str) -> Self:
        """That of devices of a kind, `cuda` or `cpu`."""
        file = resources.files(__package__).joinpath("calibrations", f"{kind}.json")
        return cls.from_json(json.loads(file.read_text()), where=f"{kind}'s calibration")
