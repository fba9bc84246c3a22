"""Random chains of blocks and random machines for them, small enough that all their plans can be gone through."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Literal

from anyfit.costing.times import timing_of
from anyfit.planning.candidate import Candidate
from anyfit.planning.footprint import footprint_of
from anyfit.planning.knobs import PLACED, RESIDENT
from anyfit.planning.space import Space
from anyfit.values.profile import (
    BlockCost,
    ChoiceCost,
    ChunkCost,
    DiskRates,
    HostRates,
    LaunchCosts,
    LoadedRates,
    Pass,
    Profile,
    Segment,
    StateBytes,
    Timing,
    UpdateCost,
)
from tests.planning.profiles import block, one_pass, small_profile

MIB, GIB = 2**20, 2**30
MICRO_BATCH = 4


def random_profile(random: Random, blocks: int) -> Profile:
    """A chain between an embedding and a head, on a GPU or a CPU: every figure is drawn, from scales that are drawn first, so
    that now the computation is long and now the copies are, now activations weigh most and now the state."""
    is_gpu, accumulation = random.random() < 0.7, random.choice([1, 1, 1, 2, 3])
    each = _launched(_pass(random, blocks)) if is_gpu else _pass(random, blocks)
    chunks = _chunks(random, blocks, 5 if is_gpu else 8)
    elements = sum(chunk.elements for chunk in chunks)
    weight = 2 * elements / each.seconds  # bytes a second at which weights cross while the pass computes
    kept = sum(block.kept_bytes for block in each.blocks)
    crossing = Random(repr(weight)).choice([weight, weight, kept / each.seconds])  # or activations
    host = HostRates(
        updates_per_second=weight * _scale(random, 0.1, 3),
        up_bytes_per_second=crossing * _scale(random, 0.5, 20),
        down_bytes_per_second=crossing * _scale(random, 0.5, 20),
        overlaps=is_gpu,
        launching=LaunchCosts(beside_updates=1.2, beside_copies=1.4, beside_both=1.8, fetch_seconds=1e-4),
    )
    if is_gpu and random.random() < 0.5:
        slowed = (
            rate * random.uniform(0.3, 1.0)
            for rate in (host.updates_per_second, host.up_bytes_per_second, host.down_bytes_per_second)
        )
        host = replace(host, loaded=LoadedRates(*slowed))
    profile = small_profile(
        precision="bf16",
        batch_size=MICRO_BATCH * accumulation,
        passes=(each,),
        blocks=blocks + 1,
        chunks=chunks,
        state=StateBytes(0, 0, 0, 0, 0, gradients=0, accumulators=0),
        trainable=sum(chunk.elements for chunk in chunks if chunk.is_updated),
        update=UpdateCost(seconds=each.seconds * _scale(random, 0.01, 0.5), scratch_bytes=random.randint(0, 4) * MIB),
        host=host,
        memory_bytes_per_second=30 * elements / each.seconds * _scale(random, 5, 100),
        device_limit_bytes=1,
        host_limit_bytes=1,
    )
    return _limited(random, profile)


def _scale(random: Random, low: float, high: float) -> float:
    """As likely between 1 and 10 as between 10 and 100."""
    return float(low * (high / low) ** random.random())


def _pass(random: Random, count: int) -> Pass:
    is_like = random.random() < 0.3  # one block again and again
    scale = _scale(random, 1, 100)
    aside = Random(repr(scale))

    def own(index: int) -> BlockCost:
        kept = int(scale * random.randint(1, 20) * MIB)
        again = random.uniform(0.1, 1.0) * 0.01
        choices = {
            "keep": ChoiceCost(kept, 0, 0.0),
            "recompute": ChoiceCost(int(kept * random.uniform(0.02, 0.3)), 0, again),
            "selective": ChoiceCost(int(kept * random.uniform(0.3, 0.8)), 0, again * random.uniform(0.02, 0.6)),
        }
        stays, shared = aside.choice([0, kept // 10]), aside.choice([0, MIB])
        choices["offload"] = ChoiceCost(stays, kept - stays + shared, 0.0)
        forward = again * random.uniform(1.0, 1.3)
        seconds = {"seconds_forward": forward, "seconds_backward": forward * random.uniform(1.5, 2.5)}
        return block(f"layers.{index}", kept_bytes=kept, choices=choices, **seconds)

    first = own(0)
    blocks = [replace(first, name=f"layers.{index}") if is_like else own(index) for index in range(count)]
    offloadable = aside.choice([0, 1, 2] if count < 5 else [0, 1])  # more would be too many plans
    for index in aside.sample(range(count), count - min(offloadable, count)):
        left = {name: cost for name, cost in blocks[index].choices.items() if name != "offload"}
        blocks[index] = replace(blocks[index], choices=left)
    outside = _scale(random, 0.0005, 0.02)
    blocks.append(block("", kept_bytes=MIB, choices={}, seconds_forward=outside, seconds_backward=2 * outside))
    order = [count, *range(count), count]  # the embedding and the head are outside all blocks

    def segment(phase: Literal["forward", "backward"], at: int) -> Segment:
        index = order[at]
        seconds = blocks[index].seconds_forward if phase == "forward" else blocks[index].seconds_backward
        work = blocks[index].kept_bytes + int(scale * random.randint(1, 10) * MIB)
        outer = {0: ("embedding",), count + 1: ("head",)}
        return Segment(index, phase, seconds / order.count(index), work, outer.get(at, ()))

    places = range(count + 2)
    segments = [segment("forward", at) for at in places] + [segment("backward", at) for at in reversed(places)]
    return one_pass(MICRO_BATCH, blocks=tuple(blocks), segments=tuple(segments))


def _launched(each: Pass) -> Pass:
    """With ops that have to be launched, in some of these passes: now the host takes longer for them, and now the device."""
    aside = Random(repr(each.seconds))
    most = aside.choice([0.0, 0.0, 0.5, 2.0])  # of the device's seconds
    if not most:
        return each

    def timing(device: float) -> Timing:
        return timing_of([(aside.uniform(0, most) * device / 3, device / 3) for _ in range(3)])

    def choices(block: BlockCost) -> dict[str, ChoiceCost]:
        return {
            name: replace(cost, timing=timing(cost.seconds)) if name in ("recompute", "selective") else cost
            for name, cost in block.choices.items()
        }

    blocks = tuple(replace(block, choices=choices(block)) for block in each.blocks)
    return replace(each, blocks=blocks, segments=tuple(replace(part, timing=timing(part.seconds)) for part in each.segments))


def _chunks(random: Random, count: int, most: int) -> tuple[ChunkCost, ...]:
    """Each block its own, or some together; now and then one lies over two blocks, parts are frozen, a head is untied."""
    homes: list[tuple[int, ...]] = [(index,) for index in range(count)]
    outer = random.choice([0, 1, 1, 2])
    while len(homes) + outer > most:
        at = random.randrange(len(homes) - 1)
        homes[at : at + 2] = [homes[at] + homes[at + 1]]
    if outer:
        homes.insert(0, (count,))
    if outer == 2:
        homes.append((count,))
    frozen_until = random.choice([0, 0, 0, random.randrange(count + 1)])
    is_like = random.random() < 0.5
    usual = random.randint(1, 20)
    found = []
    for at, home in enumerate(homes):
        elements = 1_000_000 * (usual * len(home) if is_like and home != (count,) else random.randint(1, 30))
        trainable = at >= frozen_until
        state = (2 * elements, 10 * elements) if trainable else (0, 0)
        names = ("embedding", "head") if outer == 1 else ("embedding",) if at == 0 else ("head",)
        outside = names if home == (count,) else ()
        found.append(ChunkCost(2 * elements, elements, trainable, *state, trainable, home, outside, is_split=True))
    return tuple(found)


def _limited(random: Random, profile: Profile) -> Profile:
    """With limits between what is needed least and what all of it would take: near one end or the other, or in between."""
    each, count = profile.passes[0], len(profile.chunks)
    accumulation = profile.batch_size // MICRO_BATCH
    keep = Candidate(each, accumulation, ("keep",) * len(each.blocks), profile.chunks, (RESIDENT,) * count, 0, 0)
    away = (PLACED[False, True, True],) * count
    space = Space(profile)
    lightest = space.candidates.of(space.local.least(MICRO_BATCH))
    least, most = (space.evaluation.reserved_bytes(footprint_of(profile, each)) for each in (lightest, keep))
    host = footprint_of(profile, replace(keep, placements=away, slots=1)).host_bytes
    share = random.choice([random.uniform(0.9, 1.1), random.uniform(1.0, 1.5), random.uniform(1, 6), random.uniform(1, 6)])
    device = min(share * least, random.uniform(0.6, 1.0) * most) if least < most else most
    return replace(
        profile,
        device_limit_bytes=int(device * (1 + profile.reserved_error)) + 1,
        host_limit_bytes=3 * GIB * profile.host.overlaps + int(random.choice([2.0, random.uniform(0.2, 1.0)]) * host),
    )


def with_disk(random: Random, profile: Profile) -> Profile:
    """The same beside a disk, with less of the host; now reads and writes take turns, and now they hardly share."""
    state = max(sum(chunk.optimizer_bytes for chunk in profile.chunks), 1)
    rate = state / profile.passes[0].seconds * _scale(random, 0.05, 5)
    read, write = rate, rate * random.uniform(0.3, 1.0)
    turns = 2 / (1 / read + 1 / write)
    disk = DiskRates(read, write, random.uniform(turns, read + write), 0.1, 2**50, 10**15, "made up")
    host = int(profile.host_limit_bytes * random.uniform(0.2, 1.0)) if profile.host_limit_bytes else 0
    if profile.host is not None and profile.host.overlaps:
        host = max(host, 3 * GIB) if random.random() < 0.5 else host
    allowed = int(random.choice([0.5, 2.0, 4.0]) * state) + 1
    return replace(profile, disk=disk, disk_limit_bytes=allowed, host_limit_bytes=host)


def narrowed(random: Random, profile: Profile, most: int) -> Profile:
    """With fewer choices for some blocks and with some chunks frozen, any of them, until there are at most so many plans."""
    each, chunks = profile.passes[0], profile.chunks
    blocks = list(each.blocks)
    while _count(profile, blocks, chunks) > most:
        index = random.randrange(len(blocks) - 1)
        others = [name for name in blocks[index].choices if name != "keep"]
        if others and random.random() < 0.8:
            left = {name: cost for name, cost in blocks[index].choices.items() if name != random.choice(others)}
            blocks[index] = replace(blocks[index], choices=left)
        elif sum(chunk.trainable for chunk in chunks) > 2:
            at = random.randrange(len(chunks))
            frozen = replace(chunks[at], trainable=False, gradient_bytes=0, optimizer_bytes=0, is_updated=False)
            chunks = (*chunks[:at], frozen, *chunks[at + 1 :])
    return replace(profile, passes=(replace(each, blocks=tuple(blocks)),), chunks=chunks)


def _count(profile: Profile, blocks: list[BlockCost], chunks: tuple[ChunkCost, ...]) -> int:
    assert profile.host is not None
    ways = 1 + (4 if profile.host.overlaps else 2) * (2 if profile.batch_size == MICRO_BATCH else 1)
    ways += 2 * (profile.disk_limit_bytes > 0)
    trained = sum(chunk.trainable for chunk in chunks)
    return math.prod(max(len(block.choices), 1) for block in blocks) * ways**trained * 2 ** (len(chunks) - trained)
