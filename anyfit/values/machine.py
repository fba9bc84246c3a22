"""Machine: what the hardware is, how fast each part of it is, and how much of it may be used.

Every rate says where it comes from (`measured`, or `datasheet: <source>`) and how far repeated measurements of it differ, so that
a forecast made from it carries an honest error band.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from .calibration import Calibration, Figure
from .record import Record, decode, encode, nearest
from .units import parse_bytes, show_bytes

DTYPES = ("float32", "bfloat16")
Beside = Literal["updates", "copies", "both"]
NO_LAUNCH_SLOWDOWN: Mapping[Beside, Figure] = dict.fromkeys(
    get_args(Beside), Figure(1.0, 0.0, "measured: a CPU launches for itself, and its times add up")
)
ASSUMED_PROCESSORS = Figure(132, 0.5, "assumed: as an H100 has")
ASSUMED_ENDURANCE = Figure(600e12, 1.0, "assumed: as a drive of 1 TB for consumers is rated, Samsung 990 PRO data sheet")
ASSUMED_LAUNCH_SLOWDOWN: Mapping[Beside, Figure] = {
    beside: Figure(times, 0.3, "assumed: as beside an H200 with 16 cores")
    for beside, times in zip(get_args(Beside), (1.3, 2.0, 3.0), strict=True)
}
# Ops that reach a fraction of the bandwidth of their own, named as aten's overload packets are.
OPERATIONS = (
    "native_layer_norm", "native_layer_norm_backward", "_softmax", "_softmax_backward_data", "_log_softmax",
    "_log_softmax_backward_data", "native_dropout", "native_dropout_backward", "native_batch_norm", "native_batch_norm_backward",
    "sum", "cat", "_to_copy", "clone", "gelu", "gelu_backward", "silu", "silu_backward", "tanh", "mul", "add",
    "embedding_dense_backward", "linalg_vector_norm",
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """A rate by size. Between points it is a straight line on logarithmic axes, outside them it is constant."""

    former_keys: ClassVar = {"spread": "measurement_error"}

    points: tuple[tuple[float, float], ...]  # (size, rate), sizes ascending
    measurement_error: float  # relative, of the worst point
    source: str

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError("a curve needs points with ascending sizes")
        if any(size <= 0 or rate <= 0 for size, rate in self.points):
            raise ValueError("a curve's sizes and rates are positive")

    def at(self, size: float) -> float:
        points = self.points
        if size <= points[0][0]:
            return points[0][1]
        for (left, rate_left), (right, rate_right) in itertools.pairwise(points):
            if size <= right:
                share = math.log(size / left) / math.log(right / left)
                return math.exp((1 - share) * math.log(rate_left) + share * math.log(rate_right))
        return points[-1][1]

    @property
    def peak(self) -> float:
        return max(rate for _, rate in self.points)


@dataclass(frozen=True)
class Device:
    """One kind of processor that computes, and how many a node has. A CPU is a device too: its memory is the host's."""

    kind: Literal["cpu", "cuda"]
    name: str
    count: int  # in each node
    memory_bytes: Figure  # what one process may take in all
    context_bytes: Figure  # of that, what the runtime takes outside torch's allocator
    matmul: Mapping[str, Curve]  # by dtype: FLOP/s by FLOPs of one product
    matmul_unaligned: Mapping[str, Curve]  # the same for operands whose rows do not start on 16-byte boundaries
    attention: Mapping[str, Curve]  # by dtype: FLOP/s by FLOPs of one causal forward call, counted whole (unmasked)
    attention_backward: Mapping[str, Curve]  # the same for the backward, counted as 2.5 times its forward
    convolution: Mapping[str, Curve]  # by dtype: FLOP/s by FLOPs of one 3x3 convolution, forward or backward
    memory: Curve  # bytes/s, read and written, by bytes of one element-wise op
    operations: Mapping[str, Curve]  # bytes/s by bytes of those of OPERATIONS that were measured; `memory` is for the rest
    launch_seconds: Figure  # the least time between two ops
    host_seconds: Figure  # that the host takes for one dispatcher call in training, autograd's and Python's share included
    launch_slowdown: Mapping[Beside, Figure]  # how many times as long that is while the host does something else as well
    workspace_bytes: Figure  # what matmul libraries hold of torch's allocator, once forward and backward have run
    measured: Mapping[str, float]  # seconds of calls (values/call.py) that were made on this very device; elsewhere none
    processors: Figure  # of a GPU: streaming multiprocessors
    calibration: Calibration  # by recorded runs on devices of this kind

    def __post_init__(self) -> None:
        for name in ("matmul", "matmul_unaligned", "attention", "attention_backward", "convolution"):
            _refuse_others(name, getattr(self, name), "dtype", DTYPES)
        _refuse_others("operations", self.operations, "op", OPERATIONS)
        if not self.matmul:
            raise ValueError(f"matmul: needs the curve of a dtype; known: {', '.join(DTYPES)}")

    def computes_in(self, dtype: str) -> bool:
        """A CPU computes in any, if slowly; of a GPU that has none of a dtype, torch would do as if."""
        return self.kind == "cpu" or dtype in self.matmul


def _refuse_others(name: str, curves: Mapping[str, Curve], what: str, known: tuple[str, ...]) -> None:
    for key in curves:
        if key not in known:
            raise ValueError(f"{name}: unknown {what} {key!r}" + nearest(key, known))


def _at_least(there: Figure, size: int) -> Figure:
    return there if size <= there.value else Figure(size, 0.0, "assumed: as was asked for")


def _with_assumed(disk: Mapping[str, object], where: str) -> Mapping[str, object]:
    """A disk of a file from before reads and writes were measured together, and before drives had a rating."""
    added = {"endurance_bytes": encode(ASSUMED_ENDURANCE)}
    if "both" not in disk and {"read", "write"} <= disk.keys():
        read, write = (decode(Curve, disk[way], f"{where}.{way}") for way in ("read", "write"))
        added["both"] = encode(Disk.in_turns(read, write))
    return {**added, **disk}


def _preset(name: str) -> dict[str, Any]:
    """What its file says; of one that is `like` another, in place of what that one's says: a node of several of its GPUs, beside
    a host of their own."""
    preset = resources.files(__package__).joinpath("machines", f"{name}.json")
    document: dict[str, Any] = json.loads(preset.read_text())
    base = document.pop("like", None)
    return document if base is None else _laid_over(_preset(base), document)


def _laid_over(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Objects are merged, but for the host's and the disk's, which are others."""
    return {**base, **{key: {**base[key], **of} if key == "device" else of for key, of in given.items()}}


def named_figures(value: object, path: str = "") -> Iterator[tuple[str, Figure | Curve]]:
    """Every figure and curve of a machine, by its path."""
    if isinstance(value, Figure | Curve):
        yield path, value
        return
    found: Iterable[tuple[str, object]] = ()
    if dataclasses.is_dataclass(value):
        found = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        found = value.items()
    elif isinstance(value, tuple):  # collectives
        found = (
            (" ".join(map(str, (each.name, each.across, each.group))), each) for each in value if isinstance(each, Collective)
        )
    for name, item in found:
        if name != "calibration":
            yield from named_figures(item, f"{path} {name}".strip())


def update_threads(cores: int) -> int:
    """How many of the host's cores update: two are left for launching, and for what moves state."""
    return max(1, cores - 2)


@dataclass(frozen=True)
class Host:
    """The memory and cores beside the devices of one node."""

    cores: int
    memory_bytes: Figure  # the real limit: the control group's where there is one
    pinnable_bytes: Figure
    bytes_per_second: Figure
    update: Curve  # AdamW parameters/s by threads, alone
    update_loaded: Curve  # the same while both copy directions and matmuls run


@dataclass(frozen=True)
class Copies:
    """Copies between host and device: from and to pinned memory by bytes of one copy, alone and with the other direction busy."""

    up: Curve
    down: Curve
    up_both: Curve
    down_both: Curve
    up_loaded: Figure  # bytes/s of large copies, with the other direction and the host's updates busy
    down_loaded: Figure
    pageable: Figure  # bytes/s to the device from memory that is not pinned, such as a batch, through some that is


@dataclass(frozen=True)
class Disk:
    """Rates of a file past the page cache, and what the drive bears."""

    free_bytes: Figure
    read: Curve  # bytes/s by requests in flight, with nothing else
    write: Curve
    both: Curve  # bytes/s read and written together, with as many requests in flight each way
    endurance_bytes: Figure  # that may be written until the drive is worn out, as it is rated

    @staticmethod
    def in_turns(read: Curve, write: Curve) -> Curve:
        """Both at once where nobody has measured it: as if each were alone half of the time that the same bytes take."""
        points = tuple((depth, 2 / (1 / rate + 1 / write.at(depth))) for depth, rate in read.points)
        source = "assumed: reads and writes take turns, each as fast as alone"
        return Curve(points, max(read.measurement_error, write.measurement_error), source)


@dataclass(frozen=True)
class Collective:
    """One collective: seconds = latency + bytes / rate. Bytes are those of the largest buffer that one rank holds: the gathered
    output of an all_gather, the input of a reduce_scatter or an all_to_all, the tensor of an all_reduce or a send. A group across
    the cluster fills its nodes."""

    name: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
    across: Literal["node", "cluster"]
    group: int
    latency_seconds: Figure
    bytes_per_second: Figure


@dataclass(frozen=True)
class Limits:
    """How much of each tier one process may take; None is all there is."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    disk_bytes: int | None = None


@dataclass(frozen=True)
class Machine(Record):
    """Devices, links, tiers, rates and limits: `Machine.load` reads them, `anyfit.probe()` measures those of this machine."""

    kind: ClassVar[str] = "machine"
    version: ClassVar[int] = 3

    name: str
    nodes: int
    device: Device
    host: Host
    copies: Copies | None  # None on a CPU device, whose memory is the host's
    disk: Disk | None
    collectives: tuple[Collective, ...]
    limits: Limits
    date: str  # of the measurement, or of the datasheets
    versions: Mapping[str, str]  # of torch, the driver, …, where measured
    comment: str

    @classmethod
    def from_json(cls, document: object, *, where: str = "") -> Self:
        """Files from before devices had a calibration get that of their kind, and figures of it that are newer than the file; so
        do launches that nobody has measured, and what nobody has said of a disk."""
        device = document.get("device") if isinstance(document, Mapping) else None
        if isinstance(device, Mapping) and device.get("kind") in ("cpu", "cuda"):
            slowdown = ASSUMED_LAUNCH_SLOWDOWN if device["kind"] == "cuda" else NO_LAUNCH_SLOWDOWN
            added = {
                "processors": encode(ASSUMED_PROCESSORS),
                "calibration": encode(Calibration.of(device["kind"])),
                "launch_slowdown": encode(slowdown),
            }
            known = device.get("calibration")
            device = {**added, **device}
            if isinstance(known, Mapping):
                device["calibration"] = {**added["calibration"], **known}
            document = {**document, "device": device}  # type: ignore[dict-item]
        disk = document.get("disk") if isinstance(document, Mapping) else None
        if isinstance(disk, Mapping) and not {"both", "endurance_bytes"} <= disk.keys():
            document = {**document, "disk": _with_assumed(disk, f"{where}.disk")}  # type: ignore[dict-item]
        return super().from_json(document, where=where)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A machine from a preset's name (`Machine.presets()`) or from a file."""
        if isinstance(path, str) and path in cls.presets():
            return cls.from_json(_preset(path), where=path)
        file = Path(path)
        if not file.exists() and file.suffix != ".json":
            raise FileNotFoundError(f"no machine file or preset {str(path)!r}" + nearest(str(path), cls.presets()))
        return super().load(file)

    @staticmethod
    def presets() -> tuple[str, ...]:
        folder = resources.files(__package__).joinpath("machines")
        return tuple(sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json")))

    def with_limits(
        self, device_memory: str | int | None = None, host_memory: str | int | None = None, disk: str | int | None = None
    ) -> Self:
        """The same machine, of which no more than this may be used. None leaves a limit as it is."""
        wanted = {
            "device_bytes": (device_memory, self.device.memory_bytes.value, "device_memory"),
            "host_bytes": (host_memory, self.host.memory_bytes.value, "host_memory"),
            "disk_bytes": (disk, self.disk.free_bytes.value if self.disk else 0, "disk"),
        }
        limits = self.limits
        for name, (given, available, what) in wanted.items():
            if given is None:
                continue
            if name == "disk_bytes" and self.disk is None:
                raise ValueError(f"no disk is known of {self.name!r}; measure it with: anyfit probe")
            size = parse_bytes(given)
            if not size > 0:
                raise ValueError(f"{what} {given}: give more than nothing, such as 24GiB")
            if size > available:
                raise ValueError(
                    f"a limit of {show_bytes(size)} where {self.name} has {show_bytes(available)} of {what.replace('_', ' ')}; "
                    f"to plan for more than there is: machine.as_if({what}={given!r}), --what-if {what.replace('_', '-')}={given}"
                )
            limits = replace(limits, **{name: size})
        return replace(self, limits=limits)

    def as_if(
        self, device_memory: str | int | None = None, host_memory: str | int | None = None, disk: str | int | None = None
    ) -> Self:
        """The same machine as if a process could take this much, more than there is too: to plan for what is not here. None
        leaves a limit as it is. What a node's host has for one process it has for those of all its devices."""
        device, host, known = self.device, self.host, self.disk
        if device_memory is not None:
            device = replace(device, memory_bytes=_at_least(device.memory_bytes, parse_bytes(device_memory)))
        if host_memory is not None:
            host = replace(host, memory_bytes=_at_least(host.memory_bytes, parse_bytes(host_memory) * device.count))
        if disk is not None and known is not None:
            known = replace(known, free_bytes=_at_least(known.free_bytes, parse_bytes(disk)))
        return replace(self, device=device, host=host, disk=known).with_limits(device_memory, host_memory, disk)

    def lacks(self, sizes: Mapping[str, str]) -> list[str]:
        """Tiers of which it has less, whatever its limits."""
        free = 0.0 if self.disk is None else self.disk.free_bytes.value
        there = {"device": self.device.memory_bytes.value, "host": self.host.memory_bytes.value, "disk": free}
        return [tier for tier, size in sizes.items() if parse_bytes(size) > there[tier]]

    def beyond(self, described: Machine) -> list[str]:
        """Where this one, as if it had more, has more than it is described with; for people."""
        tiers = {
            "device memory": (described.device.memory_bytes, self.device.memory_bytes, 1),
            "host memory": (described.host.memory_bytes, self.host.memory_bytes, self.device.count),
        }
        if described.disk is not None and self.disk is not None:
            tiers["disk"] = described.disk.free_bytes, self.disk.free_bytes, 1
        each = f" for each of {self.device.count} processes" if self.device.count > 1 else ""
        return [
            f"{self.name} is described with {show_bytes(there.value / count)} of {what}{each if count > 1 else ''}; "
            f"planning for {show_bytes(asked.value / count)} as you asked"
            for what, (there, asked, count) in tiers.items()
            if asked.value > there.value
        ]

    def with_devices(self, gpus: int | None = None, nodes: int | None = None) -> Self:
        """The same kind of machine with so many GPUs in each node, and so many nodes. None leaves a number as it is. The host's
        memory, cores and disk are those of one node, and stay."""
        for flag, number in (("--gpus", gpus), ("--nodes", nodes)):
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise ValueError(f"{flag} {number!r}: give a whole number from 1 up")
        if gpus is not None and self.device.kind != "cuda":
            raise ValueError(f"--gpus {gpus}: {self.name!r} has no GPU; name a machine that has: --machine h200")
        count = gpus or self.device.count
        machine = replace(self, device=replace(self.device, count=count), nodes=nodes or self.nodes)
        known = {collective.across for collective in self.collectives}
        if count > self.device.count and "node" not in known:
            raise ValueError(f"--gpus {gpus}: no link between GPUs is known of {self.name!r}; a preset has them: h100-node")
        if machine.nodes > self.nodes and "cluster" not in known:
            raise ValueError(f"--nodes {nodes}: no link between nodes is known of {self.name!r}; a preset has them: h100-node")
        return machine

    def rank_grid(self, ranks: int | None = None) -> tuple[int, int]:
        """(ranks per node, nodes) for so many ranks with a device each; None is as many as there are devices."""
        devices = self.device.count * self.nodes
        ranks = devices if ranks is None else ranks
        if not 1 <= ranks <= devices:
            raise ValueError(f"{ranks} ranks on the {devices} devices of {self.name!r}; each has one of its own")
        node = min(ranks, self.device.count)
        if ranks % node:
            raise ValueError(f"{ranks} ranks do not fill nodes of {node}; try {ranks // node * node}")
        return node, ranks // node

    @property
    def device_limit_bytes(self) -> int:
        return self._limit(self.limits.device_bytes, self.device.memory_bytes)

    @property
    def host_limit_bytes(self) -> int:
        return self._limit(self.limits.host_bytes, self.host.memory_bytes)

    @property
    def assumes_host(self) -> bool:
        """Whether its host memory is what a preset has: a card comes with any."""
        return self.limits.host_bytes is None and self.name in self.presets()

    @property
    def disk_limit_bytes(self) -> int:
        """What may lie there, of what is free. Plans use it only where somebody gave a limit: it wears the drive."""
        return self._limit(self.limits.disk_bytes, self.disk.free_bytes) if self.disk else 0

    @staticmethod
    def _limit(limit: int | None, available: Figure) -> int:
        return int(available.value) if limit is None else min(limit, int(available.value))

    @property
    def fingerprint(self) -> str:
        """What a plan depends on and two probes of one machine agree on: the kind, number and size of its parts."""
        device = self.device
        memory_gib = round(device.memory_bytes.value / 2**30)
        parts = [device.kind, device.name, device.count, self.nodes, memory_gib, self.host.cores]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
