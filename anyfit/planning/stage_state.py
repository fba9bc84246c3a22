"""What stages hold of the model's state: how it is sharded over the data axis, and what of it lies on the host.

    division   the optimizer's state alone, gradients too, or weights too (as ZeRO 1, 2 and 3 do), over some ranks of a place
    streams    low halves and moments are on the host; each chunk's cross to the device and back for its update

Gradients of several micro-batches add up whole, beside those of the block at work; the last micro-batch's are summed over ranks
in fp32, chunk by chunk, and each rank keeps its shard of the sums. Where they are sharded, those of every micro-batch are summed
so, and add up as shards. Sharded weights pass through slots: they are gathered for each forward and backward of a micro-batch.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from anyfit.values.called import CalledBlocks, Elements
from anyfit.values.engine import REDUCTION_BUFFERS, STREAMED_DEPTH
from anyfit.values.plan import Placement
from anyfit.values.precision import SUM_BYTES
from anyfit.values.profile import ALONE, Division, Profile

from .candidate import add_seconds
from .knobs import LEAST_SLOTS

MOST_DIVISIONS = 3  # of the optimizer's state alone


@dataclass(frozen=True)
class Holding:
    division: Division
    streams: bool = False

    @property
    def placement(self) -> Placement:
        """Of every chunk."""
        division = self.division
        return Placement(
            optimizer="host" if self.streams else "device",
            weight_shards=division.shards if division.weights else 1,
            gradient_shards=division.shards if division.gradients else 1,
            optimizer_shards=division.shards,
        )

    @property
    def is_plain(self) -> bool:
        return not (self.streams or self.division.gradients or self.division.weights)


def holdings_of(profile: Profile, stages_a_rank: int, micro_batches: int) -> list[Holding]:
    """Those to consider, the simple ones first; of several stages a rank, as of one micro-batch, gradients add up whole."""
    of_level: dict[tuple[bool, bool], list[Division]] = {}
    for each in profile.divisions or (ALONE,):
        of_level.setdefault((each.gradients, each.weights), []).append(each)
    found = [Holding(each) for each in _some(of_level.pop((False, False), []))]
    if stages_a_rank == 1:
        for level, divisions in of_level.items():
            if micro_batches > 1 or level == (True, True):
                found += [Holding(each) for each in dict.fromkeys((divisions[-1], _quick(divisions)))]
    overlaps = profile.host is not None and profile.host.overlaps and not profile.state_stays
    return found + [Holding(each.division, streams=True) for each in found if overlaps and profile.state.optimizer]


def _some(divisions: list[Division]) -> list[Division]:
    """What lies between differs by less than a pass."""
    if len(divisions) <= MOST_DIVISIONS:
        return divisions
    return list(dict.fromkeys((divisions[0], _quick(divisions[1:]), divisions[-1])))


def _quick(divisions: list[Division]) -> Division:
    return min(divisions, key=lambda each: (each.gather.seconds_per_byte, -each.shards))


@dataclass(frozen=True)
class Memory:
    """Of one rank: what its stages hold of the model's state, and what is left for activations."""

    profile: Profile
    called: CalledBlocks
    holding: Holding
    adds_up: bool

    @property
    def division(self) -> Division:
        return self.holding.division

    @property
    def by_micro_batch(self) -> bool:
        """Whether gradients of each are summed over ranks by themselves."""
        return self.adds_up and self.division.gradients

    @property
    def weight_bytes(self) -> float:
        """Of an element."""
        return self.profile.state.parameters / max(self.called.all.all, 1)

    @property
    def optimizer_bytes(self) -> float:
        """Of one that is trained: low halves and moments, of one rank."""
        state, trained = self.profile.state, max(self.called.all.trained, 1)
        return (state.masters + state.optimizer) / trained / self.division.shards

    @cached_property
    def _of_element(self) -> tuple[float, float]:
        """Bytes of the device for each, and for each that is trained besides."""
        state, division, trained = self.profile.state, self.division, max(self.called.all.trained, 1)
        weights = self.weight_bytes / (division.shards if division.weights else 1)
        optimizer = 0.0 if self.holding.streams else self.optimizer_bytes
        if self.by_micro_batch:
            return weights, optimizer + SUM_BYTES / division.shards
        sums = 0.0 if division.is_alone else SUM_BYTES / division.shards
        return weights, optimizer + (state.accumulators if self.adds_up else state.gradients) / trained + sums

    @cached_property
    def fixed(self) -> int:
        """Whatever the stages."""
        state, profile, chunks = self.profile.state, self.profile, self.profile.chunks
        buffers = 0
        if not self.division.is_alone:
            largest = max((chunk.elements for chunk in chunks if chunk.trainable), default=0)
            landing = largest // self.division.shards if self.by_micro_batch else 0
            buffers = REDUCTION_BUFFERS * SUM_BYTES * (largest + landing)
        if self.division.weights:
            buffers += self.slots * max((chunk.weights_bytes for chunk in chunks), default=0)
        if self.holding.streams:
            carried = max((chunk.optimizer_bytes + chunk.weights_bytes for chunk in chunks if chunk.is_updated), default=0)
            buffers += STREAMED_DEPTH * carried // self.division.shards
        return state.buffers + state.scratch + profile.update.scratch_bytes + profile.workspace_bytes + buffers

    @cached_property
    def slots(self) -> int:
        """For the weights of a block at work and of the next; none where weights are whole."""
        if not self.division.weights:
            return 0
        counts = Counter(block for chunk in self.profile.chunks for block in chunk.blocks)
        together = max(map(len, self.profile.together), default=1)
        return max(LEAST_SLOTS, 2 * max(counts.values(), default=1) + 1, together + 1)

    @cached_property
    def fragments(self) -> float:
        """What the allocator adds to activations."""
        overlaps = self.profile.host is not None and self.profile.host.overlaps
        return 1 + self.profile.calibration.fragmentation.value if overlaps else 1.0

    @cached_property
    def adding_seconds(self) -> float:
        """Of an element and micro-batch."""
        return add_seconds(self.profile) if self.adds_up else 0.0

    def needed(self, size: float) -> int:
        """At the far end of the error band, with what the runtime takes."""
        return int((size + self.profile.context_bytes) * (1 + self.profile.reserved_error))

    @cached_property
    def limit(self) -> int:
        """Of what stages hold."""
        return int(self.profile.device_limit_bytes / (1 + self.profile.reserved_error)) - self.profile.context_bytes - self.fixed

    def state(self, held: Elements) -> float:
        of_all, of_trained = self._of_element
        return of_all * held.all + of_trained * held.trained

    def on_host(self, held: Elements) -> int:
        return int(self.optimizer_bytes * held.trained) if self.holding.streams else 0

    def gradient(self, held: Elements) -> float:
        """Of a block at work, before they are added up."""
        trained = max(self.called.all.trained, 1)
        return self.profile.state.gradients / trained * held.trained if self.adds_up else 0.0

    # ------------------------------------------------------------------ seconds

    def gathering(self, held: Elements) -> tuple[float, float]:
        """Seconds to put a stage's weights together for a pass, and those before it can begin."""
        if not self.division.weights:
            return 0.0, 0.0
        size = self.weight_bytes * held.all
        chunks = max(math.ceil(size / self._chunk_bytes), 1)
        seconds = chunks * self.division.gather.latency_seconds + size * self.division.gather.seconds_per_byte
        return seconds, seconds / chunks

    def summing(self, held: Elements) -> float:
        """Of gradients over the data axis."""
        seconds = 0.0
        for size, is_cut in ((held.cut, True), (held.whole, False)):
            exchange = self.division.reduction(is_cut=is_cut)
            chunks = math.ceil(size * self.weight_bytes / self._chunk_bytes)
            seconds += chunks * exchange.latency_seconds + SUM_BYTES * size * exchange.seconds_per_byte
        return seconds

    def updating(self, held: Elements) -> float:
        """What is on the host is copied both ways at once, beside the updates."""
        profile = self.profile
        seconds = profile.update.seconds * held.trained / max(profile.trainable, 1) / self.division.shards
        if not self.holding.streams or profile.host is None:
            return seconds
        rate = min(profile.host.up_bytes_per_second, profile.host.down_bytes_per_second)
        return max(seconds, self.optimizer_bytes * held.trained / rate)

    def sharing(self, held: Elements) -> float:
        """To all-gather fresh weights, where ranks keep them whole."""
        if self.division.shards == 1 or self.division.weights:
            return 0.0
        return self.division.gather.seconds(self.weight_bytes * held.trained)

    @property
    def _chunk_bytes(self) -> int:
        return max(self.profile.offload_chunk_bytes or self.profile.chunk_bytes, 1)
