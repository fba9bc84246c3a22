"""Profile: seconds and bytes of a training step on one machine, block by block, for every micro-batch considered.

Model-state bytes are exact; seconds and activation bytes are forecasts and carry the machine's and the cost model's error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import ClassVar, Literal, Self

from .calibration import Calibration
from .compiled import BlockFigures
from .corrections import ClippedSteps, Correction, Pace
from .division import ALONE as ALONE
from .division import Division as Division
from .division import Exchange as Exchange
from .loss_rule import MEAN, LossRule
from .plan import BlockCut
from .rates import DiskRates as DiskRates
from .rates import HostRates as HostRates
from .rates import LaunchCosts as LaunchCosts
from .rates import LoadedRates as LoadedRates
from .record import Record
from .timing import NOTHING_RUN as NOTHING_RUN
from .timing import Replay as Replay
from .timing import Timing as Timing
from .units import show_parameters

MOMENT_BYTES = 4  # an element: moments are in fp32


@dataclass(frozen=True)
class ChoiceCost:
    """A block's activations under one choice."""

    kept_bytes: int  # on the device, from forward to backward
    moved_bytes: int  # to the host, and back
    seconds: float  # of recomputing, or of copies both ways, before anything hides them
    timing: Timing | None = None  # of recomputing, or of what the host does to move them, where another processor launches it

    @property
    def added(self) -> Timing:
        """What backward does besides: what is recomputed, or what moving takes of the host."""
        if self.moved_bytes:
            return self.timing or NOTHING_RUN
        return self.timing or Timing.on_device(self.seconds)

    @property
    def device_seconds(self) -> float:
        """Of what backward does once more."""
        return 0.0 if self.moved_bytes else self.seconds if self.timing is None else self.timing.device_seconds


@dataclass(frozen=True)
class BlockCost:
    name: str
    kind: str  # class of the module
    parameters: int
    flops_forward: int
    flops_backward: int
    seconds_forward: float
    seconds_backward: float
    seconds_recompute: float  # of backward: forward work that is recomputed
    kept_bytes: int  # held from forward for backward
    # By plan.Activations, what could be done with that; nothing where it is no block, or outside all of them.
    choices: Mapping[str, ChoiceCost] = field(default_factory=dict)
    figures: BlockFigures | None = None  # of its compiled code, where that was measured
    may_be_replayed: bool = False  # as CUDA graphs
    replays: Mapping[str, Replay] = field(default_factory=dict)  # where it is: by plan.Activations

    def scaled(self, scale: float) -> Self:
        """The same where the device takes so many times as long; copies to the host take what they took."""
        choices = {
            name: choice
            if choice.moved_bytes
            else replace(choice, seconds=choice.seconds * scale, timing=_scaled(choice.timing, scale))
            for name, choice in self.choices.items()
        }
        seconds = {name: getattr(self, name) * scale for name in ("seconds_forward", "seconds_backward", "seconds_recompute")}
        return replace(self, choices=choices, **seconds)


@dataclass(frozen=True)
class Segment:
    """A stretch of a pass inside one block, or between blocks."""

    block: int  # index into Pass.blocks
    phase: Literal["forward", "backward"]
    seconds: float  # by which it lengthens a pass with nothing beside it, waits for launches included
    # Live at its peak: without what other blocks keep, but with what is kept outside all blocks; without parameters' gradients.
    work_bytes: int
    parameters: tuple[str, ...] = ()  # between blocks, those that it uses
    timing: Timing | None = None  # None where host and device are the same cores
    exchange_seconds: float = 0.0  # of these, that ranks of a tensor axis exchange, and nothing is computed

    @property
    def played(self) -> Timing:
        return self.timing or Timing.on_device(self.seconds)

    @property
    def device_seconds(self) -> float:
        return self.seconds if self.timing is None else self.timing.device_seconds


def _scaled(timing: Timing | None, scale: float) -> Timing | None:
    return timing and timing.slowed(scale, scale)


@dataclass(frozen=True)
class Pass:
    """Forward and backward of one micro-batch."""

    micro_batch: int
    tokens: int
    blocks: tuple[BlockCost, ...]
    segments: tuple[Segment, ...]  # of all of it, in order
    peak_bytes: int  # live at once beyond the model state, this pass's own gradients included
    peak_bytes_accumulating: int  # the same when gradients of earlier micro-batches are already held
    peak_at: str  # the module where the peak is
    reserved_bytes: int  # by torch's allocator for a whole step, model state and update included; 0 on a CPU, which has none
    recorded_bytes: int = 0  # of recordings, where blocks are replayed

    @property
    def flops(self) -> int:
        return sum(block.flops_forward + block.flops_backward for block in self.blocks)

    @property
    def seconds(self) -> float:
        return sum(block.seconds_forward + block.seconds_backward for block in self.blocks)

    @property
    def exchange_seconds(self) -> float:
        """That ranks of a tensor axis exchange, and nothing is computed."""
        return sum(segment.exchange_seconds for segment in self.segments)

    @property
    def seconds_recompute(self) -> float:
        return sum(block.seconds_recompute for block in self.blocks)

    @cached_property
    def played(self) -> Timing:
        """All of it."""
        return reduce(Timing.then, (segment.played for segment in self.segments), NOTHING_RUN)

    @property
    def replayed(self) -> Timing:
        """All of it, with all blocks kept and those replayed that can be."""
        replays = [block.replays.get("keep") for block in self.blocks]
        pairs = ((segment, replays[segment.block]) for segment in self.segments)
        timings = (each.played if replay is None else replay.timing(each.device_seconds) for each, replay in pairs)
        return reduce(Timing.then, timings, NOTHING_RUN)

    @property
    def kept_for_good_bytes(self) -> int:
        """That blocks keep from one step to the next, where all are kept and those replayed that can be."""
        replayed = (block for block in self.blocks if "keep" in block.replays)
        return sum(block.choices["keep"].kept_bytes + block.replays["keep"].own_bytes for block in replayed)

    @property
    def may_keep_all(self) -> bool:
        """Not where somebody has decided that blocks are recomputed."""
        return all("keep" in block.choices for block in self.blocks if block.choices)

    @property
    def launch_wait_seconds(self) -> float:
        """That the device waits for the host, with nothing beside it."""
        is_launched = any(segment.timing is not None for segment in self.segments)
        return max(self.seconds - self.played.device_seconds, 0.0) if is_launched else 0.0

    def scaled(self, scale: float) -> Self:
        """The same where the device takes so many times as long."""
        segments = tuple(
            replace(
                segment,
                seconds=segment.seconds * scale,
                timing=_scaled(segment.timing, scale),
                exchange_seconds=segment.exchange_seconds * scale,
            )
            for segment in self.segments
        )
        return replace(self, blocks=tuple(block.scaled(scale) for block in self.blocks), segments=segments)


@dataclass(frozen=True)
class StateBytes:
    """Exact bytes of what lives from step to step, on one device with nothing sharded."""

    parameters: int
    masters: int  # the low halves that make bf16 weights exact fp32 masters
    optimizer: int
    buffers: int
    scratch: int  # the fp32 masters and gradients of the chunk at work
    gradients: int  # of all parameters that get one
    accumulators: int  # fp32 gradient sums, held only when several micro-batches make a step

    @property
    def resident(self) -> int:
        return self.parameters + self.masters + self.optimizer + self.buffers + self.scratch


@dataclass(frozen=True)
class UpdateCost:
    seconds: float
    scratch_bytes: int  # temporary, while one chunk is updated


@dataclass(frozen=True)
class ChunkCost:
    """The bytes of one chunk of the layout, wherever it is placed."""

    weights_bytes: int
    elements: int
    trainable: bool
    gradient_bytes: int  # of parameters that get one; 0 where the chunk is frozen or unused
    optimizer_bytes: int  # low halves and moments; some optimizers have none
    is_updated: bool  # by the optimizer
    blocks: tuple[int, ...]  # whose parameters it holds, ascending
    parameters: tuple[str, ...] = ()  # those of no block
    summed_bytes: int = 0  # of gradients that autograd adds up over several uses, and has from the first of them on
    is_split: bool = False  # masters are two halves: the weights, and low ones that are part of the optimizer's bytes
    tensors: int = 0  # parameters that it holds
    is_cut: bool = False  # over a tensor axis: they are one rank's parts

    @cached_property
    def state_parts(self) -> tuple[int, ...]:
        """Bytes of the low halves, where there are any, and of each moment, as they lie on a disk; nothing where the state is not
        so much for each element."""
        low, moment = self.weights_bytes * self.is_split, MOMENT_BYTES * self.elements
        count, rest = divmod(self.optimizer_bytes - low, moment or 1)
        return () if rest or not self.is_updated else (*[moment] * count, *[low] * self.is_split)


@dataclass(frozen=True)
class Layout:
    """All model state in chunks of about one size."""

    chunk_bytes: int
    chunks: tuple[ChunkCost, ...]  # in its order
    together: tuple[tuple[int, ...], ...] = ()  # chunks whose weights are needed at once


@dataclass(frozen=True)
class Profile(Record):
    kind: ClassVar[str] = "profile"
    version: ClassVar[int] = 15

    model: str
    machine: str
    precision: Literal["bf16", "fp32"]
    optimizer: str
    batch_size: int
    parameters: int
    trainable: int
    state: StateBytes
    passes: tuple[Pass, ...]  # micro-batch descending
    update: UpdateCost
    blocks: int
    chunk_bytes: int
    device_limit_bytes: int
    host_limit_bytes: int
    disk_limit_bytes: int  # 0 where nobody has allowed a disk: it wears
    context_bytes: int  # taken by the runtime outside torch's allocator
    workspace_bytes: int  # taken by matmul libraries inside it
    peak_flops_per_second: float  # the device's best matmul rate in this precision
    time_error: float  # relative, of a forecast step time
    memory_error: float  # relative, of the forecast peak
    reserved_error: float  # relative, of what is forecast to be reserved with everything on the device
    model_fingerprint: str
    machine_fingerprint: str
    calibration: Calibration
    memory_bytes_per_second: float = 1.0  # of the device's own memory, read and written
    offload_error: float = 0.02  # relative, of the same where chunks are placed one by one
    offload_chunk_bytes: int = 0  # of a layout fine enough to place part of the state on the host
    chunks: tuple[ChunkCost, ...] = ()  # of that layout, in its order
    together: tuple[tuple[int, ...], ...] = ()  # of these, by index, such whose weights are needed at once
    state_stays: str = ""  # why no model state may leave the device, if it may not
    other_layouts: tuple[Layout, ...] = ()  # finer and coarser than that one
    host: HostRates | None = None  # None: nothing can be placed on the host
    disk: DiskRates | None = None  # None: nothing is known of one
    notes: tuple[str, ...] = ()  # on how the passes were traced: by real runs, without some sizes
    correction: Correction | None = None  # where a run has shown that these errors are larger than they would be
    pace: Pace | None = None  # by which the seconds of the passes were scaled, where a check has measured them
    # Of several ranks: limits and rates of the host are one rank's, the batch is that of all.
    divisions: tuple[Division, ...] = ()
    division: Division | None = None  # of these the one at hand: the batch is one rank's too
    link_error: float = 0.0  # relative, of the seconds of an exchange
    link_note: str = ""  # what was assumed of links that nobody has measured
    loss: LossRule = MEAN  # how losses of micro-batches make that of the batch, and so whether it may be cut
    kept: Mapping[str, str] = field(default_factory=dict)  # blocks that are not recomputed, and why
    clipped_steps: ClippedSteps | None = None  # what runs have shown of them; None: the job does not clip
    name: str = ""  # of what was asked about, such as llama-8b; the model's class where nobody gave one
    limited: tuple[str, ...] = ()  # tiers of which less than all may be used
    assumes_host: bool = False  # the host's limit is what a preset has, which nobody confirmed
    cut: Mapping[str, BlockCut] = field(default_factory=dict)  # by block, how a tensor axis holds it, of which this is one rank's
    layout: str = ""  # what people call that
    tables: tuple[str, ...] = ()  # parameters outside of blocks whose rows that axis divides

    @classmethod
    def from_json(cls, document: object, *, where: str = "") -> Self:
        if isinstance(document, Mapping):  # files may be older than a name, limits and disks
            document = {"name": "", "limited": [], "assumes_host": False, "disk": None, **document}
        return super().from_json(document, where=where)

    @property
    def described(self) -> str:
        """For people: the model with its size, and the job.

        `llama-8b (8.03 B parameters, AdamW, batch 8 x 1024)`"""
        length = self.passes[0].tokens // self.passes[0].micro_batch if self.passes else 1
        batch = self.batch_size * (1 if self.division is None else self.division.ranks)
        facts = f"{show_parameters(self.parameters, self.trainable)}, {self.optimizer}, batch {batch}"
        return f"{self.name or self.model} ({facts}{f' x {length}' if length > 1 else ''})"

    @property
    def rank_division(self) -> Division:
        """Of which the profile is one rank's."""
        return self.division or ALONE

    @property
    def ranks(self) -> int:
        """Along the data axis: all, but where a tensor axis cuts the model."""
        return self.divisions[0].ranks if self.divisions else self.rank_division.ranks

    @property
    def tensor(self) -> int:
        """Ranks along the tensor axis."""
        return self.divisions[0].tensor if self.divisions else self.rank_division.tensor

    @property
    def clipped_share(self) -> float:
        """Of steps, as many as are expected to be clipped."""
        return 0.0 if self.clipped_steps is None else self.clipped_steps.share

    @property
    def traced(self) -> str:
        return "a real run" if any(note.startswith("on the CPU") for note in self.notes) else "without values"

    def ruled(self, loss: LossRule) -> Self:
        """The same with this rule. Where the loss of a batch is not made of its micro-batches' losses, the batch is not cut."""
        if loss.may_be_cut:
            return replace(self, loss=loss)
        if self.ranks > 1:
            raise ValueError(f"{self.ranks} ranks cut the batch among them, and {loss.why}; {loss.ways_out}")
        whole = tuple(each for each in self.passes if each.micro_batch == self.batch_size)
        if not whole:
            raise ValueError(f"Job(micro_batch={self.passes[0].micro_batch}) cuts the batch, and {loss.why}; {loss.ways_out}")
        return replace(self, loss=loss, passes=whole)

    def keeping(self, blocks: Mapping[str, str], ways: tuple[str, ...] = ("recompute", "selective")) -> Self:
        """The same with these blocks, each for its reason, not recomputed in these ways."""

        def without(block: BlockCost) -> BlockCost:
            if block.name not in blocks:
                return block
            return replace(block, choices={name: cost for name, cost in block.choices.items() if name not in ways})

        passes = tuple(replace(each, blocks=tuple(map(without, each.blocks))) for each in self.passes)
        return replace(self, passes=passes, kept={**self.kept, **blocks})

    def staying_eager(self, blocks: Collection[str]) -> Self:
        """The same with these blocks not compiled."""
        return self._with_blocks(lambda block: replace(block, figures=None) if block.name in blocks else block)

    def with_figures(self, found: Mapping[str, BlockFigures]) -> Self:
        """The same with what was measured of these blocks, in passes of the size that it was measured with."""

        def changed(each: Pass) -> Pass:
            own = {name: of for name, of in found.items() if of.micro_batch == each.micro_batch}
            blocks = (replace(block, figures=own.get(block.name, block.figures)) for block in each.blocks)
            return replace(each, blocks=tuple(blocks)) if own else each

        return replace(self, passes=tuple(map(changed, self.passes)))

    def replayable(self) -> Self:
        """The same where all blocks that can be recomputed may be replayed."""
        return self._with_blocks(lambda block: replace(block, may_be_replayed="recompute" in block.choices))

    def launched_op_by_op(self, blocks: Collection[str]) -> Self:
        """The same with these blocks not replayed."""
        return self._with_blocks(lambda block: replace(block, may_be_replayed=False) if block.name in blocks else block)

    def _with_blocks(self, change: Callable[[BlockCost], BlockCost]) -> Self:
        return replace(self, passes=tuple(replace(each, blocks=tuple(map(change, each.blocks))) for each in self.passes))

    def staying(self, why: str, mirrored_bytes: int = 0) -> Self:
        """The same with all model state on the device, whole on every rank, and so much of it twice."""
        state = replace(self.state, buffers=self.state.buffers + mirrored_bytes)
        return replace(self.unsharded(), state_stays=why, state=state)

    def unsharded(self) -> Self:
        """The same with state whole on every rank, where the ranks can do that."""
        whole = tuple(each for each in self.divisions if each.shards == 1 and not each.weights)
        return replace(self, divisions=whole or self.divisions)

    def slowed(self, times: int) -> Self:
        """The same where so many ranks share a device's time."""
        return self if times == 1 else replace(self, passes=tuple(each.scaled(times) for each in self.passes))

    def sharded(self, division: Division) -> Self:
        """The profile of one rank. Where gradients are sharded and weights are not, a step of one micro-batch is left out: it
        would be the same as without sharded gradients."""
        share = self.batch_size // division.ranks
        most = share - 1 if division.gradients and not division.weights else share
        passes = tuple(each for each in self.passes if each.micro_batch <= most)
        return replace(self, batch_size=share, passes=passes, divisions=(), division=division)

    def with_passes_of(self, other: Self) -> Self:
        """With those of the same job's other micro-batches too."""
        passes = sorted((*self.passes, *other.passes), key=lambda each: -each.micro_batch)
        return replace(self, passes=tuple(passes), notes=tuple(dict.fromkeys((*self.notes, *other.notes))))

    def laid_out(self, layout: Layout) -> Self:
        """The same in chunks of this size, and of no other."""
        return replace(
            self, offload_chunk_bytes=layout.chunk_bytes, chunks=layout.chunks, together=layout.together, other_layouts=()
        )

    def corrected(self, correction: Correction | None) -> Self:
        """The same with a margin as large as a run has shown to be needed."""
        if correction is None or correction.error <= min(self.reserved_error, self.offload_error):
            return self
        reserved, offload = (max(error, correction.error) for error in (self.reserved_error, self.offload_error))
        return replace(self, reserved_error=reserved, offload_error=offload, correction=correction)

    def paced(self, pace: Pace | None) -> Self:
        """The same with passes that take as long as a check has measured."""
        if pace is None:
            return self
        scale = pace.scale if self.pace is None else pace.scale / self.pace.scale
        return replace(self, passes=tuple(each.scaled(scale) for each in self.passes), pace=pace)
