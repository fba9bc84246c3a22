"""Seconds: what each op costs on a machine, and what a pass of them costs when the host has to launch every one.

    device(op) = seconds of its call                                                 where the machine has measured that
                 max(bytes / bandwidth_of_op(bytes), flops / rate_of_op(flops))      elsewhere, on the machine's curves
                 latency + bytes / rate of the collective                            of what ranks of a tensor axis exchange
    host(op)   = calls * host_seconds                                                views before it included

On a GPU the host runs ahead: op i starts when it has been launched and op i-1 is done, so a small model takes the host's time and
a large one the device's; both wait for a step's first batch. A pass with nothing beside it is played through op by op
(`lengthened`); of a stretch of one, three figures say how it ends whatever the host is at (`timing_of`, values/profile.py). On a
CPU device both are the same cores, and the times add up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from anyfit.values.graph import Graph, Op, UpdateRule
from anyfit.values.layout import Chunk
from anyfit.values.machine import Curve, Device, Machine
from anyfit.values.profile import Timing

from .links import Links
from .memory import is_in_one_pass

# Bytes the engine itself moves in an update, by element of an fp32 chunk: norm (4) and scaling (8).
WHOLE_BYTES_PER_ELEMENT = 12
# What a kernel of the engine's moves instead, by element of a bf16 and of an fp32 chunk: the norm (2, 4), gradients put side by
# side (4, 8), and the pass over them and the state (26, 28).
ONE_PASS_BYTES_PER_ELEMENT = {"bfloat16": 32, "float32": 40}
PLAYED = 3  # passes of a step: by then the host is as far ahead, or behind, as it will be


def device_seconds(op: Op, call: str, device: Device) -> float:
    """How long the device is busy with one op: as it was measured for this very call, or else by the curves."""
    measured = device.measured.get(call)
    return curve_seconds(op, device) if measured is None else measured * device.calibration.call_slowdown.value


def curve_seconds(op: Op, device: Device) -> float:
    """How long the device is busy with an op of this kind and size."""
    name = op.name.partition(".")[0]
    bandwidth = device.operations.get(name, device.memory)
    seconds = op.bytes / bandwidth.at(max(op.bytes, 1))
    if op.flops:
        seconds = max(op.bytes / device.memory.at(op.bytes), op.flops / _rates(op, name, device).at(op.flops))
    return seconds * device.calibration.curve_slowdown.value


def exchange_seconds(op: Op, tensor: int, machine: Machine) -> float:
    """Of ranks of a tensor axis that wait for it: nothing is computed beside it."""
    return Links(machine, machine.device.count, machine.nodes).between(op.name, tensor).seconds(op.bytes)  # type: ignore[arg-type]


def _rates(op: Op, name: str, device: Device) -> Curve:
    curves: Mapping[str, Curve] = device.matmul if op.aligned else device.matmul_unaligned
    if op.kind == "attention":
        curves = device.attention_backward if name.endswith("backward") else device.attention
    elif op.kind == "convolution":
        curves = device.convolution
    return curves.get(op.dtype) or curves.get("float32") or device.matmul["float32"]


def call_weights(graphs: Sequence[Graph], device: Device) -> dict[str, float]:
    """By call, its share of the device's seconds in each pass by the curves, added up over the passes."""
    weights: dict[str, float] = {}
    for graph in graphs:
        counts = Counter(op.call for op in graph.ops)
        examples = {op.call: op for op in graph.ops}
        seconds = {call: count * curve_seconds(examples[call], device) for call, count in counts.items()}
        total = sum(seconds.values()) or 1.0
        for call, took in seconds.items():
            weights[graph.calls[call]] = weights.get(graph.calls[call], 0.0) + took / total
    return weights


def measured_share(graph: Graph, device: Device) -> float:
    """How much of the device's seconds comes from calls that were measured."""
    shares = call_weights([graph], device)
    return sum(share for call, share in shares.items() if call in device.measured)


def rough_share(graph: Graph, device: Device) -> float:
    """How much of the device's seconds by the curves goes to convolutions and routed experts, which the curves price badly."""
    shares = call_weights([graph], device)
    rough = {graph.calls[op.call] for op in graph.ops if op.kind == "convolution" or op.name.startswith("_grouped_mm")}
    return sum(shares[call] for call in rough)


def copy_seconds(graph: Graph, machine: Machine) -> float:
    """What the batch takes to the device: the host copies it into pinned memory first."""
    return graph.batch_bytes / machine.copies.pageable.value if machine.copies is not None else 0.0


def op_seconds(graph: Graph, machine: Machine, passes: int = 1) -> list[tuple[float, float]]:
    """By op: seconds of the host that launches it, and of the device. The first waits for the batch too. Where a step has several
    passes, the host adds up gradients besides. On a CPU device there is nothing to launch, and the host's seconds are its own."""
    device = machine.device
    known: dict[int, float] = {}  # like blocks have like calls: each is priced once
    for op in graph.ops:
        if op.call not in known:
            priced = exchange_seconds(op, graph.tensor, machine) if op.kind == "exchange" else None
            known[op.call] = device_seconds(op, graph.calls[op.call], device) if priced is None else priced
    call_seconds = device.host_seconds.value * device.calibration.host_call_factor.value
    if device.kind == "cpu":
        launch = device.launch_seconds.value
        return [(0.0, known[op.call] + max(op.calls * call_seconds - launch, 0.0)) for op in graph.ops]
    backward = sum(op.phase == "backward" for op in graph.ops) or 1
    summed = (passes > 1) * device.calibration.accumulation_calls.value * len(graph.parameters) / backward
    added = {"forward": 0.0, "backward": summed}
    found = [((op.calls + added[op.phase]) * call_seconds, known[op.call]) for op in graph.ops]
    if found:
        found[0] = found[0][0] + copy_seconds(graph, machine), found[0][1]
    return found


def lengthened(ops: Sequence[tuple[float, float]], passes: int = 1) -> list[float]:
    """By how many seconds each op lengthens its pass, with nothing beside it. Where a step has several passes, it is their mean:
    while the device works on one, the host launches the next."""
    took = [0.0] * len(ops)
    host = done = 0.0
    played = min(passes, PLAYED)  # the last of these stands for the others
    for number in range(played):
        weight = (1 if number < played - 1 else passes - played + 1) / passes
        for index, (launch, device) in enumerate(ops):
            host += launch
            over = max(done, host) + device
            took[index] += weight * (over - done)
            done = over
    return took


def pass_seconds(graph: Graph, machine: Machine, passes: int = 1) -> list[float]:
    """By how many seconds each op lengthens its pass, as `lengthened` has it."""
    return lengthened(op_seconds(graph, machine, passes), passes)


def timing_of(ops: Iterable[tuple[float, float]]) -> Timing:
    """Of ops in a row, each with the host's seconds and the device's."""
    launches, host, device, alone = 0, 0.0, 0.0, 0.0
    for launch, busy in ops:
        launches += 1
        host += launch
        device += busy
        alone = max(alone, host) + busy
    return Timing(launches, host, device, alone)


def update_seconds(rule: UpdateRule, chunks: Sequence[Chunk], device: Device) -> float:
    """One optimizer step over all chunks. In one pass the host has launched them before the device comes to them. Elsewhere each
    chunk is prepared before it is launched: host and device hardly overlap."""
    seconds, fitted = 0.0, device.calibration
    for chunk in chunks:
        if not chunk.is_updated:
            continue
        parameters = len(chunk.slots)
        if is_in_one_pass(rule, device):
            passed = chunk.elements * ONE_PASS_BYTES_PER_ELEMENT[chunk.dtype]
            seconds += passed / device.memory.at(passed) * fitted.curve_slowdown.value
            seconds += fitted.one_pass_calls.value * parameters * device.host_seconds.value
            continue
        own = fitted.split_update_bytes.value if chunk.precision.is_split else WHOLE_BYTES_PER_ELEMENT
        moved = chunk.elements * (rule.bytes_per_element + own)
        one_by_one = rule.scratch_is_shared  # an op for each parameter, not one for all
        typical = 8 * max(chunk.elements // parameters, 1) if one_by_one else 8 * chunk.elements
        calls = fitted.update_calls.value + (rule.ops_per_parameter if one_by_one else 0)
        seconds += moved / device.memory.at(typical) + calls * parameters * device.host_seconds.value
    return seconds
