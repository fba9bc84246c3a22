"""A candidate: all that decides the time and the memory of a step, of one device or of one rank of several; and the rates of its
work."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from anyfit.values.calibration import Calibration
from anyfit.values.plan import Activations, Placement
from anyfit.values.precision import PRECISIONS, SUM_BYTES
from anyfit.values.profile import (
    ALONE,
    ChoiceCost,
    ChunkCost,
    DiskRates,
    Division,
    HostRates,
    Pass,
    Profile,
    Replay,
    Segment,
    Timing,
)

NORM_BYTES, UPDATE_BYTES, GATHER_BYTES = 2, 30, 4  # read and written of a parameter on the device
UPDATE_TRAFFIC = 26  # bytes of the host's memory that an update reads and writes
# Of an update's traffic: to add a gradient up on the host, and, where the device is a CPU, to take its norm there; one of two
# phases, weights alone or moments alone; what a gradient that was added up has more than one that was not.
ADDED, NORMED, ONE_PHASE, WIDER = 10 / UPDATE_TRAFFIC, 4 / UPDATE_TRAFFIC, 18 / UPDATE_TRAFFIC, 2 / UPDATE_TRAFFIC


@dataclass(frozen=True)
class Rates:
    host: HostRates
    norm_seconds: float  # of gradients that are on the device, each parameter
    update_seconds: float  # of a resident parameter, or one that was lifted
    gather_seconds: float = 0.0  # of a gradient that is put in its chunk's staging buffer
    add_seconds: float = 0.0  # of one that is added to those of earlier passes on the device
    disk: DiskRates | None = None
    calibration: Calibration = field(kw_only=True)

    @property
    def host_norm_seconds(self) -> float:
        """Of gradients that were added up on the host; for a GPU their squares are taken with the adding."""
        return 0.0 if self.host.overlaps else NORMED / self.host.updates_per_second


def rates_of(profile: Profile) -> Rates:
    assert profile.host is not None
    memory = profile.memory_bytes_per_second
    norm, whole = NORM_BYTES / memory, profile.update.seconds / max(profile.trainable, 1)  # with what each parameter costs
    update = max(UPDATE_BYTES / memory, whole - norm) if profile.host.overlaps else whole  # on a CPU, by torch
    return Rates(
        profile.host, norm, update, GATHER_BYTES / memory, add_seconds(profile), profile.disk, calibration=profile.calibration
    )


def add_seconds(profile: Profile) -> float:
    """Of one gradient and pass, where the device adds them up over passes."""
    return PRECISIONS[profile.precision].adding_bytes / profile.memory_bytes_per_second


class Uses:
    """By segment of a pass, which chunks it takes weights from: candidates share it."""

    def __init__(self, each: Pass, chunks: tuple[ChunkCost, ...]) -> None:
        self._each, self._chunks = each, chunks
        of_block: list[list[int]] = [[] for _ in each.blocks]
        for index, chunk in enumerate(chunks):
            for block in chunk.blocks:
                of_block[block].append(index)
        self.by_segment = tuple(
            tuple(
                index
                for index in of_block[segment.block]
                if not segment.parameters or not set(segment.parameters).isdisjoint(chunks[index].parameters)
            )
            for segment in each.segments
        )

    def are_of(self, each: Pass, chunks: tuple[ChunkCost, ...]) -> bool:
        return each is self._each and chunks is self._chunks


@dataclass(frozen=True)
class Candidate:
    profile_pass: Pass
    accumulation: int
    activations: tuple[Activations, ...]  # a block each
    chunks: tuple[ChunkCost, ...]
    placements: tuple[Placement, ...]
    slots: int
    prefetch: int
    division: Division = ALONE  # of which this is one rank
    known_uses: Uses | None = field(default=None, repr=False, compare=False)

    @property
    def micro_batch(self) -> int:
        return self.profile_pass.micro_batch

    @property
    def adds_up(self) -> bool:
        """Gradients of several micro-batches are accumulated."""
        return self.accumulation > 1

    @property
    def shards(self) -> int:
        """Ranks over which the optimizer's state is sharded."""
        return self.division.shards

    @property
    def gathers(self) -> bool:
        """Weights on the device are sharded, and all-gathered for each use."""
        return self.division.weights

    def stages(self, placement: Placement, *, is_last: bool) -> bool:
        """Whether gradients of this micro-batch are put side by side, to go to the host or to be summed over ranks; else they
        add up where they are."""
        if placement.gradients == "host":
            return True
        return not self.division.is_alone and (is_last or self.division.gradients)

    def sent_bytes(self, chunk: ChunkCost) -> float:
        """Of a chunk's gradients, to the host: as they were made, or this rank's shard of their sum."""
        return chunk.gradient_bytes if self.division.is_alone else SUM_BYTES * (chunk.elements / self.shards)

    def slowness(self, rates: Rates) -> float:
        """Seconds that one of the computation takes while copies, updates and exchanges run."""
        stays = all(each.route == "resident" and each.weights != "host" for each in self.placements)
        is_alone = stays and not self.offloaded and self.division.is_alone
        return 1.0 if is_alone or not rates.host.overlaps else rates.calibration.overlap_slowdown.value

    def ending_seconds(self, resident: float, rates: Rates) -> float:
        """From the norm to the end of the step, of which the device takes so many for resident updates. The host starts the
        others meanwhile; of several ranks it starts them all, one after another."""
        elsewhere = sum(placement.route != "resident" for placement in self.placements)
        starting = rates.calibration.update_launch_seconds.value * elsewhere
        return max(resident, starting) if self.division.is_alone else resident + starting

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """By segment, which chunks it takes weights from."""
        each, chunks, known = self.profile_pass, self.chunks, self.known_uses
        return (known if known is not None and known.are_of(each, chunks) else Uses(each, chunks)).by_segment

    @cached_property
    def offloaded(self) -> tuple[int, ...]:
        """Blocks whose activations are offloaded, in the order in which forward comes to them."""
        if "offload" not in self.activations:
            return ()
        order = dict.fromkeys(segment.block for segment in self.profile_pass.segments if segment.phase == "forward")
        return tuple(block for block in order if self.activations[block] == "offload")

    @cached_property
    def before(self) -> dict[int, int]:
        """By offloaded block, the one before it: it starts to return when backward comes to this one."""
        return dict(zip(self.offloaded[1:], self.offloaded, strict=False))

    def offloaded_bytes(self, block: int) -> int:
        return self.profile_pass.blocks[block].choices["offload"].moved_bytes

    @property
    def recompute_seconds(self) -> float:
        """Of one pass: forward work that the device does once more in backward."""
        return sum(each.device_seconds for each in self._recomputed if each is not None)

    @cached_property
    def _recomputed(self) -> tuple[ChoiceCost | None, ...]:
        """By block, what recomputing it costs; None where it is not."""
        pairs = zip(self.profile_pass.blocks, self.activations, strict=True)
        return tuple(block.choices[choice] if choice in ("recompute", "selective") else None for block, choice in pairs)

    @cached_property
    def replays(self) -> tuple[Replay | None, ...]:
        """By block, its recordings, where it is replayed."""
        pairs = zip(self.profile_pass.blocks, self.activations, strict=True)
        return tuple(block.replays.get(choice) for block, choice in pairs)

    @cached_property
    def segment_seconds(self) -> tuple[float, ...]:
        """By segment, of the device, with what is recomputed in it."""
        again = [0.0 if each is None else each.device_seconds for each in self._recomputed]
        copies = [0.0 if each is None else each.copy_seconds for each in self.replays]
        return tuple(
            each.device_seconds + copies[each.block] + (again[each.block] if each.phase == "backward" else 0.0)
            for each in self.profile_pass.segments
        )

    @cached_property
    def timings(self) -> tuple[Timing, ...]:
        """By segment, of host and device, with what is recomputed in it or comes back."""

        def timing(segment: Segment) -> Timing:
            index = segment.block
            block, choice, replay = self.profile_pass.blocks[index], self.activations[index], self.replays[index]
            if replay is not None:
                again = block.choices[choice].device_seconds if segment.phase == "backward" and choice != "keep" else 0.0
                return replay.timing(segment.device_seconds + again)
            if segment.phase == "forward" or choice == "keep":
                return segment.played
            return block.choices[choice].added.then(segment.played)

        return tuple(map(timing, self.profile_pass.segments))

    @property
    def launch_seconds(self) -> float:
        """Of one pass, that the host takes at least to launch it."""
        if any(self.replays):
            return sum(each.launch_seconds for each in self.timings)
        pairs = zip(self.profile_pass.blocks, self.activations, strict=True)
        added = sum(block.choices[choice].added.launch_seconds for block, choice in pairs if choice != "keep")
        return added + self.profile_pass.played.launch_seconds
