"""Bytes: what lives from step to step, exactly; and what torch's allocator reserves on top, by playing a step through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

from anyfit.values.graph import Graph, UpdateRule, largest_sets
from anyfit.values.layout import CHUNK_BYTES, Chunk, Placeable, lay_out
from anyfit.values.machine import Device
from anyfit.values.precision import ELEMENT_BYTES, SUM_BYTES
from anyfit.values.profile import ChunkCost, Segment, StateBytes

from .allocator import MIB, CachingAllocator, Piece
from .workspaces import workspaces

SUPPORTED = ELEMENT_BYTES.keys() - {"float64", "float16"}  # which no precision of a Job holds exactly
MADE_AT_START = {"Adam", "AdamW"}  # whose state placing takes before the first step


def chunks_of(graph: Graph, chunk_bytes: int = CHUNK_BYTES, ranks: int = 1) -> tuple[Chunk, ...]:
    """The layout a run of this model will have on so many ranks."""
    placeables = (
        Placeable(each.name, each.shape, each.dtype, element_bytes(each.dtype), each.trainable, each.group, each.is_cut)
        for each in graph.parameters
    )
    return lay_out(placeables, chunk_bytes, ranks)


def element_bytes(dtype: str) -> int:
    if dtype not in SUPPORTED:
        raise ValueError(f"parameters of dtype {dtype} are not supported")
    return ELEMENT_BYTES[dtype]


def is_in_one_pass(rule: UpdateRule, device: Device) -> bool:
    """Whether a kernel of the engine's updates resident chunks (kernels/adamw_gpu.py), and not torch: two moments, no more."""
    return device.kind == "cuda" and rule.name in MADE_AT_START and all(each == 8 for each in rule.state_bytes_per_element)


def _scratch_bytes(rule: UpdateRule, chunks: Sequence[Chunk], device: Device) -> int:
    """Held between steps: gradients side by side, for one pass over them; or masters and gradients in fp32, for torch."""
    if is_in_one_pass(rule, device):
        return max((chunk.bytes for chunk in chunks if chunk.is_updated), default=0)
    return max((2 * SUM_BYTES * chunk.elements for chunk in chunks if chunk.is_split), default=0)


def state_bytes(graph: Graph, chunks: Sequence[Chunk], device: Device) -> StateBytes:
    rule = graph.update
    used = {parameter.name: parameter for parameter in graph.parameters if parameter.used}
    split = [chunk for chunk in chunks if chunk.is_split]
    gradients = dict.fromkeys(ELEMENT_BYTES, 0)
    for parameter in used.values():
        gradients[parameter.dtype] += parameter.elements * element_bytes(parameter.dtype)
    optimizer = sum(
        chunk.elements * rule.state_bytes_per_element[chunk.group]
        for chunk in chunks
        if chunk.is_updated and (rule.name in MADE_AT_START or any(slot.name in used for slot in chunk.slots))
    )
    return StateBytes(
        parameters=sum(chunk.bytes for chunk in chunks),
        masters=sum(chunk.precision.low_bytes * chunk.elements for chunk in split),
        optimizer=int(optimizer),
        buffers=graph.buffer_bytes,
        scratch=_scratch_bytes(rule, chunks, device),
        gradients=sum(gradients.values()),
        # fp32 gradients add up where autograd put them, bf16 ones in fp32 beside the chunk
        accumulators=gradients["float32"] + sum(SUM_BYTES * chunk.elements for chunk in split),
    )


def chunk_costs(graph: Graph, chunks: Sequence[Chunk]) -> tuple[ChunkCost, ...]:
    """Each chunk's share of the state, to be placed by itself."""
    rule = graph.update
    used = {parameter.name for parameter in graph.parameters if parameter.used}
    summed = {parameter.name for parameter in graph.parameters if parameter.adds_up}
    block_of = {parameter.name: parameter.block for parameter in graph.parameters}
    costs = []
    for chunk in chunks:
        per_element = rule.state_bytes_per_element[chunk.group] + chunk.precision.low_bytes if chunk.is_updated else 0
        gradient, sums = (
            sum(slot.elements for slot in chunk.slots if slot.name in names) * chunk.element_bytes for names in (used, summed)
        )
        costs.append(
            ChunkCost(
                weights_bytes=chunk.bytes,
                elements=chunk.elements,
                trainable=chunk.trainable,
                gradient_bytes=gradient,
                optimizer_bytes=int(chunk.elements * per_element),
                is_updated=chunk.is_updated,
                blocks=tuple(sorted({block_of[slot.name] for slot in chunk.slots})),
                parameters=tuple(slot.name for slot in chunk.slots if not graph.blocks[block_of[slot.name]].name),
                summed_bytes=sums,
                is_split=chunk.is_split,
                tensors=len(chunk.slots),
                is_cut=chunk.is_cut,
            )
        )
    return tuple(costs)


def chunks_together(graph: Graph, chunks: Sequence[Chunk]) -> tuple[tuple[int, ...], ...]:
    """Chunks whose weights are needed at once: of each such set of parameters, but for those that are part of another."""
    chunk_of = {slot.name: index for index, chunk in enumerate(chunks) for slot in chunk.slots}
    names = [parameter.name for parameter in graph.parameters]
    return largest_sets(frozenset(chunk_of[names[index]] for index in needed) for needed in graph.together)


def temporary_bytes(rule: UpdateRule, chunks: Sequence[Chunk], device: Device) -> int:
    """Temporary bytes of the optimizer while one chunk is updated; at the first step, the state that it makes before that goes to
    its place."""
    if is_in_one_pass(rule, device):
        return 0
    needed = [0.0]
    for chunk in chunks:
        if chunk.is_updated:
            sizes = [slot.elements for slot in chunk.slots]
            needed.append((max(sizes) if rule.scratch_is_shared else chunk.elements) * rule.scratch_bytes_per_element)
            if rule.name not in MADE_AT_START:
                needed.append(sum(sizes) * rule.state_bytes_per_element[chunk.group])
    return int(max(needed))


def live_bytes(graph: Graph, device: Device, gradients: Literal["kept", "consumed"]) -> list[int]:
    """Bytes alive during each op, with what its kernels take for themselves."""
    live = graph.live_bytes(gradients)
    if device.kind != "cuda":
        return live
    most = [max((each.bytes for each in workspaces(text, int(device.processors.value))), default=0) for text in graph.calls]
    return [bytes + most[op.call] for bytes, op in zip(live, graph.ops, strict=True)]


def segments(graph: Graph, seconds: Sequence[float], live: Sequence[int]) -> tuple[Segment, ...]:
    """The pass cut wherever another block begins. `live` are the bytes during each op without gradients of parameters."""
    begins: dict[int, int] = {}  # by block: its first op
    for index, op in enumerate(graph.ops):
        begins.setdefault(op.block, index)
    changes: dict[int, list[tuple[int, int]]] = {}  # by op: (block, bytes) that a block begins or ceases to keep for backward
    for value in graph.values:
        if graph.kept(value) and graph.blocks[home := graph.home(value)].name:
            changes.setdefault(max(value.born, begins.get(home, 0)), []).append((home, value.bytes))
            changes.setdefault(value.dies + 1, []).append((home, -value.bytes))
    kept = [0] * len(graph.blocks)
    in_all = 0
    found: list[Segment] = []
    modules: list[set[str]] = []
    for (block, phase), stretch in groupby(enumerate(graph.ops), key=lambda pair: (pair[1].block, pair[1].phase)):
        took, works, names = 0.0, list[int](), set[str]()
        for index, op in stretch:
            for of, change in changes.get(index, ()):
                kept[of] += change
                in_all += change
            took += seconds[index]
            works.append(live[index] - in_all + kept[block])
            names.add(op.module)
        found.append(Segment(block, phase, took, max(works)))
        modules.append(names)
    return tuple(_with_parameters(graph, found, modules))


def _with_parameters(graph: Graph, found: Sequence[Segment], modules: Sequence[set[str]]) -> Iterator[Segment]:
    """Adds to segments between blocks the parameters of the modules that run in them. A parameter whose module runs in none, as
    other code uses it, counts in all."""
    outside = [parameter for parameter in graph.parameters if not graph.blocks[parameter.block].name]
    homes = {parameter.name: {name.rpartition(".")[0] for name in parameter.names} for parameter in outside}
    between = [(each, ran) for each, ran in zip(found, modules, strict=True) if not graph.blocks[each.block].name]
    seen = {phase: set[str]().union(*(ran for each, ran in between if each.phase == phase)) for phase in ("forward", "backward")}
    for each, ran in zip(found, modules, strict=True):
        used = (name for name, at in homes.items() if at & ran or not at & seen[each.phase])
        yield each if graph.blocks[each.block].name else replace(each, parameters=tuple(used))


def reserved_bytes(graph: Graph, chunks: Sequence[Chunk], device: Device, *, accumulating: bool) -> int:
    """What torch's allocator holds after two steps: the first may make the optimizer's state, the second is like all others. The
    order counts: what a first step leaves lies in the holes of its pass, and where that cuts the room of a large tensor in two,
    the second step takes that room anew."""
    processors, library_bytes = int(device.processors.value), int(device.workspace_bytes.value)
    sizes = tuple((chunk.bytes, chunk.elements, chunk.is_split, chunk.is_updated) for chunk in chunks)
    key = "reserved", processors, library_bytes, is_in_one_pass(graph.update, device), accumulating, sizes
    if key not in graph.worked_out:
        graph.worked_out[key] = _reserved_bytes(graph, chunks, device, accumulating=accumulating)
    return graph.worked_out[key]


def _reserved_bytes(graph: Graph, chunks: Sequence[Chunk], device: Device, *, accumulating: bool) -> int:
    allocator = CachingAllocator()
    _place(allocator, graph, chunks, device, accumulating=accumulating)
    used = {parameter.name for parameter in graph.parameters if parameter.used}
    library_bytes = int(device.workspace_bytes.value)
    for step in range(2):
        gradients = _play_pass(allocator, graph, device, library_bytes if step == 0 else 0, consumed=accumulating)
        if not is_in_one_pass(graph.update, device):
            _play_update(allocator, graph.update, chunks, used, first=step == 0)
        allocator.give(*gradients)
    return allocator.reserved_bytes


def _place(allocator: CachingAllocator, graph: Graph, chunks: Sequence[Chunk], device: Device, *, accumulating: bool) -> None:
    """Takes what lives from step to step, in the order of placing/place.py."""
    allocator.take(graph.buffer_bytes)
    split = [chunk for chunk in chunks if chunk.is_split]
    for chunk in chunks:
        allocator.take(chunk.bytes)
        if chunk.is_split:
            allocator.take(chunk.precision.low_bytes * chunk.elements)
    if accumulating:
        for chunk in split:
            allocator.take(SUM_BYTES * chunk.elements)
    if graph.update.name in MADE_AT_START:
        for chunk in chunks:
            if chunk.is_updated:
                _take_moments(allocator, graph.update, chunk)
    in_one_pass = is_in_one_pass(graph.update, device)
    scratch: list[Piece] = []
    for chunk in chunks if in_one_pass else split:
        sizes = [chunk.bytes] if in_one_pass else [4 * chunk.elements] * 2  # gradients as they are; or with masters, in fp32
        if chunk.is_updated and (not scratch or scratch[0].size < sizes[0]):  # it grows to what the largest wants
            outgrown, scratch = scratch, [allocator.take(size) for size in sizes]
            allocator.give(*outgrown)


def _take_moments(allocator: CachingAllocator, rule: UpdateRule, chunk: Chunk) -> None:
    for _ in range(int(rule.state_bytes_per_element[chunk.group]) // 4):
        allocator.take(4 * chunk.elements)


def _play_pass(allocator: CachingAllocator, graph: Graph, device: Device, library_bytes: int, *, consumed: bool) -> list[Piece]:
    """Takes and gives what one pass does; the gradients that are left. `library_bytes` are what matmul libraries keep."""
    taken = _play_inputs(allocator, graph)
    needed = [workspaces(text, int(device.processors.value)) for text in graph.calls]
    kept = _kept_by_libraries(library_bytes)
    births, deaths = _births_and_deaths(graph, consumed=consumed)
    for op, born, died in zip(graph.ops, births, deaths, strict=True):
        for count, identity in enumerate(born, 1):
            taken[identity] = allocator.take(graph.values[identity].bytes)
            for workspace in needed[op.call]:
                if workspace.after == count or workspace.after > count == len(born):
                    allocator.give(allocator.take(workspace.bytes))
        for bytes in kept.pop(op.phase, []) if op.kind == "matmul" else []:
            allocator.take(bytes)
        for identity in died:
            allocator.give(taken.pop(identity))
    gradients = [piece for identity, piece in taken.items() if graph.values[identity].kind == "gradient"]
    allocator.give(*[piece for identity, piece in taken.items() if graph.values[identity].kind != "gradient"])
    return gradients


def _play_inputs(allocator: CachingAllocator, graph: Graph) -> dict[int, Piece]:
    """Takes the batch. What is cast to bf16 is copied to the device in fp32, and freed after the cast."""
    taken = {identity: allocator.take(value.bytes) for identity, value in enumerate(graph.values) if value.kind == "input"}
    shrunk = graph.batch_bytes - sum(graph.values[identity].bytes for identity in taken)
    if shrunk > 0:
        allocator.give(allocator.take(2 * shrunk))
    return taken


def _kept_by_libraries(bytes: int) -> dict[str, list[int]]:
    """The first product of each thread takes a workspace of whole MiB, the same for both; what is left over is forward's."""
    if not bytes:
        return {}
    each = bytes // (2 * MIB) * MIB
    return {"forward": [each, bytes - 2 * each], "backward": [each]}


def _births_and_deaths(graph: Graph, *, consumed: bool) -> tuple[list[list[int]], list[list[int]]]:
    """What each op allocates, and then frees as its last user. Inputs are allocated before the first op; gradients stay for the
    update, unless each is `consumed` at once."""
    births: list[list[int]] = [[] for _ in graph.ops]
    deaths: list[list[int]] = [[] for _ in graph.ops]
    for identity, value in enumerate(graph.values):
        if value.kind != "input":
            births[value.born].append(identity)
        if value.kind == "gradient":
            if consumed:
                deaths[value.born].append(identity)
        elif value.dies < len(graph.ops):
            deaths[value.dies].append(identity)
    for op, born in zip(graph.ops, births, strict=True):
        if op.name == "native_dropout.default":
            born.reverse()  # the mask is taken first
    return births, deaths


def _play_update(allocator: CachingAllocator, rule: UpdateRule, chunks: Sequence[Chunk], used: set[str], *, first: bool) -> None:
    for chunk in chunks:
        if not chunk.is_updated:
            continue
        slots = [slot for slot in chunk.slots if slot.name in used]
        made: list[Piece] = []
        if first and rule.name not in MADE_AT_START:
            count = int(rule.state_bytes_per_element[chunk.group]) // 4
            made = [allocator.take(4 * slot.elements) for slot in slots for _ in range(count)]
        temporary: list[Piece] = []
        for slot in slots:
            temporary += [allocator.take(4 * slot.elements) for _ in range(round(rule.scratch_bytes_per_element / 4))]
            if rule.scratch_is_shared:
                allocator.give(*temporary)
                temporary = []
        allocator.give(*temporary)
        if made:  # what the optimizer made goes over into flat buffers
            _take_moments(allocator, rule, chunk)
            allocator.give(*made)
