"""What a candidate holds: bytes on the device at the fullest moment of a step, on the host and on the disk.

    device = pools + the most that is live at once
    pools  = weights and optimizer state that live there, slots, staging buffers, carriers, scratch, sums of gradients, what
             recordings of blocks hold
    live   = over the segments: what other blocks keep for backward + the segment's own work + gradients that stay on the device
             + activations of other blocks that are still to be offloaded, or have returned

Pools are exact; work is the pass's as it was traced: a block that is recomputed holds in backward what one that kept holds.

Offloaded activations are on the device until a later block has waited for their copies: those of OFFLOADED_AT_ONCE blocks. When
backward comes to a block, its own and those of the offloaded block before it are on the device again, with copies of what other
blocks save too. The host has room for all of them.

A rank has its shard of what is sharded, and whole chunks in slots and staging buffers; a device alone has all as its shard.
Gradients differ. Alone, they are copied to the host as they were made, or stay where autograd put them until the update. Of
several ranks, those of a chunk wait until all are there, and are put side by side then; what adds up whole before it is reduced
is there all along.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

from anyfit.values.engine import (
    DISK_BLOCK_BYTES,
    DISK_DEPTH,
    OFFLOADED_AT_ONCE,
    REDUCTION_BUFFERS,
    STREAMED_DEPTH,
    staging_bytes,
)
from anyfit.values.graph import PAGE_BYTES
from anyfit.values.plan import Placement
from anyfit.values.precision import SUM_BYTES
from anyfit.values.profile import ChunkCost, Profile

from .candidate import Candidate

TORCH_SCRATCH_BYTES = 8  # an element of the largest chunk with masters
STAYS = Placement()
NEVER_BYTES = 2**62  # more than any device has: of what may not be
Pair = tuple[ChunkCost, Placement]


@dataclass(frozen=True)
class Footprint:
    pool_bytes: int  # of the device, held between steps
    live_bytes: int  # on top, at the fullest moment
    host_bytes: int
    disk_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        return self.pool_bytes + self.live_bytes


@dataclass(frozen=True)
class Held:
    """By where chunks are, bytes that are held between steps."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int


def footprint_of(profile: Profile, candidate: Candidate, live_bytes: int | None = None, held: Held | None = None) -> Footprint:
    """`live_bytes`, `held`: where they are known."""
    if profile.state_stays and any(placement != STAYS for placement in candidate.placements):
        return Footprint(NEVER_BYTES, 0, 0)
    held = held_of(profile, candidate) if held is None else held
    pools = profile.state.buffers + profile.workspace_bytes + held.device_bytes + candidate.profile_pass.recorded_bytes
    offloaded = sum(candidate.offloaded_bytes(block) for block in candidate.offloaded)
    live = live_of(profile, candidate) if live_bytes is None else live_bytes
    return Footprint(pools, live, held.host_bytes + offloaded, held.disk_bytes)


def held_of(profile: Profile, candidate: Candidate) -> Held:
    """Of the pass, this depends on whether gradients add up alone."""
    overlaps = profile.host is not None and profile.host.overlaps
    pairs = list(zip(candidate.chunks, candidate.placements, strict=True))
    device, host = _state(pairs, candidate, overlaps=overlaps)
    buffers = _gradients_alone if candidate.division.is_alone else _gradients_of_rank
    on_device, on_host = buffers(pairs, candidate, overlaps=overlaps)
    on_disk, carriers = _on_disk([chunk for chunk, placement in pairs if placement.route == "disk" and chunk.is_updated])
    return Held(device + on_device, host + on_host + carriers, on_disk)


def _on_disk(chunks: list[ChunkCost]) -> tuple[int, int]:
    """Bytes of the disk, in blocks, with room for what is written before the old goes; and of the carriers on the host."""
    if not chunks:
        return 0, 0
    shapes = Counter((chunk.weights_bytes, chunk.is_split, chunk.state_parts) for chunk in chunks)  # many are alike
    block = min(_in_pages(max(size for *_, parts in shapes for size in parts)), DISK_BLOCK_BYTES)
    blocks = {shape: sum(-(-_in_pages(size) // block) for size in shape[-1]) for shape in shapes}
    # Of weights, low halves and each moment a carrier has room for the largest.
    carried = max(_in_pages(weights) for weights, *_ in shapes)
    carried += max(_in_pages(weights) * is_split for weights, is_split, _ in shapes)
    moments = (parts[: len(parts) - is_split] for _, is_split, parts in shapes)
    carried += sum(max(map(_in_pages, sizes)) for sizes in itertools.zip_longest(*moments, fillvalue=0))
    there = sum(count * blocks[shape] for shape, count in shapes.items())
    return (there + DISK_DEPTH * max(blocks.values())) * block, DISK_DEPTH * carried


def _in_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def live_of(profile: Profile, candidate: Candidate) -> int:
    """Bytes beyond the pools at the fullest moment."""
    return max(map(sum, live_parts(candidate, updating_bytes(profile, candidate))))


def updating_bytes(profile: Profile, candidate: Candidate) -> int:
    """That the update of what is resident takes for itself."""
    if profile.host is None or not profile.host.overlaps:
        pairs = zip(candidate.chunks, candidate.placements, strict=True)
        stays = any(placement.route == "resident" and chunk.is_updated for chunk, placement in pairs)
        if stays or not candidate.division.is_alone:
            return profile.update.scratch_bytes // candidate.shards
    return 0


def _state(pairs: list[Pair], candidate: Candidate, *, overlaps: bool) -> tuple[int, int]:
    """Bytes of the device and of the host: weights and optimizers, and what they pass through. In one go: it is asked for
    thousands of candidates."""
    shards, gathers = candidate.shards, candidate.gathers
    device = host = fetched = largest_fetched = scratch = 0
    carried_optimizer = carried_weights = 0  # the most of them that a carrier takes
    for chunk, placement in pairs:
        is_away, whole = placement.weights == "host", chunk.weights_bytes
        weights, optimizer = whole // shards, chunk.optimizer_bytes // shards
        speculates = placement.speculates and chunk.is_updated
        if is_away or gathers:
            fetched += 1
            largest_fetched = max(largest_fetched, whole)
        if not is_away:
            device += weights if gathers else whole
        if is_away or (placement.update == "host" and chunk.is_updated):
            host += weights
        if placement.optimizer == "device":
            device += optimizer
        elif placement.optimizer == "host":
            host += optimizer + (optimizer + weights if speculates else 0)
        if not chunk.is_updated or placement.update == "host":
            continue
        if placement.optimizer == "host":  # streamed
            carried_optimizer = max(carried_optimizer, optimizer)
            carried_weights = max(carried_weights, weights if is_away or speculates else 0)
        elif not overlaps and chunk.is_split:  # torch's own step, on masters and gradients in fp32
            scratch = max(scratch, TORCH_SCRATCH_BYTES * (chunk.elements // shards))
    device += min(candidate.slots, fetched) * largest_fetched + scratch
    return device + STREAMED_DEPTH * (carried_optimizer + carried_weights), host


def _gradients_alone(pairs: list[Pair], candidate: Candidate, *, overlaps: bool) -> tuple[int, int]:
    """Bytes of the device and of the host."""
    adds_up = candidate.adds_up
    device = host = carried = side_by_side = resident_side_by_side = 0
    sent: list[int] = []
    for chunk, placement in pairs:
        size = chunk.weights_bytes
        if placement.gradients == "host":
            if chunk.trainable:
                sent.append(size)
                host += SUM_BYTES * chunk.elements if adds_up else size
        elif adds_up and chunk.gradient_bytes:
            device += SUM_BYTES * chunk.elements
        if not chunk.is_updated or placement.update == "host":
            continue
        is_flat = adds_up and chunk.is_split  # gradients of bf16 weights that add up do so in one buffer
        if placement.optimizer == "host":  # streamed
            side_by_side = max(side_by_side, 0 if is_flat else size)
            if placement.gradients == "host":  # they return for the update
                carried = max(carried, SUM_BYTES * chunk.elements if adds_up else size)
        elif overlaps:  # put side by side, for one pass over them
            resident_side_by_side = max(resident_side_by_side, 0 if is_flat else size)
    stages = staging_bytes(sent)
    landing = adds_up * len(stages) * max(stages, default=0)
    return device + sum(stages) + side_by_side + resident_side_by_side + STREAMED_DEPTH * carried, host + landing


def _gradients_of_rank(pairs: list[Pair], candidate: Candidate, *, overlaps: bool) -> tuple[int, int]:
    """The same of one of several ranks, which sum them in fp32."""
    division, adds_up = candidate.division, candidate.adds_up
    device = carried = 0
    given, landing, sent = [], [], []
    for chunk, placement in pairs:
        elements, stays = chunk.elements // division.shards, placement.gradients == "device"
        if chunk.trainable:
            given.append(chunk.elements)
            if stays:
                device += SUM_BYTES * elements
                if adds_up and not division.gradients and chunk.is_split:
                    device += SUM_BYTES * chunk.elements
            else:
                sent.append(elements)
            if not stays or (adds_up and division.gradients):
                landing.append(elements)
        if chunk.is_updated and placement.route == "streamed" and overlaps and not stays:
            carried = max(carried, SUM_BYTES * elements)
    stages = min(REDUCTION_BUFFERS, len(given))
    device += stages * SUM_BYTES * (max(given, default=0) + max(landing, default=0)) + STREAMED_DEPTH * carried
    return device, SUM_BYTES * sum(sent) + (stages * SUM_BYTES * max(sent, default=0) if adds_up else 0)


def going_bytes(candidate: Candidate) -> list[int]:
    """By segment, bytes of blocks before it that go to the host, or are there and still held: the engine lets go of the last but
    one when a block begins that is offloaded, and of all when backward comes to the first."""
    each, offloaded = candidate.profile_pass, set(candidate.offloaded)
    found = [0] * len(each.segments)
    begun: set[int] = set()
    going: deque[tuple[int, int]] = deque()  # blocks, and bytes
    for index, segment in enumerate(each.segments if offloaded else ()):
        block = segment.block
        if block in offloaded and segment.phase == "backward":
            break
        if block in offloaded and block not in begun:
            begun.add(block)
            while len(going) > OFFLOADED_AT_ONCE - 1:
                going.popleft()
            choices = each.blocks[block].choices
            going.append((block, choices["keep"].kept_bytes - choices["offload"].kept_bytes))
        found[index] = sum(size for of, size in going if of != block)  # the work of a segment has its own block's
    return found


def live_parts(candidate: Candidate, updating: int) -> Iterator[tuple[int, int, int, int]]:
    """Bytes of what blocks keep for backward, of a segment's own work, of gradients, and of activations on their way: where
    blocks are replayed, when each runs op by op first; then segment by segment; last, when all gradients are there."""
    each, adds_up, going = candidate.profile_pass, candidate.adds_up, going_bytes(candidate)
    keeps = [
        block.choices[choice].kept_bytes if block.name else 0  # a segment's work has what is kept outside blocks
        for block, choice in zip(each.blocks, candidate.activations, strict=True)
    ]
    backwards_left = Counter(segment.block for segment in each.segments if segment.phase == "backward")
    begun: set[int] = set()
    gradients = 0
    staying: list[list[int]] = [[] for _ in each.blocks]  # by block: chunks whose gradients stay on the device
    for index, (chunk, placement) in enumerate(zip(candidate.chunks, candidate.placements, strict=True)):
        stays = placement.gradients == "device" and not adds_up and candidate.division.is_alone
        for block in chunk.blocks if stays and chunk.gradient_bytes else ():
            staying[block].append(index)
    waiting = _adding_up(candidate) if candidate.division.is_alone else _waiting(candidate)
    # What a recording holds while it runs is in the pools. What the recording of a kept block saves is held all along.
    triples = list(zip(each.blocks, candidate.activations, candidate.replays, strict=True))
    for_good = {index: replay for index, (_, choice, replay) in enumerate(triples) if replay is not None and choice == "keep"}
    kept = sum(keeps[index] + replay.own_bytes for index, replay in for_good.items())
    for segment in each.segments:  # before the first step, when a block runs op by op beside its recording
        if (tried := candidate.replays[segment.block]) is not None:
            yield kept, segment.work_bytes + tried.outside_bytes, 0, 0
    held = set(for_good)  # blocks
    back: dict[int, int] = {}  # by block: bytes that are on the device again
    for segment, leaving, unsummed in zip(each.segments, going, waiting, strict=True):
        block = segment.block
        if segment.phase == "backward":
            for index in staying[block]:  # a loss may give an embedding its gradient long before its own backward
                if index not in begun:
                    begun.add(index)
                    gradients += candidate.chunks[index].gradient_bytes
            if candidate.activations[block] == "offload":
                choices = each.blocks[block].choices
                own = choices["keep"].kept_bytes - choices["offload"].kept_bytes  # that are in the segment's work
                back[block] = choices["offload"].moved_bytes - own
                if (before := candidate.before.get(block)) is not None:
                    back.setdefault(before, each.blocks[before].choices["offload"].moved_bytes)
        replay = candidate.replays[block]
        own = segment.work_bytes if replay is None else replay.outside_bytes
        yield (
            kept - (keeps[block] if block in held and block not in for_good else 0),
            own,
            gradients + unsummed,
            leaving + (sum(back.values()) if back else 0),
        )
        if segment.phase == "forward" and block not in held:
            held.add(block)
            kept += keeps[block]
        if segment.phase == "backward":
            backwards_left[block] -= 1
            if backwards_left[block] == 0 and block in held and block not in for_good:
                held.remove(block)
                kept -= keeps[block]
                back.pop(block, None)
    yield kept, updating, gradients, 0  # when all are there


def _adding_up(candidate: Candidate) -> list[int]:
    """By segment, bytes of gradients that are to go elsewhere and that autograd still adds to: such as those of an embedding that
    the loss shares, from the loss's backward to the embedding's."""
    segments = candidate.profile_pass.segments
    found = [0] * len(segments)
    for chunk, placement in zip(candidate.chunks, candidate.placements, strict=True):
        if chunk.summed_bytes and (placement.gradients == "host" or candidate.adds_up):
            uses = [at for at, each in enumerate(segments) if each.phase == "backward" and each.block in chunk.blocks]
            for position in range(uses[0], uses[-1]):  # the last has it in its work
                found[position] += chunk.summed_bytes
    return found


def _waiting(candidate: Candidate) -> list[int]:
    """By segment, bytes of gradients that autograd has made and ranks have still to sum."""
    division, adds_up = candidate.division, candidate.adds_up
    used: dict[int, list[int]] = {}  # by chunk: backward segments
    for position, (segment, uses) in enumerate(zip(candidate.profile_pass.segments, candidate.uses, strict=True)):
        for index in uses if segment.phase == "backward" else ():
            used.setdefault(index, []).append(position)
    count = len(candidate.profile_pass.segments)
    changes, inside = [0] * (count + 1), [0] * count
    for index, positions in used.items():
        chunk, placement = candidate.chunks[index], candidate.placements[index]
        first, last = positions[0], positions[-1] + 1
        if adds_up and placement.gradients == "device" and not division.gradients:
            if chunk.is_split:  # each goes to a sum as it comes
                continue
            first, last = 0, count  # they add up where autograd put them
        elif last - first == 1:  # one chunk after another, while the segment's work becomes less; a single gradient is part of it
            is_single = len(chunk.blocks) == len(chunk.parameters) == 1
            inside[first] = max(inside[first], 0 if is_single else chunk.gradient_bytes // 2)
            continue
        changes[first] += chunk.gradient_bytes
        changes[last] -= chunk.gradient_bytes
    return [before + own for before, own in zip(itertools.accumulate(changes[:-1]), inside, strict=True)]
