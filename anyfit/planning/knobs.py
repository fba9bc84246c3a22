"""Candidates by a few knobs: what the search turns, and what becomes of blocks and chunks then.

A point (Knobs), for one micro-batch size:

    rung        of the ladder of activation choices: which blocks keep, recompute in part, recompute
    offloaded   blocks whose activations are offloaded instead, at even distances, so that each has time to
    resident    chunks, the first in order of use, whose optimizer is on the device: their gradients come last in backward and
                their weights are needed first in forward, so that nothing could hide their update elsewhere
    away        chunks, the last, whose weights are on the host
    host_first  share of the other updates that the host does, after those resident: it is back with a chunk soonest
    streamed    share of what is left that is streamed through the device, in turns with the host
    speculates  whether updates begin before the norm is known, into a second generation
    on_disk     chunks whose optimizer is on the disk, and which the host updates: the last, whose weights are needed last in
                forward. Those much larger than others come after all of these, as each of the carriers is as large as the
                largest

The ladder is greedy: from all kept, the block and the choice that free most bytes for a second they cost, early blocks first,
whose activations live longest. It gives up at most one block's worth against the best for its bytes.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property
from itertools import product
from typing import NamedTuple

from anyfit.values.plan import Activations, Placement
from anyfit.values.profile import BlockCost, ChunkCost, Pass, Profile

from .candidate import Candidate, Uses

RECOMPUTED: tuple[Activations, ...] = ("selective", "recompute")
LEAST_SLOTS = 4
RESIDENT = Placement()
FROZEN_AWAY = Placement(weights="host", optimizer="host")
PLACED = {  # by whether it is streamed, its weights are away, it speculates
    (streams, is_away, guesses): Placement(
        weights="host" if is_away else "device",
        gradients="device" if streams else "host",
        optimizer="host",
        update="device" if streams else "host",
        speculates=guesses,
    )
    for streams, is_away, guesses in product((False, True), repeat=3)
}
ON_DISK = {  # by whether its weights are away
    is_away: Placement(weights="host" if is_away else "device", gradients="host", optimizer="disk", update="host")
    for is_away in (False, True)
}
LARGE = 2  # times the size in the middle: of chunks that go to the disk last


class Knobs(NamedTuple):
    micro_batch: int
    rung: int = 0
    offloaded: int = 0
    resident: int = 0
    away: int = 0
    host_first: float = 0.0
    streamed: float = 0.0
    speculates: bool = False
    on_disk: int = 0

    @property
    def of_chunks(self) -> Knobs:
        """Those alone on which it depends where chunks are."""
        return self._replace(micro_batch=0, rung=0, offloaded=0)


class Candidates:
    """All candidates of a profile, whatever its limits; each is made once."""

    def __init__(self, profile: Profile) -> None:
        assert profile.host is not None
        self.is_gpu = profile.host.overlaps
        self.chunks, self.division = profile.chunks, profile.rank_division
        self.passes = {each.micro_batch: each for each in profile.passes}
        self.ladders = {size: ladder(each) for size, each in self.passes.items()}
        self._batch_size = profile.batch_size
        self._together = [sum(1 << index for index in each) for each in profile.together]  # bits of chunks
        self.of, self.offloadable = cache(self._of), cache(self._offloadable)
        self._placed, self._activations = cache(self._placed_by), cache(self._chosen)
        self._uses = cache(lambda size: Uses(self.passes[size], self.chunks))
        self.to_disk = cache(self._to_disk)

    def _of(self, knobs: Knobs) -> Candidate:
        placements, slots = self._placed(knobs.of_chunks)
        size = knobs.micro_batch
        activations = self._activations(size, knobs.rung, knobs.offloaded)
        placed = self.chunks, placements, slots, self.prefetch(slots), self.division
        return Candidate(self.passes[size], self.accumulation(size), activations, *placed, self._uses(size))

    def _placed_by(self, knobs: Knobs) -> tuple[tuple[Placement, ...], int]:
        """Where chunks are, and how many slots that takes."""
        placements = tuple(_placements(self.chunks, knobs, self.to_disk(knobs.resident)))
        return placements, self.slots_for(placements)

    def accumulation(self, micro_batch: int) -> int:
        return -(-self._batch_size // micro_batch)

    def _chosen(self, micro_batch: int, rung: int, offloaded: int) -> tuple[Activations, ...]:
        choices = list(self.ladders[micro_batch][rung])
        offloadable = self.offloadable(micro_batch) if offloaded else []
        for place, block in enumerate(offloadable):
            if place * offloaded % len(offloadable) < offloaded:
                choices[block] = "offload"
        return tuple(choices)

    def last_rung(self, micro_batch: int) -> int:
        return len(self.ladders[micro_batch]) - 1

    def _offloadable(self, micro_batch: int) -> list[int]:
        """Blocks whose activations can be offloaded."""
        blocks = self.passes[micro_batch].blocks
        return [index for index, block in enumerate(blocks) if "offload" in self.choices(block)]

    def some_offloaded(self, micro_batch: int) -> list[int]:
        """A few numbers of blocks, none first."""
        count = len(self.offloadable(micro_batch))
        return sorted({0, count // 4, count // 2, count})

    def choices(self, block: BlockCost) -> list[Activations]:
        """What can be done with its activations."""
        found: list[Activations] = [_first(block), *(name for name in RECOMPUTED if block.name and name in block.choices)]
        found = list(dict.fromkeys(found))
        offloads = self.is_gpu and block.name and "offload" in block.choices and block.choices["offload"].moved_bytes
        return [*found, "offload"] if offloads else found

    def choices_with(self, micro_batch: int, offloaded: tuple[int, ...]) -> list[list[Activations]]:
        """By block, where these are offloaded and no others."""
        return [
            ["offload"] if index in offloaded else [name for name in self.choices(block) if name != "offload"]
            for index, block in enumerate(self.passes[micro_batch].blocks)
        ]

    def places(self, chunk: ChunkCost, *, disk: bool = False) -> list[Placement]:
        """Where the state of a chunk may be, and who may update it."""
        if not chunk.is_updated:
            return [RESIDENT, FROZEN_AWAY]
        return [RESIDENT, *self.elsewhere, *(ON_DISK.values() if disk and chunk.state_parts else ())]

    def _to_disk(self, resident: int) -> tuple[int, ...]:
        """Chunks whose optimizer may be on the disk, in the order in which they go there, where so many are resident."""
        may = [index for index, chunk in enumerate(self.chunks) if index >= resident and chunk.state_parts]
        usual = sorted(self.chunks[index].weights_bytes for index in may)
        large = LARGE * usual[len(usual) // 2] if usual else 0
        return tuple(sorted(may, key=lambda index: (self.chunks[index].weights_bytes > large, -index)))

    def few_to_disk(self, resident: int) -> int:
        """How many of these are not large."""
        order = self.to_disk(resident)
        return next((at for at in range(1, len(order)) if order[at] > order[at - 1]), len(order))

    @cached_property
    def elsewhere(self) -> list[Placement]:
        """Of a chunk that is updated, where its optimizer is on the host."""
        may = (False, True) if self.is_gpu else (False,)  # beside a CPU's computation nothing runs
        return [PLACED[streams, is_away, guesses] for streams, is_away, guesses in product(may, (False, True), may)]

    def placed(self, candidate: Candidate, placements: tuple[Placement, ...]) -> Candidate:
        """The same with its chunks so, and as many slots as that takes."""
        slots = self.slots_for(placements)
        return replace(candidate, placements=placements, slots=slots, prefetch=self.prefetch(slots))

    @cached_property
    def wanted_slots(self) -> int:
        """Enough for the weights of one block, all of which one that is recomputed holds, and for some that come."""
        blocks = next(iter(self.passes.values())).blocks
        counts = Counter(block for chunk in self.chunks for block in chunk.blocks)
        most = max((counts[index] for index, block in enumerate(blocks) if block.name), default=1)
        return max(LEAST_SLOTS, 2 * most + 1 if self.is_gpu else most + 1)

    def slots_for(self, placements: tuple[Placement, ...]) -> int:
        """As many as a block wants, and one more than are needed at once; but no more than there are chunks for them."""
        gathers = self.division.weights
        away = sum(1 << index for index, placement in enumerate(placements) if gathers or placement.weights == "host")
        needed = max(((each & away).bit_count() for each in self._together), default=0)
        return min(max(self.wanted_slots, needed + 1), away.bit_count())

    def prefetch(self, slots: int) -> int:
        return min(max(2, self.wanted_slots // 2), max(slots - 1, 0))

    def before_larger_slots(self) -> Iterator[int]:
        """How many of the last chunks are no larger than those after them, and all: any number in between needs more of the
        device than one of these, whether slots are still taken for it, or weights leave that need no larger ones."""
        largest = 0
        for away, chunk in enumerate(reversed(self.chunks)):
            if chunk.weights_bytes > largest:
                largest = chunk.weights_bytes
                yield away
        yield len(self.chunks)


def ladder(each: Pass) -> list[tuple[Activations, ...]]:
    """Choices for all blocks, from all kept to the least that can be kept and nothing offloaded."""
    now = [_first(block) for block in each.blocks]
    found = [tuple(now)]
    heap: list[tuple[float, int, Activations]] = []

    def offer(index: int) -> None:
        """The choice that frees most for what it costs."""
        choices = each.blocks[index].choices
        here = choices[now[index]]
        steps: list[tuple[float, int, Activations]] = [
            ((choices[name].seconds - here.seconds) / (here.kept_bytes - choices[name].kept_bytes), index, name)
            for name in RECOMPUTED
            if name in choices and choices[name].kept_bytes < here.kept_bytes
        ]
        if steps:
            heapq.heappush(heap, min(steps))

    for index, block in enumerate(each.blocks):
        if block.name and block.choices:
            offer(index)
    while heap:
        _, index, name = heapq.heappop(heap)
        now[index] = name
        found.append(tuple(now))
        offer(index)
    return found


def _first(block: BlockCost) -> Activations:
    """Kept, where a user does not decide otherwise."""
    return "keep" if "keep" in block.choices or not block.choices else next(iter(block.choices))  # type: ignore[arg-type]


def _placements(chunks: tuple[ChunkCost, ...], knobs: Knobs, to_disk: tuple[int, ...]) -> Iterator[Placement]:
    on_disk = frozenset(to_disk[: knobs.on_disk])
    rest = sum(chunk.elements for chunk in chunks[knobs.resident :] if chunk.is_updated)
    rest -= sum(chunks[index].elements for index in on_disk)
    others, streamed, first = 0, 0.0, 0
    for index, chunk in enumerate(chunks):
        is_away = index >= len(chunks) - knobs.away
        if not chunk.is_updated:
            yield FROZEN_AWAY if is_away else RESIDENT
            continue
        if index < knobs.resident:
            yield RESIDENT
            continue
        if index in on_disk:
            yield ON_DISK[is_away]
            continue
        if first + chunk.elements / 2 <= knobs.host_first * rest:
            first += chunk.elements
            streams = False
        else:
            others += chunk.elements
            streams = streamed + chunk.elements / 2 <= knobs.streamed * others
            streamed += chunk.elements if streams else 0
        yield PLACED[streams, is_away, knobs.speculates]
