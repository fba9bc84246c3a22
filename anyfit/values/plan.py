"""Plan: every decision about a training run, what it will cost, and why it was taken."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, Self, get_args

from .cuts import Cut
from .loss_rule import LossRule
from .mesh import Axis
from .older_plans import up_to_date
from .picture import Picture
from .plan_checks import refuse_chunks, refuse_mesh
from .plan_names import Activations as Activations
from .plan_rows import rows_of
from .record import Record
from .units import show_bytes, show_parameters, show_seconds

DeviceKind = Literal["cpu", "cuda"]
TierName = Literal["device", "host", "disk"]
SECONDS_A_DAY = 86400
TIERS: tuple[TierName, ...] = get_args(TierName)


@dataclass(frozen=True)
class Clipping:
    """What a step takes whose gradients are over the job's limit. Updates that began before their norm was known are then redone;
    where most steps are so, none begins before."""

    step_seconds: float  # where they all are: updates wait for the norm
    redone_seconds: float  # where the others are not: of this step, with what the steps after it take longer for it
    share: float  # of steps that are expected to be so

    def __post_init__(self) -> None:
        if not (self.step_seconds > 0 and self.redone_seconds > 0 and 0 <= self.share <= 1):
            raise ValueError(f"{self}: seconds must be positive, and the share lie between 0 and 1")


@dataclass(frozen=True)
class Wear:
    """What steps write to the disk, and what its drive is rated to take."""

    written_bytes: int  # a step
    endurance_bytes: int
    source: str  # of that

    def written_a_day(self, step_seconds: float) -> float:
        return self.written_bytes * SECONDS_A_DAY / step_seconds

    def days(self, step_seconds: float) -> float:
        """Until the drive has taken what it is rated for, where it is new."""
        return self.endurance_bytes / self.written_a_day(step_seconds)


@dataclass(frozen=True)
class Forecast:
    """What a plan is expected to cost. Errors are relative and were measured against real runs."""

    step_seconds: float  # of one that is not clipped
    step_error: float
    split_seconds: Mapping[str, float]  # compute, recompute, update; exposed: communication, offload, disk, update, launch
    peak_bytes: Mapping[TierName, int]
    peak_error: float
    reserved_bytes: int  # of the device: peak, what the allocator adds, and the runtime's own
    reserved_error: float
    samples_per_second: float
    tokens_per_second: float
    compute_share: float  # of the device's best matmul rate
    start_seconds: float = 0.0  # to place a model whose weights are there; 0 where nothing is known of it
    clipping: Clipping | None = None  # None: the job does not clip
    wear: Wear | None = None  # None: nothing lies on the disk

    def __post_init__(self) -> None:
        if not self.step_seconds > 0:
            raise ValueError(f"step_seconds is {self.step_seconds}; it must be positive")

    @property
    def mean_step_seconds(self) -> float:
        """Over clipped steps and others, as many of each as are expected: what plans are compared by."""
        return self.step_seconds if self.clipping is None else self.seconds_with(self.clipping.share)

    @property
    def mean_samples_per_second(self) -> float:
        return self.samples_per_second * self.step_seconds / self.mean_step_seconds

    def seconds_with(self, clipped_share: float) -> float:
        """The mean where such a share of steps is clipped."""
        slower = 0.0 if self.clipping is None else self.clipping.step_seconds - self.step_seconds
        return self.step_seconds + clipped_share * slower

    @property
    def has_slower_steps(self) -> bool:
        """Clipped ones; not where nothing is updated before the norm is known."""
        return self.clipping is not None and self.clipping.step_seconds != self.step_seconds

    @property
    def most_clipped(self) -> float:
        """Share of clipped steps up to which it pays to update before the norm is known: more of them, each redone, take longer
        than if all steps waited. Half, where nobody has forecast them."""
        if self.clipping is None:
            return 0.5
        waits, redone = self.clipping.step_seconds - self.step_seconds, self.clipping.redone_seconds - self.step_seconds
        return min(max(waits / redone, 0.0), 1.0) if redone > 0 else 1.0

    @property
    def needed_bytes(self) -> int:
        """Reserved bytes at the far end of the error band: what must fit."""
        return int(self.reserved_bytes * (1 + self.reserved_error))


@dataclass(frozen=True)
class Decision:
    name: str
    choice: str
    why: str  # the best rejected neighbour and its price


@dataclass(frozen=True)
class Alternative:
    """A neighbour that lost: the same plan with one decision changed."""

    decision: str
    choice: str
    step_seconds: float  # the mean, where some steps are clipped
    device_bytes: int
    fits: bool


@dataclass(frozen=True)
class Fingerprint:
    model: str  # names, shapes and dtypes of the parameters
    machine: str  # kind, number and size of the devices


@dataclass(frozen=True)
class BlockCut:
    """How the ranks of the tensor axis hold a block: its parameters, and the tensors that enter and leave it. What is not named,
    or None, is whole on each of them. The ops inside follow from this: every run solves them anew (layouts/)."""

    parameters: Mapping[str, Cut]  # by name inside the block
    entry: Cut | None = None
    exit: Cut | None = None


@dataclass(frozen=True)
class Stage:
    """A run of blocks that one pipeline rank holds, and what is done with each block's activations. Of several stages, blocks are
    counted by their calls in a forward: one that is called twice is two. Stage s is on place s % n of a pipeline of n."""

    first_block: int
    last_block: int  # inclusive
    activations: Mapping[str, Activations]  # by the block's path in the model; one that is not named keeps them
    compiled: tuple[str, ...] = ()  # paths of blocks that torch.compile makes faster
    replayed: tuple[str, ...] = ()  # paths of kept or recomputed blocks whose ops are launched at once, as CUDA graphs
    cut: Mapping[str, BlockCut] = field(default_factory=dict)  # by path, how the tensor axis holds a block; others are whole
    tables: tuple[str, ...] = ()  # parameters outside of cut blocks, embeddings and heads, whose rows the tensor axis divides

    def __post_init__(self) -> None:
        for path in (*self.compiled, *self.replayed):
            if path in self.cut:
                raise ValueError(f"block {path!r} is cut over the tensor axis, and cut blocks are neither compiled nor replayed")
        for path in self.replayed:
            choice = self.activations.get(path, "keep")
            if choice not in ("keep", "recompute"):
                raise ValueError(f"block {path!r} is replayed, and only those that are kept or recomputed can be, not {choice!r}")
        for path in self.compiled:
            if self.activations.get(path) == "selective":
                raise ValueError(
                    f"block {path!r} is compiled and recomputed in part, and ops inside compiled code cannot be kept one by one; "
                    "recompute all of it, or leave it out of `compiled`"
                )


@dataclass(frozen=True)
class Placement:
    """Where the state of one chunk lies and where it is updated. The ways of an update are

    resident    optimizer on the device, update on the device
    streamed    optimizer on the host, update on the device: low halves and moments cross to it and back
    host        optimizer on the host, update on the host: gradients go down, fresh weights come up
    disk        optimizer on the disk: low halves and moments are read and written around the update, on the host or streamed

    Over several ranks, `optimizer_shards` neighbouring ranks divide the optimizer's state among them, and with it the update and
    the step's gradients; the next so many hold the same. Weights are whole on every rank, or sharded alike and all-gathered for
    each use. Gradients of several micro-batches add up whole on every rank and are reduced once, or sharded, each micro-batch's
    reduced by itself.
    """

    weights: TierName = "device"
    gradients: TierName = "device"  # from backward to the update
    optimizer: TierName = "device"  # low halves of the masters, and moments
    update: Literal["device", "host"] = "device"
    speculates: bool = False  # starts in the last backward, out of place: a second generation of the state waits for the norm
    weight_shards: int = 1  # as many as `optimizer_shards`, or 1
    gradient_shards: int = 1  # likewise
    optimizer_shards: int = 1

    def __post_init__(self) -> None:
        if (self.weight_shards, self.gradient_shards, self.optimizer_shards) != (1, 1, 1):
            self._check_shards()
        for name, tier in (("weights", self.weights), ("gradients", self.gradients)):
            if tier == "disk":
                raise ValueError(
                    f"{name} on the disk: only an optimizer's state can lie there; weights and gradients on the host"
                )
        if self.update == "host" and (self.optimizer == "device" or self.gradients != "host"):
            raise ValueError("an update on the host needs gradients and optimizer on the host, or the optimizer on the disk")
        if self.update == "device" and self.optimizer == "device" and self.weights == "host":
            raise ValueError("an optimizer on the device needs its weights there too")
        if self.speculates and self.optimizer == "device":
            raise ValueError(
                "an optimizer on the device does not speculate: its update is resident, takes milliseconds, and waits"
            )

    def _check_shards(self) -> None:
        shards = self.optimizer_shards
        if shards < 1:
            raise ValueError(f"optimizer_shards is {shards}; it must be at least 1")
        for name in ("weight_shards", "gradient_shards"):
            if getattr(self, name) not in (1, shards):
                raise ValueError(f"{name} is {getattr(self, name)}; it is 1, or as optimizer_shards ({shards})")
        for name, tier in (("weight_shards", self.weights), ("gradient_shards", self.gradients)):
            if tier == "host" and getattr(self, name) != shards:
                raise ValueError(f"{name} is 1 and optimizer_shards {shards}: what lies on the host is sharded alike")

    @property
    def route(self) -> Literal["resident", "streamed", "host", "disk"]:
        if self.optimizer == "disk":
            return "disk"
        if self.update == "host":
            return "host"
        return "resident" if self.optimizer == "device" else "streamed"


@dataclass(frozen=True)
class Plan(Record):
    kind: ClassVar[str] = "plan"
    version: ClassVar[int] = 9

    model: str
    machine: str
    parameters: int
    precision: Literal["bf16", "fp32"]
    batch_size: int
    micro_batch: int
    accumulation: int  # micro-batches a step
    mesh: Mapping[Axis, int]
    stages: tuple[Stage, ...]
    chunk_bytes: int  # model state lies in flat buffers of about this size
    chunks: tuple[Placement, ...]  # one a chunk, in the layout's order; or one for all; none: all on the device
    slots: int  # device buffers through which the weights of chunks on the host pass
    prefetch: int  # chunks that are fetched before they are needed
    limit_bytes: Mapping[TierName, int]
    forecast: Forecast
    decisions: tuple[Decision, ...]
    alternatives: tuple[Alternative, ...]
    fingerprint: Fingerprint | None  # None: made for no model in particular, starts on any
    reduction: Literal["fp32", "bf16"] = (
        "fp32"  # in which gradients are summed over ranks; bf16 where weights are, at half the bytes
    )
    loss: LossRule | None = None  # how losses of micro-batches make that of the batch; None: nobody has looked
    rehearsed: bool = False  # its blocks were recomputed once and found the same, its loss cut and found to add up
    described: str = ""  # the model with its size, and the job, for people
    trainable: int | None = None  # of the parameters; None: an older plan, or one written by hand, that does not say
    device_kind: DeviceKind | None = None  # None: the same
    assumes_host: bool = False  # the host's limit is what a preset has, which nobody confirmed
    picture: Picture | None = None  # of its step, to be drawn; None: an older plan, or one that nobody simulated

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batch <= self.batch_size:
            raise ValueError(f"micro_batch is {self.micro_batch}; it must lie between 1 and batch_size ({self.batch_size})")
        if self.batch_size % self.replicas:
            raise ValueError(f"batch_size is {self.batch_size}; it must be a multiple of the {self.replicas} {self.data_ranks}")
        wanted = -(-self.share // self.micro_batch)
        if self.accumulation != wanted:
            among = f" over {self.replicas} {self.data_ranks}" if self.replicas > 1 else ""
            raise ValueError(
                f"accumulation is {self.accumulation}; batch_size {self.batch_size}{among} in micro-batches of "
                f"{self.micro_batch} makes {wanted}"
            )
        if self.trainable is not None and not 0 <= self.trainable <= self.parameters:
            raise ValueError(f"trainable is {self.trainable}; it must lie between 0 and parameters ({self.parameters})")
        refuse_mesh(self)
        refuse_chunks(self)

    @classmethod
    def from_json(cls, document: object, *, where: str = "") -> Self:
        document = up_to_date(document) if isinstance(document, Mapping) else document
        return super().from_json(document, where=where)

    @property
    def frozen(self) -> int | None:
        """Parameters that are not trained; None where the plan does not say."""
        return None if self.trainable is None else self.parameters - self.trainable

    @property
    def cuts(self) -> bool:
        """Whether a batch is seen in parts, by micro-batches or by ranks."""
        return self.micro_batch < self.batch_size

    @property
    def activations(self) -> dict[str, Activations]:
        """By path of a block, over all stages."""
        return {path: choice for stage in self.stages for path, choice in stage.activations.items()}

    @property
    def compiled(self) -> tuple[str, ...]:
        """Paths of compiled blocks, over all stages."""
        return tuple(path for stage in self.stages for path in stage.compiled)

    @property
    def replayed(self) -> tuple[str, ...]:
        """Paths of replayed blocks, over all stages."""
        return tuple(path for stage in self.stages for path in stage.replayed)

    def without_replayed(self, blocks: Collection[str] | None = None) -> Self:
        """The same with these blocks launched op by op, or all."""
        others = self.replayed if blocks is None else blocks
        stages = (replace(each, replayed=tuple(path for path in each.replayed if path not in others)) for each in self.stages)
        return replace(self, stages=tuple(stages))

    def without_compiled(self, blocks: Collection[str] | None = None) -> Self:
        """The same with these blocks eager, or all."""
        eager = self.compiled if blocks is None else blocks
        stages = (replace(each, compiled=tuple(path for path in each.compiled if path not in eager)) for each in self.stages)
        return replace(self, stages=tuple(stages))

    @property
    def micro_batches(self) -> list[int]:
        """Samples of each micro-batch of a rank's step; only the last may be smaller."""
        whole, rest = divmod(self.share, self.micro_batch)
        return [self.micro_batch] * whole + ([rest] if rest else [])

    @property
    def ranks(self) -> int:
        """Processes, each with a device of its own."""
        return math.prod(self.mesh.values())

    @property
    def replicas(self) -> int:
        """Ranks along the data axis: each sees samples of its own, with those that share its tensor axis."""
        return self.mesh.get("data", 1)

    @property
    def pipeline(self) -> int:
        """Ranks along the pipeline axis: each holds as many of the stages, and those of a replica see the same samples."""
        return self.mesh.get("pipeline", 1)

    @property
    def data_ranks(self) -> str:
        return "ranks" if self.replicas == self.ranks else "ranks of the data axis"

    @property
    def share(self) -> int:
        """Samples of a step that one rank sees."""
        return self.batch_size // self.replicas

    @property
    def cut(self) -> dict[str, BlockCut]:
        """By path of a block, over all stages."""
        return {path: each for stage in self.stages for path, each in stage.cut.items()}

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of parameters whose rows the tensor axis divides, over all stages."""
        return tuple(name for stage in self.stages for name in stage.tables)

    @property
    def fits(self) -> bool:
        """The reserved peak lies within the device's limit even at the far end of its error band."""
        return self.forecast.needed_bytes <= self.limit_bytes["device"]

    def unbound(self) -> Self:
        """The same plan without its fingerprint: starts on another model or machine, at your own risk."""
        return replace(self, fingerprint=None)

    def decision(self, name: str) -> Decision:
        for decision in self.decisions:
            if decision.name == name:
                return decision
        names = [known.name for known in self.decisions]
        raise ValueError(f"the plan has no decision {name!r}; it has: {', '.join(names)}")

    def explained(self, name: str | None) -> dict[str, str]:
        """Why each decision, or the one named, was taken, with every alternative that was weighed."""
        decisions = self.decisions if name is None else (self.decision(name),)
        rows = {}
        for decision in decisions:
            rows[decision.name] = f"{decision.choice}: {decision.why}"
            for other in self.alternatives:
                if other.decision == decision.name:
                    verdict = "" if other.fits else ", does not fit"
                    price = other.step_seconds / self.forecast.mean_step_seconds - 1
                    rows[f"  instead, {other.choice}"] = (
                        f"{show_seconds(other.step_seconds)} a step ({price:+.0%}), {show_bytes(other.device_bytes)}{verdict}"
                    )
        return rows

    def refuse_for_another_job(self, batch_size: int, precision: str, way_out: str) -> None:
        if (self.batch_size, self.precision) != (batch_size, precision):
            asked = f"the job is {batch_size} in {precision}; plan again with {way_out}"
            raise ValueError(f"the plan is for batch_size {self.batch_size} in {self.precision}, {asked}")

    def refuse_unless_made_for(self, model: str, machine: str) -> None:
        """Raises unless both fingerprints are those the plan was made for."""
        if self.fingerprint is None:
            return
        for what, mine, theirs, named in (
            ("model", self.fingerprint.model, model, self.model),
            ("machine", self.fingerprint.machine, machine, self.machine),
        ):
            if mine != theirs:
                raise ValueError(
                    f"this plan was made for another {what} ({named}, fingerprint {mine}; here {theirs}). "
                    f"Plan again with anyfit.plan(job), or start(job, plan.unbound()) to use it as it is"
                )

    @property
    def title(self) -> str:
        return f"{self.described or f'{self.model} ({show_parameters(self.parameters, self.trainable)})'}, {self.precision}"

    def rows(self) -> list[tuple[str, str]]:
        """The plan as labelled lines for people: whether it fits, then its decisions."""
        return rows_of(self)

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)
