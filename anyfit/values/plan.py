"""Plan: every decision about a training run, what it will cost, and why it was taken."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self, get_args

from .loss_rule import LossRule
from .mesh import AXES, Axis
from .older_plans import up_to_date
from .record import Record, nearest
from .units import show_bytes, show_count, show_parameters, show_seconds

TierName = Literal["device", "host", "disk"]
TIERS: tuple[TierName, ...] = get_args(TierName)
# What becomes of what a block's forward leaves for its backward: kept on the device; recomputed; recomputed but for the
# results of products, convolutions and attention; moved to the host and back.
Activations = Literal["keep", "recompute", "selective", "offload"]


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
class Forecast:
    """What a plan is expected to cost. Errors are relative and were measured against real runs."""

    step_seconds: float  # of one that is not clipped
    step_error: float
    split_seconds: Mapping[str, float]  # compute, recompute, update; exposed: communication, offload, update, launch
    peak_bytes: Mapping[TierName, int]
    peak_error: float
    reserved_bytes: int  # of the device: peak, what the allocator adds, and the runtime's own
    reserved_error: float
    samples_per_second: float
    tokens_per_second: float
    compute_share: float  # of the device's best matmul rate
    start_seconds: float = 0.0  # to place a model whose weights are there; 0 where nothing is known of it
    clipping: Clipping | None = None  # None: the job does not clip

    def __post_init__(self) -> None:
        if not self.step_seconds > 0:
            raise ValueError(f"step_seconds is {self.step_seconds}; it must be positive")

    @property
    def mean_step_seconds(self) -> float:
        """Over clipped steps and others, as many of each as are expected: what plans are compared by."""
        return self.step_seconds if self.clipping is None else self.seconds_with(self.clipping.share)

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
class Stage:
    """A run of blocks that one pipeline rank holds, and what is done with each block's activations."""

    first_block: int
    last_block: int  # inclusive
    activations: Mapping[str, Activations]  # by the block's path in the model; one that is not named keeps them
    compiled: tuple[str, ...] = ()  # paths of blocks that torch.compile makes faster
    replayed: tuple[str, ...] = ()  # paths of kept or recomputed blocks whose ops are launched at once, as CUDA graphs

    def __post_init__(self) -> None:
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
    """Where the state of one chunk lies and where it is updated. The three ways of an update are

    resident    optimizer on the device, update on the device
    streamed    optimizer on the host, update on the device: low halves and moments cross to it and back
    host        optimizer on the host, update on the host: gradients go down, fresh weights come up

    Over several ranks, `optimizer_shards` neighbouring ranks divide the optimizer's state among them, and with it the update and
    the step's gradients; the next so many hold the same. Weights are whole on every rank, or sharded alike and all-gathered for
    each use. Gradients of several micro-batches add up whole on every rank and are reduced once, or sharded, each micro-batch's
    reduced by itself.
    """

    weights: TierName = "device"
    gradients: TierName = "device"  # from backward to the update
    optimizer: TierName = "device"  # low halves of the masters, and moments
    update: Literal["device", "host"] = "device"
    speculates: bool = False  # starts during backward, out of place: a second generation of the state waits for the norm
    weight_shards: int = 1  # as many as `optimizer_shards`, or 1
    gradient_shards: int = 1  # likewise
    optimizer_shards: int = 1

    def __post_init__(self) -> None:
        if (self.weight_shards, self.gradient_shards, self.optimizer_shards) != (1, 1, 1):
            self._check_shards()
        tiers = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        for name, tier in tiers.items():
            if tier == "disk":
                raise ValueError(f"{name} on disk: this version places chunks on the device or the host")
        if self.update == "host" and (self.optimizer != "host" or self.gradients != "host"):
            raise ValueError("an update on the host needs gradients and optimizer on the host")
        if self.update == "device" and self.optimizer == "device" and self.weights == "host":
            raise ValueError("an optimizer on the device needs its weights there too")
        if self.speculates and self.optimizer != "host":
            raise ValueError("only an optimizer on the host speculates: an update that is resident takes milliseconds, and waits")

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
    def route(self) -> Literal["resident", "streamed", "host"]:
        if self.update == "host":
            return "host"
        return "resident" if self.optimizer == "device" else "streamed"


@dataclass(frozen=True)
class Plan(Record):
    kind: ClassVar[str] = "plan"
    version: ClassVar[int] = 6

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

    def __post_init__(self) -> None:
        if not 1 <= self.micro_batch <= self.batch_size:
            raise ValueError(f"micro_batch is {self.micro_batch}; it must lie between 1 and batch_size ({self.batch_size})")
        if self.batch_size % self.ranks:
            raise ValueError(f"batch_size is {self.batch_size}; it must be a multiple of the {self.ranks} ranks")
        wanted = -(-self.share // self.micro_batch)
        if self.accumulation != wanted:
            among = f" over {self.ranks} ranks" if self.ranks > 1 else ""
            raise ValueError(
                f"accumulation is {self.accumulation}; batch_size {self.batch_size}{among} in micro-batches of "
                f"{self.micro_batch} makes {wanted}"
            )
        if self.trainable is not None and not 0 <= self.trainable <= self.parameters:
            raise ValueError(f"trainable is {self.trainable}; it must lie between 0 and parameters ({self.parameters})")
        for name, size in self.mesh.items():
            if name not in AXES:
                raise ValueError(f"mesh: unknown axis {name!r}" + nearest(name, AXES))
            if size < 1 or (size > 1 and name != "data"):
                raise ValueError(f"mesh: {name} is {size}; this version shards over the data axis alone; every other is 1")
        for each in set(self.chunks):
            if self.ranks % each.optimizer_shards:
                raise ValueError(f"optimizer_shards is {each.optimizer_shards}; it must divide the {self.ranks} ranks")
        for count, least in (("chunk_bytes", 1), ("slots", 0), ("prefetch", 0)):
            if getattr(self, count) < least:
                raise ValueError(f"{count} is {getattr(self, count)}; it must be at least {least}")
        if self.slots == 0 and any(each.weights == "host" or each.weight_shards > 1 for each in self.chunks):
            raise ValueError(
                "slots is 0; weights on the host, and those that ranks divide, pass through at least one device slot"
            )

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
    def share(self) -> int:
        """Samples of a step that one rank sees."""
        return self.batch_size // self.mesh.get("data", 1)

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
        """The plan as labelled lines for people, decisions first."""
        forecast = self.forecast
        rows = [("model", self.title), ("machine", self.machine)]
        rows += [(decision.name, f"{decision.choice}: {decision.why}") for decision in self.decisions]
        rows += [
            (
                "step",
                f"{show_seconds(forecast.step_seconds)} ± {forecast.step_error:.0%}, "
                f"{show_count(forecast.tokens_per_second)} tokens/s, {forecast.compute_share:.0%} of peak compute",
            ),
            *self._clipped_rows(),
            (
                "of which",
                ", ".join(f"{name} {show_seconds(seconds)}" for name, seconds in forecast.split_seconds.items() if seconds > 0),
            ),
        ]
        for tier in TIERS:
            peak, error = forecast.peak_bytes[tier], forecast.peak_error
            if tier == "device":
                peak, error = forecast.reserved_bytes, forecast.reserved_error
            if peak:
                rows.append((f"{tier} memory", f"{show_bytes(peak)} ± {error:.0%} of {show_bytes(self.limit_bytes[tier])}"))
        if forecast.start_seconds:
            rows.append(("start", f"about {forecast.start_seconds:.0f} s, once, until the first step begins"))
        return rows

    def _clipped_rows(self) -> list[tuple[str, str]]:
        forecast, clipping = self.forecast, self.forecast.clipping
        if clipping is None or not forecast.has_slower_steps:
            return []
        said = f"{show_seconds(clipping.step_seconds)} where every step is"
        if clipping.redone_seconds > forecast.step_seconds:
            said += f", {show_seconds(clipping.redone_seconds)} for one among others that are not"
        return [("clipped step", f"{said}; {show_seconds(forecast.mean_step_seconds)} on average, as many as are expected")]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


@dataclass(frozen=True)
class Change:
    """Something that makes a job fit: it was planned so before it is offered."""

    what: str  # to type
    step_seconds: float


class NoPlan(Exception):  # noqa: N818  (a verdict about the job, not a fault)
    """Nothing fits: says by how much, and what to change."""

    def __init__(
        self, message: str, shortfall_bytes: int, tier: Literal["device", "host"] = "device", changes: tuple[Change, ...] = ()
    ) -> None:
        super().__init__(message, shortfall_bytes, tier, changes)  # all, or it could not come back from another process
        self.shortfall_bytes = shortfall_bytes
        self.tier = tier  # that is too small
        self.changes = changes

    def because(self, restrictions: str) -> NoPlan:
        """The same, with what keeps the planner from making it smaller."""
        if not restrictions:
            return self
        return NoPlan(f"{self.args[0]}; {restrictions}", self.shortfall_bytes, self.tier, self.changes)

    def with_changes(self, changes: tuple[Change, ...]) -> NoPlan:
        return NoPlan(self.args[0], self.shortfall_bytes, self.tier, changes)

    def __str__(self) -> str:
        if not self.changes:
            return str(self.args[0])
        fits = [f"  {change.what}: {show_seconds(change.step_seconds)} a step" for change in self.changes]
        return "\n".join((f"{self.args[0]}. It fits with one of these:", *fits))
