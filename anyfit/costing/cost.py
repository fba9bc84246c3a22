"""The cost model: `cost(graphs, machine, batch_size) -> Profile`. Times are in times.py, bytes in memory.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import get_args

from anyfit.values.engine import DISK_REQUESTS
from anyfit.values.graph import COSTLY_OPS, LEAST_OFFLOAD_BYTES, Graph
from anyfit.values.layout import CHUNK_BYTES, Chunk
from anyfit.values.machine import Beside, Device, Machine, update_threads
from anyfit.values.precision import PRECISIONS
from anyfit.values.profile import (
    BlockCost,
    ChoiceCost,
    DiskRates,
    HostRates,
    LaunchCosts,
    Layout,
    LoadedRates,
    Pass,
    Profile,
    Segment,
    UpdateCost,
)

from .links import Links
from .memory import chunk_costs, chunks_of, chunks_together, live_bytes, reserved_bytes, segments, state_bytes, temporary_bytes
from .times import (
    copy_seconds,
    lengthened,
    measured_share,
    op_seconds,
    rough_share,
    timing_of,
    update_seconds,
)

# A pass is rough where convolutions and routed experts, which the curves price badly, take this much of the device's seconds: a
# convolution that only cuts images into patches does not.
ROUGH = 0.02
# The least share of the device's seconds in calls that were measured, for a forecast to be as good as these. Where a pass is
# rough the curves know the shares badly: a ResNet of which 0.95 is left is 15 % off, a ConvNeXt of which 0.85 is left, 20 %.
LEAST_MEASURED = 0.85
LEAST_MEASURED_OF_ROUGH = 0.95
# State that is partly on the host lies in about this many chunks at least, so that some can stay and few be in the way.
FINE_CHUNKS, MOST_CHUNKS = 32, 200
LEAST_CHUNK_BYTES = {"cpu": 2**14, "cuda": 2**23}  # a GPU is done with less before it has been told of it
Ops = Sequence[tuple[float, float]]  # by op, seconds of the host that launches it and of the device
HOST_BOUND = 1.2  # a pass that takes this many times the device's own seconds waits for the host


def cost(graphs: Sequence[Graph], machine: Machine, batch_size: int, rank_grid: tuple[int, int] = (1, 1)) -> Profile:
    """The profile of a job from its traces, one a micro-batch size. `rank_grid` is (ranks per node, nodes)."""
    collects = gc.isenabled()
    gc.disable()  # it would look through a large model's hundreds of thousands of ops again and again, and find nothing
    try:
        return _cost(graphs, machine, batch_size, Links(machine, *rank_grid))
    finally:
        if collects:
            gc.enable()


def _cost(graphs: Sequence[Graph], machine: Machine, batch_size: int, links: Links) -> Profile:
    graph, device, fitted = graphs[0], machine.device, machine.device.calibration
    weight = PRECISIONS[graph.precision].weight
    if not device.computes_in(weight):
        raise ValueError(f"{machine.name}: a {device.name} does not compute in {weight}; plan for it with --dtype fp32")
    chunks = chunks_of(graph)
    share = -(-batch_size // (links.ranks // graph.tensor))
    passes = sorted((_pass(each, chunks, machine, share) for each in graphs), key=lambda each: -each.micro_batch)
    fine, *others = _layouts(graph, device.kind, links.ranks // graph.tensor)  # for the data axis, as they are placed
    link_error, link_note = links.error()
    trainable = graph.elements(trainable=True)
    own = sum(parameter.elements for parameter in graph.parameters if parameter.trainable)
    largest = max(graphs, key=lambda each: each.micro_batch)
    rates = device.matmul.get(weight) or device.matmul["float32"]
    made = Profile(
        model=graph.model,
        machine=machine.name,
        precision=graph.precision,
        optimizer=graph.update.name,
        batch_size=batch_size,
        parameters=graph.elements(),
        trainable=trainable,
        state=state_bytes(graph, chunks, device),
        passes=tuple(passes),
        update=UpdateCost(
            # of so many as are trained: what one of them takes is what counts, where a tensor axis leaves a rank fewer
            update_seconds(graph.update, chunks, device) * (trainable / max(own, 1)),
            temporary_bytes(graph.update, chunks, device),
        ),
        blocks=len(graph.blocks),
        chunk_bytes=CHUNK_BYTES,
        device_limit_bytes=machine.device_limit_bytes,
        host_limit_bytes=min(machine.host_limit_bytes, int(machine.host.memory_bytes.value) // links.node),
        disk_limit_bytes=0 if machine.limits.disk_bytes is None else machine.disk_limit_bytes,
        context_bytes=int(device.context_bytes.value),
        workspace_bytes=int(device.workspace_bytes.value),
        peak_flops_per_second=rates.peak,
        time_error=_time_error(largest, machine, passes[0].seconds, rates.measurement_error),
        memory_error=fitted.peak_error.value,
        reserved_error=fitted.reserved_error.value,
        offload_error=fitted.offload_reserved_error.value,
        model_fingerprint=graph.fingerprint,
        machine_fingerprint=machine.fingerprint,
        calibration=fitted,
        memory_bytes_per_second=device.memory.peak,
        offload_chunk_bytes=fine.chunk_bytes,
        chunks=fine.chunks,
        together=fine.together,
        other_layouts=tuple(others),
        host=_host_rates(machine, links.node),
        disk=_disk_rates(machine, links.ranks),
        notes=tuple(dict.fromkeys(note for each in graphs for note in each.notes)),
        divisions=links.divisions(graph.tensor),
        link_error=link_error,
        link_note=link_note,
        loss=graph.loss,
        limited=tuple(tier for tier in ("device", "host", "disk") if getattr(machine.limits, f"{tier}_bytes") is not None),
        assumes_host=machine.assumes_host,
    )
    return made.staying(graph.state_stays) if graph.state_stays else made


def _layouts(graph: Graph, kind: str, ranks: int) -> Iterator[Layout]:
    """Layouts whose chunks are placed one by one: first the usual size, fine enough and not too many; then about half and about
    twice that size, where the chunks differ."""
    whole = sum(chunk.bytes for chunk in chunks_of(graph))
    usual = max(LEAST_CHUNK_BYTES[kind], whole // MOST_CHUNKS, min(CHUNK_BYTES, whole // FINE_CHUNKS))
    seen = set()
    for base in (usual, usual // 2, usual * 2):
        size = _size_near(graph, base, ranks)
        chunks = chunks_of(graph, size, ranks)
        if chunks not in seen:
            seen.add(chunks)
            yield Layout(size, chunk_costs(graph, chunks), chunks_together(graph, chunks))


def _size_near(graph: Graph, base: int, ranks: int) -> int:
    """About this size, or somewhat larger where that leaves fewer chunks nearly empty: large parameters stand alone, and what is
    between two of them may be little."""
    counts = {}
    for size in (base, base * 5 // 4, base * 3 // 2):
        chunks = chunks_of(graph, size, ranks)
        counts[size] = len(chunks), max(chunk.bytes for chunk in chunks)
    allowed = [size for size, (_, largest) in counts.items() if largest <= max(counts[base][1], base * 5 // 4)]
    return min(allowed, key=lambda size: (counts[size][0], size))


def _time_error(graph: Graph, machine: Machine, seconds: float, rate_error: float) -> float:
    """How far a step may lie from its forecast; `rate_error` is that of the curve which bounds most passes."""
    device, fitted = machine.device, machine.device.calibration
    busy = sum(seconds for _, seconds in op_seconds(graph, machine))
    if device.kind == "cuda" and seconds - copy_seconds(graph, machine) > HOST_BOUND * busy:
        return max(fitted.rough_time_error.value, rate_error)
    rough = rough_share(graph, device) >= ROUGH
    if measured_share(graph, device) >= (LEAST_MEASURED_OF_ROUGH if rough else LEAST_MEASURED):
        return fitted.measured_time_error.value
    return max((fitted.rough_time_error if rough else fitted.time_error).value, rate_error)


def _host_rates(machine: Machine, ranks: int = 1) -> HostRates:
    """Of one of the ranks of a node, all of which use its memory at once; the links to their devices are their own."""
    host, copies = machine.host, machine.copies
    threads = update_threads(host.cores)
    alone, loaded = host.update.at(threads) / ranks, host.update_loaded.at(threads) / ranks
    if copies is None:  # on a CPU device a copy is read and written by the same cores
        rate = host.bytes_per_second.value / 2 / ranks
        return HostRates(loaded, rate, rate, overlaps=False)
    share = machine.device.calibration.host_update_share.value
    alone, loaded = share * alone, share * loaded
    up, down = copies.up_both.peak, copies.down_both.peak
    if ranks > 1:  # all copy in both directions
        each_way = host.bytes_per_second.value / 2 / ranks
        up, down = min(up, each_way), min(down, each_way)
    slower = LoadedRates(loaded, min(copies.up_loaded.value / ranks, up), min(copies.down_loaded.value / ranks, down))
    return HostRates(max(alone, loaded), up, down, overlaps=True, loaded=slower, launching=_launch_costs(machine.device))


def _disk_rates(machine: Machine, ranks: int) -> DiskRates | None:
    """As updates reach them, with as many requests in flight as the engine has."""
    if ranks > 1 and machine.limits.disk_bytes is not None:
        raise ValueError(
            f"a disk was allowed, and the job is for {ranks} ranks; this version has state on the disk for one rank: leave "
            "--disk, or with_limits(disk=), out"
        )
    disk, share = machine.disk, machine.device.calibration.disk_share
    if disk is None or ranks > 1:
        return None
    curves = disk.read, disk.write, disk.both
    read, write, both = (share.value * curve.at(DISK_REQUESTS) for curve in curves)
    error = max(share.measurement_error, *(curve.measurement_error for curve in curves))
    bears = disk.endurance_bytes
    return DiskRates(read, write, both, error, int(disk.free_bytes.value), int(bears.value), bears.source)


def _launch_costs(device: Device) -> LaunchCosts:
    fitted, call = device.calibration, device.host_seconds.value
    share = fitted.launch_slowdown_share.value
    updates, copies, both = (1 + share * (device.launch_slowdown[beside].value - 1) for beside in get_args(Beside))
    return LaunchCosts(
        beside_updates=updates,
        beside_copies=copies,
        beside_both=both,
        watched_seconds=fitted.watched_calls.value * call,
        gradient_seconds=fitted.gradient_calls.value * call,
        fetch_seconds=fitted.fetch_calls.value * call,
        bind_seconds=fitted.bind_calls.value * call,
        taken_seconds=fitted.taken_calls.value * call,
        replay_seconds=fitted.replay_calls.value * call,
    )


def _pass(graph: Graph, chunks: Sequence[Chunk], machine: Machine, share: int) -> Pass:
    """One of those that a rank's share of the batch makes."""
    count = len(graph.blocks)
    flops = {"forward": [0] * count, "backward": [0] * count}
    seconds = {"forward": [0.0] * count, "backward": [0.0] * count}
    recompute = [0.0] * count
    device, passes = machine.device, -(-share // graph.micro_batch)
    ops = op_seconds(graph, machine, passes)
    all_seconds = lengthened(ops, passes)
    choices = _choices(graph, ops, all_seconds, machine)
    for op, took in zip(graph.ops, all_seconds, strict=True):
        flops[op.phase][op.block] += op.flops
        seconds[op.phase][op.block] += took
        if op.recomputes:
            recompute[op.block] += took
    parameters = [0] * count
    for parameter in graph.parameters:
        parameters[parameter.block] += parameter.elements
    live, consuming = (live_bytes(graph, device, gradients) for gradients in ("kept", "consumed"))
    peak = max(range(len(live)), key=live.__getitem__)
    accumulating = graph.micro_batch < share
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
                kept_bytes=choices[index]["keep"].kept_bytes,
                choices=choices[index],
            )
            for index, block in enumerate(graph.blocks)
        ),
        segments=_timed(graph, segments(graph, all_seconds, consuming), ops, is_launched=device.kind == "cuda"),
        peak_bytes=live[peak],
        peak_bytes_accumulating=max(consuming),
        peak_at=graph.ops[peak].module or graph.model,
        reserved_bytes=reserved_bytes(graph, chunks, device, accumulating=accumulating) if device.kind == "cuda" else 0,
    )


def _timed(graph: Graph, found: Sequence[Segment], ops: Ops, *, is_launched: bool) -> tuple[Segment, ...]:
    """With what the host and the device take for each, where these are two, and what is exchanged: segments are cut where another
    block begins."""
    cut = groupby(zip(graph.ops, ops, strict=True), key=lambda pair: (pair[0].block, pair[0].phase))
    made = []
    for segment, (_, stretch) in zip(found, cut, strict=True):
        pairs = list(stretch)
        exchanged = sum(seconds[1] for op, seconds in pairs if op.kind == "exchange")
        timing = timing_of(seconds for _, seconds in pairs) if is_launched else None
        made.append(replace(segment, timing=timing, exchange_seconds=exchanged))
    return tuple(made)


def _choices(graph: Graph, ops: Ops, took: Sequence[float], machine: Machine) -> list[Mapping[str, ChoiceCost]]:
    """What the activations of each block cost under each choice: bytes that stay for backward, bytes that move, seconds on top.

    keep        all that forward leaves stays
    recompute   its inputs stay; its forward is recomputed, up to the last op that made something for backward. One that is cut
                over a tensor axis is one function, which saves what backward needs when it has ended
    selective   the results of COSTLY_OPS stay too, whether backward needs them or not; all other forward ops are recomputed.
                Python looks at every call of the block, both times, which takes the host a while. Not of a block that is cut over
                a tensor axis: its ops are inside one function
    offload     what is large enough moves to the host and back; only the rest stays. Of what other blocks save too, and of
                buffers, a copy moves

    A value that is kept counts where it is saved, not where it is made: a block's input is its own. What is outside blocks can
    only be kept, and so is what nothing can come between. `took` are the seconds by which every op lengthens the pass.
    """
    count, device, host = len(graph.blocks), machine.device, _host_rates(machine)
    is_launched = device.kind == "cuda"
    look_seconds = device.calibration.selective_call_factor.value * device.host_seconds.value if is_launched else 0.0
    added, noted = device.calibration.recompute_call_factor.value, device.calibration.recompute_calls.value
    kept, costly, large, last, sent = ([0] * count for _ in range(5))
    for value in graph.values:
        maker = graph.ops[value.born]
        if value.kind == "activation" and maker.phase == "forward" and _is_costly(maker.name):
            costly[value.block] += value.bytes
        if graph.kept(value):
            home = graph.home(value)
            kept[home] += value.bytes
            if value.bytes >= LEAST_OFFLOAD_BYTES:
                large[home] += value.bytes
                sent[home] += 1
            if value.dies < len(graph.ops) and graph.ops[value.dies].block == value.block:  # not the block's output
                last[value.block] = max(last[value.block], value.born)
    again: list[list[tuple[float, float]]] = [[] for _ in range(count)]  # by block, ops that are recomputed: host, device
    looked: list[list[tuple[float, float]]] = [[] for _ in range(count)]  # the same of what is selective
    forward, cheap = [0.0] * count, [0.0] * count
    for index, (op, seconds) in enumerate(zip(graph.ops, took, strict=True)):
        if op.phase == "forward" and (index <= last[op.block] or graph.blocks[op.block].is_cut):
            launch, busy = ops[index]
            look, stays = look_seconds * op.calls, _is_costly(op.name)
            again[op.block].append(((1 + added) * launch, busy))
            looked[op.block].append((look if stays else launch + look, 0.0 if stays else busy))
            forward[op.block] += seconds
            cheap[op.block] += (0.0 if stays else seconds) + look
    costs: list[Mapping[str, ChoiceCost]] = []
    for index, block in enumerate(graph.blocks):
        choices: dict[str, ChoiceCost] = {"keep": ChoiceCost(kept[index], 0, 0.0)}
        if block.name and not block.is_whole:
            note = noted * device.host_seconds.value, 0.0
            whole, part = (timing_of([note, *each[index]]) if is_launched else None for each in (again, looked))
            moved = block.offload_bytes
            copies = moved / host.down_bytes_per_second + moved / host.up_bytes_per_second
            choices["recompute"] = ChoiceCost(block.input_bytes, 0, forward[index], whole)
            if not block.is_cut:
                choices["selective"] = ChoiceCost(block.input_bytes + costly[index], 0, cheap[index], part)
            sending = device.calibration.offload_calls.value * sent[index] * device.host_seconds.value, 0.0
            sends = timing_of([sending]) if is_launched else None
            choices["offload"] = ChoiceCost(kept[index] - large[index], moved, copies, sends)
        costs.append(choices)
    return costs


def _is_costly(op: str) -> bool:
    return op.partition(".")[0] in COSTLY_OPS
