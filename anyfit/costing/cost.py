"""The cost model: `cost(graphs, machine, batch_size) -> Profile`. Times are in times.py, bytes in memory.py."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from anyfit.values.graph import Graph
from anyfit.values.layout import CHUNK_BYTES, Chunk
from anyfit.values.machine import Machine
from anyfit.values.profile import BlockCost, Pass, Profile, UpdateCost

from .memory import chunks_of, live_bytes, reserved_bytes, state_bytes, update_scratch_bytes
from .times import copy_seconds, device_seconds, measured_share, pass_seconds, update_seconds

# How far measured steps lay from their forecasts over the recorded cases, rounded up: on a GPU those of tests/golden, on a CPU
# those of benchmarks/forecast.py (benchmarks/results/forecast-cpu.json). tests/costing/test_golden.py holds them to it.
TIME_ERROR = {"cpu": 0.45, "cuda": 0.17}
# Convolutions and routed experts are priced by rougher curves, and a GPU that waits for its host by a rougher figure.
ROUGH_TIME_ERROR = {"cpu": 0.7, "cuda": 0.52}
# Where the calls themselves were measured on the device, all but a few.
MEASURED_TIME_ERROR = {"cpu": 0.45, "cuda": 0.12}
LEAST_MEASURED = 0.95  # of the device's seconds
HOST_BOUND = 1.2  # a pass that takes this many times the device's own seconds waits for the host
MEMORY_ERROR = {"cpu": 0.02, "cuda": 0.065}
RESERVED_ERROR = {"cpu": 0.02, "cuda": 0.155}


def cost(graphs: Sequence[Graph], machine: Machine, batch_size: int) -> Profile:
    """The profile of a job from its traces, one a micro-batch size."""
    collects = gc.isenabled()
    gc.disable()  # it would look through a large model's hundreds of thousands of ops again and again, and find nothing
    try:
        return _cost(graphs, machine, batch_size)
    finally:
        if collects:
            gc.enable()


def _cost(graphs: Sequence[Graph], machine: Machine, batch_size: int) -> Profile:
    graph, device = graphs[0], machine.device
    chunks = chunks_of(graph)
    passes = sorted((_pass(each, chunks, machine, batch_size) for each in graphs), key=lambda each: -each.micro_batch)
    largest = max(graphs, key=lambda each: each.micro_batch)
    rates = device.matmul.get("bfloat16" if graph.precision == "bf16" else "float32") or device.matmul["float32"]
    return Profile(
        model=graph.model,
        machine=machine.name,
        precision=graph.precision,
        optimizer=graph.update.name,
        batch_size=batch_size,
        parameters=sum(parameter.elements for parameter in graph.parameters),
        trainable=sum(parameter.elements for parameter in graph.parameters if parameter.trainable),
        state=state_bytes(graph, chunks),
        passes=tuple(passes),
        update=UpdateCost(update_seconds(graph.update, chunks, device), update_scratch_bytes(graph.update, chunks)),
        blocks=len(graph.blocks),
        chunk_bytes=CHUNK_BYTES,
        device_limit_bytes=machine.device_limit_bytes,
        host_limit_bytes=machine.host_limit_bytes,
        disk_limit_bytes=machine.disk_limit_bytes,
        context_bytes=int(device.context_bytes.value),
        workspace_bytes=int(device.workspace_bytes.value),
        peak_flops_per_second=rates.peak,
        time_error=_time_error(largest, machine, passes[0].seconds, rates.spread),
        memory_error=MEMORY_ERROR[device.kind],
        reserved_error=RESERVED_ERROR[device.kind],
        model_fingerprint=graph.fingerprint,
        machine_fingerprint=machine.fingerprint,
        notes=tuple(dict.fromkeys(note for each in graphs for note in each.notes)),
    )


def _time_error(graph: Graph, machine: Machine, seconds: float, spread: float) -> float:
    """How far a step may lie from its forecast; `spread` is that of the curve which bounds most passes."""
    device = machine.device
    busy = sum(device_seconds(op, graph.calls[op.call], device) for op in graph.ops)
    if device.kind == "cuda" and seconds - copy_seconds(graph, machine) > HOST_BOUND * busy:
        return max(ROUGH_TIME_ERROR[device.kind], spread)
    if measured_share(graph, device) >= LEAST_MEASURED:
        return MEASURED_TIME_ERROR[device.kind]
    rough = any(op.kind == "convolution" or op.name.startswith("_grouped_mm") for op in graph.ops)
    return max((ROUGH_TIME_ERROR if rough else TIME_ERROR)[device.kind], spread)


def _pass(graph: Graph, chunks: Sequence[Chunk], machine: Machine, batch_size: int) -> Pass:
    count = len(graph.blocks)
    flops = {"forward": [0] * count, "backward": [0] * count}
    seconds = {"forward": [0.0] * count, "backward": [0.0] * count}
    recompute = [0.0] * count
    for op, took in zip(graph.ops, pass_seconds(graph, machine), strict=True):
        flops[op.phase][op.block] += op.flops
        seconds[op.phase][op.block] += took
        if op.recomputes:
            recompute[op.block] += took
    kept = [0] * count
    for value in graph.values:
        if graph.kept(value):
            kept[value.block] += value.bytes
    parameters = [0] * count
    for parameter in graph.parameters:
        parameters[parameter.block] += parameter.elements
    live = live_bytes(graph, machine.device, "kept")
    peak = max(range(len(live)), key=live.__getitem__)
    reserved = 0
    if machine.device.kind == "cuda":
        reserved = reserved_bytes(graph, chunks, machine.device, accumulating=graph.micro_batch < batch_size)
    return Pass(
        micro_batch=graph.micro_batch,
        tokens=graph.tokens,
        blocks=tuple(
            BlockCost(
                name=block.name,
                kind=block.kind,
                parameters=parameters[index],
                flops_forward=flops["forward"][index],
                flops_backward=flops["backward"][index],
                seconds_forward=seconds["forward"][index],
                seconds_backward=seconds["backward"][index],
                seconds_recompute=recompute[index],
                kept_bytes=kept[index],
            )
            for index, block in enumerate(graph.blocks)
        ),
        peak_bytes=live[peak],
        peak_bytes_accumulating=max(live_bytes(graph, machine.device, "consumed")),
        peak_at=graph.ops[peak].module or graph.model,
        reserved_bytes=reserved,
    )
