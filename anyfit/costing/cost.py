"""The cost model: a roofline per op on the machine's measured curves, and exact sums of bytes.

    seconds(op) = max(launch, flops / rate(flops), bytes / bandwidth(bytes))

The rates are those of the op's own size, so that a small product is not costed at the speed of a large one. The curves are
measured on whole ops, launch included. The update is costed from what the optimizer was seen to do to each element.
"""

from __future__ import annotations

from collections.abc import Sequence

from anyfit.values.graph import Graph, Op
from anyfit.values.layout import CHUNK_BYTES, Chunk, Placeable, lay_out
from anyfit.values.machine import Machine
from anyfit.values.profile import BlockCost, Pass, Profile, StateBytes, UpdateCost

# The largest error of a forecast over the cases of benchmarks/forecast.py (benchmarks/results/forecast-*.json), rounded up.
TIME_ERROR = {"cpu": 0.35, "cuda": 0.35}
MEMORY_ERROR = {"cpu": 0.02, "cuda": 0.05}
# What torch's CUDA allocator reserves beyond what is allocated: rounding and fragmentation.
ALLOCATOR_OVERHEAD = {"cpu": 1.0, "cuda": 1.06}

# Split masters, by element of a bf16 chunk: merging reads high and low and writes fp32 in three passes, the gradient is
# widened, splitting reads fp32 and writes both halves.
SPLIT_BYTES_PER_ELEMENT = 46
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def cost(graphs: Sequence[Graph], machine: Machine, batch_size: int) -> Profile:
    """The profile of a job from its traces, one a micro-batch size."""
    graph = graphs[0]
    chunks = chunks_of(graph)
    passes = sorted((_pass(each, machine) for each in graphs), key=lambda each: -each.micro_batch)
    device = machine.device
    rates = device.matmul.get("bfloat16" if graph.precision == "bf16" else "float32") or next(iter(device.matmul.values()))
    return Profile(
        model=graph.model,
        machine=machine.name,
        precision=graph.precision,
        optimizer=graph.update.name,
        batch_size=batch_size,
        parameters=sum(parameter.elements for parameter in graph.parameters),
        trainable=sum(parameter.elements for parameter in graph.parameters if parameter.trainable),
        state=_state(graph, chunks),
        passes=tuple(passes),
        update=_update(graph, chunks, machine),
        blocks=len(graph.blocks),
        chunk_bytes=CHUNK_BYTES,
        device_limit_bytes=machine.device_limit_bytes,
        host_limit_bytes=machine.host_limit_bytes,
        disk_limit_bytes=machine.disk_limit_bytes,
        context_bytes=int(device.context_bytes.value),
        allocator_overhead=ALLOCATOR_OVERHEAD[device.kind],
        peak_flops_per_second=rates.peak,
        time_error=TIME_ERROR[device.kind],
        memory_error=MEMORY_ERROR[device.kind],
        model_fingerprint=graph.fingerprint,
        machine_fingerprint=machine.fingerprint,
    )


def op_seconds(op: Op, machine: Machine) -> float:
    device = machine.device
    seconds = max(device.launch_seconds.value, op.bytes / device.memory.at(max(op.bytes, 1)))
    if op.flops:
        curves = device.attention if op.kind == "attention" else device.matmul
        curve = curves.get(op.dtype) or curves.get("float32") or next(iter(curves.values()))
        seconds = max(seconds, op.flops / curve.at(op.flops))
    return seconds


def chunks_of(graph: Graph) -> tuple[Chunk, ...]:
    """The layout a run of this model will have."""
    return lay_out(
        (
            Placeable(each.name, each.shape, each.dtype, _element_bytes(each.dtype), each.trainable, each.group)
            for each in graph.parameters
        ),
        CHUNK_BYTES,
    )


def _pass(graph: Graph, machine: Machine) -> Pass:
    count = len(graph.blocks)
    flops = {"forward": [0] * count, "backward": [0] * count}
    seconds = {"forward": [0.0] * count, "backward": [0.0] * count}
    recompute = [0.0] * count
    for op in graph.ops:
        took = op_seconds(op, machine)
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
    live = graph.live_bytes("kept")
    peak = max(range(len(live)), key=live.__getitem__)
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
        peak_bytes_accumulating=max(graph.live_bytes("consumed")),
        peak_at=graph.ops[peak].module or graph.model,
    )


def _state(graph: Graph, chunks: Sequence[Chunk]) -> StateBytes:
    rule = graph.update
    used = {parameter.name for parameter in graph.parameters if parameter.used}
    split = [chunk for chunk in chunks if chunk.is_updated and chunk.dtype == "bfloat16"]
    gradients = {"float32": 0, "bfloat16": 0}
    for parameter in graph.parameters:
        if parameter.used:
            gradients[parameter.dtype] += parameter.elements * _element_bytes(parameter.dtype)
    optimizer = sum(
        slot.elements * rule.state_bytes_per_element[chunk.group]
        for chunk in chunks
        if chunk.is_updated
        for slot in chunk.slots
        if slot.name in used
    )
    return StateBytes(
        parameters=sum(chunk.bytes for chunk in chunks),
        masters=sum(2 * chunk.elements for chunk in split),
        optimizer=int(optimizer),
        buffers=graph.buffer_bytes,
        scratch=max((4 * chunk.elements for chunk in split), default=0),
        gradients=sum(gradients.values()),
        # fp32 gradients add up where autograd put them, bf16 ones in fp32 beside the chunk
        accumulators=gradients["float32"] + sum(4 * chunk.elements for chunk in split),
    )


def _update(graph: Graph, chunks: Sequence[Chunk], machine: Machine) -> UpdateCost:
    rule, device = graph.update, machine.device
    seconds, scratch, widened = 0.0, 0, 0
    for chunk in chunks:
        if not chunk.is_updated:
            continue
        for slot in chunk.slots:
            per_op = max(rule.bytes_per_element / max(rule.ops_per_parameter, 1) * slot.elements, 1)
            seconds += rule.ops_per_parameter * max(device.launch_seconds.value, per_op / device.memory.at(per_op))
        widest = max(slot.elements for slot in chunk.slots)
        own = widest if rule.scratch_is_shared else chunk.elements
        scratch = max(scratch, int(own * rule.scratch_bytes_per_element))
        if chunk.dtype == "bfloat16":
            seconds += SPLIT_BYTES_PER_ELEMENT * chunk.elements / device.memory.at(8 * chunk.elements)
            widened = max(widened, 4 * chunk.elements)
    return UpdateCost(seconds=seconds, scratch_bytes=scratch, widened_bytes=widened)


def _element_bytes(dtype: str) -> int:
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"parameters of dtype {dtype} are not supported")
    return ELEMENT_BYTES[dtype]
