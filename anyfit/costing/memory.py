"""Bytes: what lives from step to step, exactly; and what torch's allocator reserves on top, by playing a step through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from anyfit.values.graph import Graph, UpdateRule
from anyfit.values.layout import CHUNK_BYTES, Chunk, Placeable, lay_out
from anyfit.values.machine import Device
from anyfit.values.profile import StateBytes

from .allocator import CachingAllocator, Piece

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}


def chunks_of(graph: Graph) -> tuple[Chunk, ...]:
    """The layout a run of this model will have."""
    return lay_out(
        (
            Placeable(each.name, each.shape, each.dtype, element_bytes(each.dtype), each.trainable, each.group)
            for each in graph.parameters
        ),
        CHUNK_BYTES,
    )


def element_bytes(dtype: str) -> int:
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"parameters of dtype {dtype} are not supported")
    return ELEMENT_BYTES[dtype]


def split_chunks(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Those whose fp32 masters are two halves."""
    return [chunk for chunk in chunks if chunk.is_updated and chunk.dtype == "bfloat16"]


def state_bytes(graph: Graph, chunks: Sequence[Chunk]) -> StateBytes:
    rule = graph.update
    used = {parameter.name for parameter in graph.parameters if parameter.used}
    split = split_chunks(chunks)
    gradients = dict.fromkeys(ELEMENT_BYTES, 0)
    for parameter in graph.parameters:
        if parameter.used:
            gradients[parameter.dtype] += parameter.elements * element_bytes(parameter.dtype)
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
        scratch=max((8 * chunk.elements for chunk in split), default=0),
        gradients=sum(gradients.values()),
        # fp32 gradients add up where autograd put them, bf16 ones in fp32 beside the chunk
        accumulators=gradients["float32"] + sum(4 * chunk.elements for chunk in split),
    )


def update_scratch_bytes(rule: UpdateRule, chunks: Sequence[Chunk]) -> int:
    """Temporary bytes of the optimizer while one chunk is updated."""
    working = [
        chunk.elements if not rule.scratch_is_shared else max(slot.elements for slot in chunk.slots)
        for chunk in chunks
        if chunk.is_updated
    ]
    return int(max(working, default=0) * rule.scratch_bytes_per_element)


def reserved_bytes(graph: Graph, chunks: Sequence[Chunk], device: Device, *, accumulating: bool) -> int:
    """What torch's allocator holds after two steps: the first makes the optimizer's state, the second is like all others."""
    allocator = CachingAllocator()
    for chunk in chunks:
        allocator.take(chunk.bytes)
    for chunk in split_chunks(chunks):
        allocator.take(2 * chunk.elements)
        if accumulating:
            allocator.take(4 * chunk.elements)
    allocator.take(graph.buffer_bytes)
    for _ in ("masters", "gradients"):
        allocator.take(max((4 * chunk.elements for chunk in split_chunks(chunks)), default=0))
    for half in range(2):  # one workspace a thread
        allocator.take(int(device.workspace_bytes.value) // 2 + half)
    used = {parameter.name for parameter in graph.parameters if parameter.used}
    for step in range(2):
        gradients = _play_pass(allocator, graph, consumed=accumulating)
        _play_update(allocator, graph.update, chunks, used, first=step == 0)
        _give(allocator, gradients)
    return allocator.reserved_bytes


def _play_pass(allocator: CachingAllocator, graph: Graph, *, consumed: bool) -> list[Piece]:
    """Takes and gives what one pass does; the gradients that are left."""
    taken: dict[int, Piece] = {}
    left = []
    for identity, takes in _events(graph, consumed=consumed):
        if takes:
            taken[identity] = allocator.take(graph.values[identity].bytes)
        else:
            allocator.give(taken.pop(identity))
    for identity, piece in taken.items():
        if graph.values[identity].kind == "gradient" and not consumed:
            left.append(piece)
        else:
            allocator.give(piece)
    return left


def _events(graph: Graph, *, consumed: bool) -> Iterator[tuple[int, bool]]:
    """Births and deaths in order: what an op makes is there before what it used last goes."""
    births: list[list[int]] = [[] for _ in range(len(graph.ops) + 1)]
    deaths: list[list[int]] = [[] for _ in range(len(graph.ops) + 1)]
    for identity, value in enumerate(graph.values):
        births[value.born].append(identity)
        dies = value.born if consumed and value.kind == "gradient" else value.dies
        if dies < len(graph.ops):
            deaths[dies].append(identity)
    for born, died in zip(births, deaths, strict=True):
        yield from ((identity, True) for identity in born)
        yield from ((identity, False) for identity in died)


def _play_update(allocator: CachingAllocator, rule: UpdateRule, chunks: Sequence[Chunk], used: set[str], *, first: bool) -> None:
    for chunk in chunks:
        if not chunk.is_updated:
            continue
        slots = [slot for slot in chunk.slots if slot.name in used]
        if first:
            for slot in slots:
                for _ in range(int(rule.state_bytes_per_element[chunk.group]) // 4):
                    allocator.take(4 * slot.elements)
        temporary: list[Piece] = []
        for slot in slots:
            temporary += [allocator.take(4 * slot.elements) for _ in range(round(rule.scratch_bytes_per_element / 4))]
            if rule.scratch_is_shared:
                _give(allocator, temporary)
                temporary = []
        _give(allocator, temporary)


def _give(allocator: CachingAllocator, pieces: list[Piece]) -> None:
    for piece in pieces:
        allocator.give(piece)
