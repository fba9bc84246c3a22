"""What a candidate holds: bytes on the device at the fullest moment of a step, and on the host.

    device = pools + the most that is live at once
    pools  = weights and optimizers that live there, slots, stages, carriers, scratch, sums of gradients
    live   = over the segments: what other blocks keep for backward + the segment's own work + gradients that stay on the device
             + activations of other blocks that are still to go down, or back already

Pools are exact; work is the pass's as it was traced: a block that is made again holds in backward what one that kept holds.

Offloaded activations are on the device until they are copied: their turn comes one block after another, at the rate that copies
down have while all is busy, half of it where states are lowered too, and from when a computation that never waits is through with
the block. When backward comes to a block, its own and those of the offloaded block before it are there again, copies of what
other blocks save too among them. The host has room for all of them.

One of several ranks has its stretch of what is divided, and whole chunks in slots and stages. The gradients that autograd makes
for a chunk are there until all are, and are put side by side then; what adds up whole before it is reduced is there all along.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from anyfit.values.engine import GRADIENT_STAGES, REDUCTION_STAGES, STREAMED_DEPTH
from anyfit.values.plan import Placement
from anyfit.values.profile import ChunkCost, HostRates, Profile

from .simulate import REDUCED_BYTES, Candidate

TORCH_SCRATCH_BYTES = 8  # an element of the largest chunk with masters
STAYS = Placement()
NEVER_BYTES = 2**62  # more than any device has: of what may not be
Pair = tuple[ChunkCost, Placement]


@dataclass(frozen=True)
class Weight:
    pool_bytes: int  # of the device, held between steps
    live_bytes: int  # on top, at the fullest moment
    host_bytes: int

    @property
    def device_bytes(self) -> int:
        return self.pool_bytes + self.live_bytes


def weigh(profile: Profile, candidate: Candidate, live_bytes: int | None = None) -> Weight:
    """`live_bytes`: of one of several ranks, where it is known."""
    if profile.state_stays and any(placement != STAYS for placement in candidate.placements):
        return Weight(NEVER_BYTES, 0, 0)
    if candidate.division is not None:
        pools, host = _pools_of_rank(profile, candidate)
        return Weight(pools, live_of_rank(profile, candidate) if live_bytes is None else live_bytes, host)
    pairs = list(zip(candidate.chunks, candidate.placements, strict=True))
    adds_up = candidate.accumulation > 1
    pools = profile.state.buffers + profile.workspace_bytes + _pools(pairs, candidate.slots, adds_up=adds_up)
    resident = [chunk for chunk, placement in pairs if placement.route == "resident" and chunk.is_updated]
    updating = 0
    if profile.host is not None and profile.host.overlaps:
        # gradients side by side, for one pass over them
        pools += max((chunk.weights_bytes for chunk in resident if not _are_flat(chunk, adds_up=adds_up)), default=0)
    elif resident:  # torch's own step, on masters and gradients in fp32
        split = [chunk.elements for chunk in resident if chunk.weights_bytes == 2 * chunk.elements]
        pools += TORCH_SCRATCH_BYTES * max(split, default=0)
        updating = profile.update.scratch_bytes
    going = _going(candidate, profile.host)
    moved = sum(candidate.each.blocks[block].choices["offload"].moved_bytes for block in candidate.offloaded)
    return Weight(pools, max(_live(candidate, updating, going)), _host(pairs, adds_up=adds_up) + moved)


def live_of_rank(profile: Profile, candidate: Candidate) -> int:
    updating = 0 if profile.host is None or profile.host.overlaps else profile.update.scratch_bytes // candidate.shards
    return max(_live(candidate, updating, _going(candidate, profile.host)))


def _pools_of_rank(profile: Profile, candidate: Candidate) -> tuple[int, int]:
    """Bytes of the device and of the host, of one of several ranks."""
    division, shards, slots = candidate.division, candidate.shards, candidate.slots
    assert division is not None
    overlaps = profile.host is not None and profile.host.overlaps
    adds_up = candidate.accumulation > 1
    device = host = 0
    fetched, given, landing, sent, scratch = [], [], [], [], [0]
    carried: list[tuple[int, int, int]] = []  # bytes of optimizer, weights and gradients
    for chunk, placement in zip(candidate.chunks, candidate.placements, strict=True):
        on_host, stays = placement.weights == "host", placement.gradients == "device"
        weights, optimizer, elements = chunk.weights_bytes // shards, chunk.optimizer_bytes // shards, chunk.elements // shards
        if on_host or division.weights:
            fetched.append(chunk.weights_bytes)
        if not on_host:
            device += weights if division.weights else chunk.weights_bytes
        if on_host or (placement.update == "host" and chunk.is_updated):
            host += weights
        if placement.optimizer == "device":
            device += optimizer
        else:
            generations = 2 if placement.speculates and not adds_up and chunk.is_updated else 1
            host += generations * optimizer + (generations - 1) * weights
        if chunk.trainable:
            given.append(chunk.elements)
            if stays:
                device += REDUCED_BYTES * elements
                if adds_up and not division.gradients and chunk.weights_bytes == 2 * chunk.elements:
                    device += 4 * chunk.elements
            else:
                sent.append(elements)
            if not stays or (adds_up and division.gradients):
                landing.append(elements)
        if chunk.is_updated and placement.route == "streamed":
            away = weights if on_host or (placement.speculates and not adds_up) else 0
            carried.append((optimizer, away, REDUCED_BYTES * elements if overlaps and not stays else 0))
        if chunk.is_updated and placement.route == "resident" and not overlaps and chunk.weights_bytes == 2 * chunk.elements:
            scratch.append(TORCH_SCRATCH_BYTES * elements)
    device += min(slots, len(fetched)) * max(fetched, default=0) + max(scratch)
    stages = min(REDUCTION_STAGES, len(given))
    device += stages * REDUCED_BYTES * (max(given, default=0) + max(landing, default=0))
    device += STREAMED_DEPTH * sum(map(max, zip(*carried, strict=True)))
    host += REDUCED_BYTES * sum(sent) + (stages * REDUCED_BYTES * max(sent, default=0) if adds_up else 0)
    host += sum(candidate.each.blocks[block].choices["offload"].moved_bytes for block in candidate.offloaded)
    return profile.state.buffers + profile.workspace_bytes + device, host


def _largest(pairs: list[Pair]) -> int:
    return max((chunk.weights_bytes for chunk, _ in pairs), default=0)


def _pools(pairs: list[Pair], slots: int, *, adds_up: bool) -> int:
    """In one go: it is asked for thousands of candidates."""
    found = away = largest_away = sent = largest_sent = side_by_side = 0
    optimizer = weights = gradients = 0  # the most of them that a carrier takes
    for chunk, placement in pairs:
        size = chunk.weights_bytes
        if placement.weights == "host":
            away += 1
            largest_away = max(largest_away, size)
        else:
            found += size
        if placement.gradients == "host":
            if chunk.trainable:
                sent += 1
                largest_sent = max(largest_sent, size)
        elif adds_up and chunk.gradient_bytes:
            found += 4 * chunk.elements
        if not chunk.is_updated or placement.update == "host":
            continue
        if placement.optimizer == "device":
            found += chunk.optimizer_bytes
            continue
        if not _are_flat(chunk, adds_up=adds_up):
            side_by_side = max(side_by_side, size)
        optimizer = max(optimizer, chunk.optimizer_bytes)
        weights = max(weights, _carried_weights(chunk, placement))
        gradients = max(gradients, _landed_gradients(chunk, placement, adds_up=adds_up))
    found += min(slots, away) * largest_away + min(GRADIENT_STAGES, sent) * largest_sent
    return found + side_by_side + STREAMED_DEPTH * (optimizer + weights + gradients)


def _are_flat(chunk: ChunkCost, *, adds_up: bool) -> bool:
    """Gradients of bf16 weights that add up do so in one buffer."""
    return adds_up and chunk.weights_bytes == 2 * chunk.elements


def _carried_weights(chunk: ChunkCost, placement: Placement) -> int:
    return chunk.weights_bytes if placement.weights == "host" or placement.speculates else 0


def _landed_gradients(chunk: ChunkCost, placement: Placement, *, adds_up: bool) -> int:
    """Those that come back from the host."""
    if placement.gradients == "device":
        return 0
    return 4 * chunk.elements if adds_up else chunk.weights_bytes


def _going(candidate: Candidate, host: HostRates | None) -> list[int]:
    """By segment, bytes of blocks before it that are still to go down."""
    each = candidate.each
    found = [0] * len(each.segments)
    if not candidate.offloaded or host is None:
        return found
    rate = (host.loaded or host).down_bytes_per_second
    if any(placement.route == "streamed" for placement in candidate.placements):
        rate /= 2
    forwards = Counter(segment.block for segment in each.segments if segment.phase == "forward")
    under_way: list[tuple[float, int]] = []  # when they will be down, and bytes
    now = free = 0.0
    for index, segment in enumerate(each.segments):
        found[index] = sum(size for over, size in under_way if over > now)
        now += segment.seconds
        forwards[segment.block] -= segment.phase == "forward"
        if segment.phase == "forward" and forwards[segment.block] == 0 and candidate.activations[segment.block] == "offload":
            choices = each.blocks[segment.block].choices
            free = max(free, now) + choices["offload"].moved_bytes / rate
            under_way.append((free, choices["keep"].kept_bytes - choices["offload"].kept_bytes))
    return found


def _live(candidate: Candidate, updating: int, going: list[int]) -> Iterator[int]:
    each, adds_up = candidate.each, candidate.accumulation > 1
    keeps = [
        block.choices[choice].kept_bytes if block.name else 0  # a segment's work has what is kept outside blocks
        for block, choice in zip(each.blocks, candidate.activations, strict=True)
    ]
    backwards_left = Counter(segment.block for segment in each.segments if segment.phase == "backward")
    begun: set[int] = set()
    gradients, kept = 0, 0
    staying: list[list[int]] = [[] for _ in each.blocks]  # by block: chunks whose gradients stay on the device
    for index, (chunk, placement) in enumerate(zip(candidate.chunks, candidate.placements, strict=True)):
        stays = placement.gradients == "device" and not adds_up and candidate.division is None
        for block in chunk.blocks if stays and chunk.gradient_bytes else ():
            staying[block].append(index)
    waiting = _adding_up(candidate) if candidate.division is None else _waiting(candidate)
    held: set[int] = set()  # blocks
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
        yield (
            kept
            - (keeps[block] if block in held else 0)
            + segment.work_bytes
            + gradients
            + unsummed
            + leaving
            + (sum(back.values()) if back else 0)
        )
        if segment.phase == "forward" and block not in held:
            held.add(block)
            kept += keeps[block]
        if segment.phase == "backward":
            backwards_left[block] -= 1
            if backwards_left[block] == 0 and block in held:
                held.remove(block)
                kept -= keeps[block]
                back.pop(block, None)
    yield gradients + updating  # when all are there


def _adding_up(candidate: Candidate) -> list[int]:
    """By segment, bytes of gradients that are to go elsewhere and that autograd still adds to: such as those of an embedding that
    the loss shares, from the loss's backward to the embedding's."""
    segments = candidate.each.segments
    found = [0] * len(segments)
    for chunk, placement in zip(candidate.chunks, candidate.placements, strict=True):
        if chunk.summed_bytes and (placement.gradients == "host" or candidate.accumulation > 1):
            uses = [at for at, each in enumerate(segments) if each.phase == "backward" and each.block in chunk.blocks]
            for position in range(uses[0], uses[-1]):  # the last has it in its work
                found[position] += chunk.summed_bytes
    return found


def _waiting(candidate: Candidate) -> list[int]:
    """By segment, bytes of gradients that autograd has made and ranks have still to sum."""
    division, adds_up = candidate.division, candidate.accumulation > 1
    assert division is not None
    used: dict[int, list[int]] = {}  # by chunk: backward segments
    for position, (segment, uses) in enumerate(zip(candidate.each.segments, candidate.uses, strict=True)):
        for index in uses if segment.phase == "backward" else ():
            used.setdefault(index, []).append(position)
    count = len(candidate.each.segments)
    changes, inside = [0] * (count + 1), [0] * count
    for index, positions in used.items():
        chunk, placement = candidate.chunks[index], candidate.placements[index]
        first, last = positions[0], positions[-1] + 1
        if adds_up and placement.gradients == "device" and not division.gradients:
            if chunk.weights_bytes == 2 * chunk.elements:  # each goes to a sum as it comes
                continue
            first, last = 0, count  # they add up where autograd put them
        elif (
            last - first == 1
        ):  # one chunk after another, while the segment's work becomes less; one gradient alone is part of it
            is_single = len(chunk.blocks) == len(chunk.parameters) == 1
            inside[first] = max(inside[first], 0 if is_single else chunk.gradient_bytes // 2)
            continue
        changes[first] += chunk.gradient_bytes
        changes[last] -= chunk.gradient_bytes
    return [before + own for before, own in zip(itertools.accumulate(changes[:-1]), inside, strict=True)]


def _host(pairs: list[Pair], *, adds_up: bool) -> int:
    found = 0
    sent = [pair for pair in pairs if pair[1].gradients == "host" and pair[0].trainable]
    for chunk, placement in pairs:
        if placement.weights == "host" or (placement.update == "host" and chunk.is_updated):
            found += chunk.weights_bytes
        if placement.optimizer == "host":
            found += chunk.optimizer_bytes
            if placement.speculates and not adds_up and chunk.is_updated:
                found += chunk.weights_bytes + chunk.optimizer_bytes
    found += sum(4 * chunk.elements if adds_up else chunk.weights_bytes for chunk, _ in sent)
    return found + (min(GRADIENT_STAGES, len(sent)) * _largest(sent) if adds_up else 0)
