"""Seconds: what each op costs on a machine, and what a pass of them costs when the host has to launch every one.

    device(op) = max(bytes / bandwidth_of_op(bytes), flops / rate_of_op(flops))      on the machine's measured curves
    host(op)   = calls * host_seconds                                                views before it included

On a GPU the host runs ahead: op i starts when it has been launched and op i-1 is done, so a small model takes the host's time and
a large one the device's. On a CPU device both are the same cores, and the times add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyfit.values.graph import Graph, Op, UpdateRule
from anyfit.values.layout import Chunk
from anyfit.values.machine import Curve, Device

# Bytes the engine itself moves in an update, by element of a bf16 chunk: merging the masters (6 + 8 + 10), widening (6) and
# scaling (8) the gradient, its norm (2), splitting the masters again (6 + 10 + 8 + 6).
SPLIT_BYTES_PER_ELEMENT = 70
# By element of an fp32 chunk: norm (4) and scaling (8).
WHOLE_BYTES_PER_ELEMENT = 12
# What one parameter costs the host in an update, in dispatcher calls: lists, lookups and the optimizer's bookkeeping.
CALLS_PER_PARAMETER = 2.5
# Fitted, on a GPU to the cases of benchmarks/cases.py that are marked `calibrates`, on a CPU to the demo. A probe's short bursts
# find a GPU's clocks higher than minutes of load leave them, and a CPU's caches warmer; and a real model's calls cost the host
# more than those of the probe's tiny blocks, since more Python lies between them.
SUSTAINED = {"cpu": 1.2, "cuda": 1.05}
HOST_SHARE = {"cpu": 3.0, "cuda": 1.8}


def device_seconds(op: Op, device: Device) -> float:
    """How long the device is busy with one op."""
    name = op.name.partition(".")[0]
    bandwidth = device.operations.get(name, device.memory)
    seconds = op.bytes / bandwidth.at(max(op.bytes, 1))
    if op.flops:
        seconds = max(op.bytes / device.memory.at(op.bytes), op.flops / _rates(op, name, device).at(op.flops))
    return seconds * SUSTAINED[device.kind]


def _rates(op: Op, name: str, device: Device) -> Curve:
    curves: Mapping[str, Curve] = device.matmul if op.aligned else device.matmul_unaligned
    if op.kind == "attention":
        curves = device.attention_backward if name.endswith("backward") else device.attention
    elif op.kind == "convolution":
        curves = device.convolution
    return curves.get(op.dtype) or curves.get("float32") or device.matmul["float32"]


def pass_seconds(graph: Graph, device: Device) -> list[float]:
    """For every op of a pass, by how much it lengthens the pass."""
    known: dict[tuple[object, ...], float] = {}  # like blocks have like ops: each is priced once
    took = []
    host = busy_until = 0.0
    call_seconds = device.host_seconds.value * HOST_SHARE[device.kind]
    for op in graph.ops:
        key = (op.name, op.dtype, op.flops, op.bytes, op.aligned)
        if key not in known:
            known[key] = device_seconds(op, device)
        before = busy_until
        if device.kind == "cpu":
            busy_until += known[key] + max(op.calls * call_seconds - device.launch_seconds.value, 0.0)
        else:
            host += op.calls * call_seconds
            busy_until = max(busy_until, host) + known[key]
        took.append(busy_until - before)
    return took


def update_seconds(rule: UpdateRule, chunks: Sequence[Chunk], device: Device) -> float:
    """One optimizer step over all chunks. The device has waited for the norm, and each chunk is prepared before it is launched:
    host and device hardly overlap."""
    seconds = 0.0
    for chunk in chunks:
        if not chunk.is_updated:
            continue
        parameters = len(chunk.slots)
        own = SPLIT_BYTES_PER_ELEMENT if chunk.dtype == "bfloat16" else WHOLE_BYTES_PER_ELEMENT
        moved = chunk.elements * (rule.bytes_per_element + own)
        one_by_one = rule.scratch_is_shared  # an op for each parameter, not one for all
        typical = 8 * max(chunk.elements // parameters, 1) if one_by_one else 8 * chunk.elements
        calls = CALLS_PER_PARAMETER + (rule.ops_per_parameter if one_by_one else 0)
        seconds += moved / device.memory.at(typical) + calls * parameters * device.host_seconds.value
    return seconds
