"""A machine made up for tests: a CPU with constant rates, so that costs can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

from anyfit.values.calibration import Calibration, Figure
from anyfit.values.division import Exchange
from anyfit.values.machine import NO_LAUNCH_SLOWDOWN, Curve, Device, Disk, Host, Limits, Machine
from anyfit.values.profile import Profile

GIB = 2**30


def figure(value: float) -> Figure:
    return Figure(value, 0.0, "measured")


def constant(rate: float) -> Curve:
    return Curve(((1.0, rate),), 0.0, "measured")


def small_disk(free_bytes: int = 100 * GIB, *, read: float = 1e9, write: float = 1e9, both: float = 1e9) -> Disk:
    return Disk(figure(free_bytes), constant(read), constant(write), constant(both), figure(600e12))


def small_machine(*, device_bytes: int = 8 * GIB, cores: int = 2, flops_per_second: float = 1e11) -> Machine:
    rates = {"float32": constant(flops_per_second), "bfloat16": constant(flops_per_second)}
    return Machine(
        name="small",
        nodes=1,
        device=Device(
            kind="cpu",
            name="a made-up processor",
            count=1,
            memory_bytes=figure(device_bytes),
            context_bytes=figure(0),
            matmul=rates,
            matmul_unaligned=rates,
            attention=rates,
            attention_backward=rates,
            convolution=rates,
            memory=constant(1e10),
            operations={},
            launch_seconds=figure(1e-6),
            host_seconds=figure(1e-6),
            launch_slowdown=NO_LAUNCH_SLOWDOWN,
            workspace_bytes=figure(0),
            measured={},
            processors=figure(0),
            calibration=Calibration.of("cpu"),
        ),
        host=Host(
            cores=cores,
            memory_bytes=figure(device_bytes),
            pinnable_bytes=figure(device_bytes),
            bytes_per_second=figure(1e10),
            update=constant(1e8),
            update_loaded=constant(1e8),
        ),
        copies=None,
        disk=None,
        collectives=(),
        limits=Limits(),
        date="2026-01-01",
        versions={},
        comment="",
    )


def on_slower_links(profile: Profile, times: float) -> Profile:
    """Where ranks of the data axis take so many times as long for each byte that they exchange."""

    def slower(exchange: Exchange) -> Exchange:
        return replace(exchange, seconds_per_byte=times * exchange.seconds_per_byte)

    divisions = (replace(each, gather=slower(each.gather), reduce=slower(each.reduce)) for each in profile.divisions)
    return replace(profile, divisions=tuple(divisions))
