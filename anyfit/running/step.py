"""A step: forward and backward of every micro-batch, and the update from what they add up to."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from anyfit.placing import Placed
from anyfit.placing.gradients import clip_factor
from anyfit.placing.lanes import Task
from anyfit.placing.tiers import LiveBytes, peak_bytes_of_gpu
from anyfit.values.job import Batch, checked_loss
from anyfit.values.loss_rule import MEAN, LossRule
from anyfit.values.nests import named_tensors, shape_of
from anyfit.values.tokens import real_tokens

from .acts import Kind
from .agreement import Agreement
from .divided import as_sum
from .engine import Engine, Phase, Progress
from .rescue import Before
from .shortage import OverLimitError, Shortfall, module_at, shortage
from .team import Peers

WATCHED_STEPS = 2  # of every batch shape: one makes the optimizer's state, one uses it
FEWER_WITHOUT_WEIGHT = (
    "Job(split=) made fewer micro-batches than the plan has, and a mean over them is not known without their weights; return "
    "(sum, weight) from the loss"
)
NO_GRADIENT = "no parameter has a gradient: was the model's requires_grad changed, or p.grad cleared?"


def shapes_of(batch: Batch) -> Any:
    return tuple((name, shape_of(tensor)) for name, tensor in named_tensors(batch))


class Counting:
    """Counts what the first steps of every batch shape hold, and keeps them to the plan's limit."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._peak_bytes = 0
        self._watched: Counter[Any] = Counter()  # steps counted, by the shapes of the batch
        self._is_updating = False  # what is changed in place is not to be broken off
        self._over: OverLimitError | None = None  # met meanwhile

    @contextmanager
    def of(self, batch: Batch) -> Iterator[None]:
        engine, shape = self._engine, shapes_of(batch)
        if engine.device.type != "cpu" or self._watched[shape] >= WATCHED_STEPS:
            yield
            return
        held, limit = engine.placed.device_bytes, engine.plan.limit_bytes["device"]

        def exceeded(live_bytes: int) -> None:
            where = module_at(engine.model, sys._getframe(1))
            error = OverLimitError(engine.plan, Shortfall(where, held + live_bytes, limit))
            if not self._is_updating:
                raise error
            if self._over is None or self._over.shortfall.needed_bytes < held + live_bytes:
                self._over = error

        residency = engine.placed.residency
        with LiveBytes(limit - held, exceeded) as live:
            residency.slots.on_growth, told = live.count, residency.slots.on_growth
            try:
                yield
            finally:
                residency.slots.on_growth = told
        self._watched[shape] += 1
        self._peak_bytes = max(self._peak_bytes, held + live.peak_bytes)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Around the update: what it holds over the limit is reported after it."""
        self._is_updating = True
        try:
            yield
        finally:
            self._is_updating = False

    def pop_over_limit(self) -> OverLimitError | None:
        over, self._over = self._over, None
        return over

    def forget(self) -> None:
        """Another plan holds other bytes."""
        self._watched.clear()

    @property
    def peaks(self) -> Mapping[str, int]:
        """By tier, the most bytes so far."""
        engine = self._engine
        device = peak_bytes_of_gpu(engine.device) if engine.device.type == "cuda" else self._peak_bytes
        return {"device": device, "host": engine.placed.host_bytes, "disk": engine.placed.disk_bytes}


@dataclass(frozen=True, eq=False)
class Open:
    """A loss that the user has, and that waits for its backward."""

    shown: Tensor
    total: Tensor
    weight: Tensor | None
    rows: int
    rule: LossRule  # how losses of micro-batches make that of the batch


@dataclass(frozen=True, eq=False)
class Figures:
    """Of a step that is done, where they were computed."""

    loss: Tensor | None  # None where a loop of the user's own went backward without run.backward
    norm: Tensor
    seconds: float  # since the end of the step before
    tokens: Tensor | float  # without padding, of all ranks; NaN where nobody knows


@dataclass(eq=False)
class Step:
    """The step under way: how many samples went backward, their loss and its weight; and the figures of the one before."""

    _engine: Engine
    _progress: Progress
    _peers: Peers
    _agreement: Agreement
    _counting: Counting
    _scheduler: LRScheduler | None
    _open: list[Open] = field(default_factory=list)
    rows: int = 0  # samples that went backward since the last update
    _weight: Tensor | None = None  # of those samples, where the loss gives weights
    _loss: Tensor | None = None  # of those samples, so far
    _tokens: Tensor | float = 0.0  # of those samples, without padding
    _part: Batch | None = None  # the last micro-batch
    _forwards: list[tuple[int, int]] = field(default_factory=list)  # of the step: from which node of autograd to which
    last: Figures | None = None
    _clock: float = field(default_factory=time.perf_counter)

    @property
    def device(self) -> torch.device:
        return self._engine.device

    @property
    def is_under_way(self) -> bool:
        return bool(self.rows or self._open or self._forwards)

    # ------------------------------------------------------------------ whole

    def check_rows(self, batch: Batch) -> None:
        """Raises where a batch is not as large as it is to be, or another step is under way."""
        engine, share = self._engine, self._engine.plan.share
        rows = engine.job.rows(batch, share)
        if rows is not None and rows != share:
            among = f" over {engine.ranks.replicas} ranks makes {share} for each" if engine.ranks.replicas > 1 else ""
            raise ValueError(
                f"the batch has {rows} samples, and Job(batch_size={engine.job.batch_size}){among}; "
                "drop an incomplete last batch (run.loader does), or pad it and return (sum, weight) from the loss"
            )
        if self.rows:
            raise RuntimeError(f"{self.rows} samples wait for run.update(); call it before run.step")

    def attempt(self, batch: Batch) -> Tensor:
        """All of it; the mean loss. An error leaves the state of the last completed step."""
        engine, tokens = self._engine, real_tokens(batch)
        with self._counting.of(batch):
            try:
                with self._peers.telling():
                    engine.begin()
                    self._loss = self._forward_backward(engine.job.cut(batch, engine.plan.micro_batches))
                    self._tokens = tokens
                    loss = self.update().loss
                    assert loss is not None
            except BaseException as error:
                if isinstance(error, torch.OutOfMemoryError):
                    needed = torch.cuda.memory_allocated(engine.device)
                    error.add_note(shortage(engine.plan, needed, module_at(engine.model, error.__traceback__)))
                self.abandon()
                raise
        return loss

    def _forward_backward(self, parts: Sequence[Batch]) -> Tensor:
        engine, losses = self._engine, list[Tensor]()
        sizes = engine.plan.micro_batches[: len(parts)]  # `Job(split=)` may make fewer
        for part, rows in zip(parts, sizes, strict=True):
            self._progress.enter(Phase.FORWARD)
            self._part = part
            with engine.placed.watching():
                total, weight = engine.evaluate(part)
            if weight is None and len(parts) < len(engine.plan.micro_batches):
                raise ValueError(FEWER_WITHOUT_WEIGHT)
            alone, is_last = len(parts) == 1, part is parts[-1]
            losses.append(self._backward(total, weight, rows, engine.plan.loss or MEAN, alone=alone, is_last=is_last))
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _backward(self, total: Tensor, weight: Tensor | None, rows: int, rule: LossRule, *, alone: bool, is_last: bool) -> Tensor:
        """Backward of one micro-batch; its part of the loss."""
        engine = self._engine
        total = self._share_of(total, weight, rows, rule, alone=alone)
        self.rows += rows
        self._progress.enter(Phase.BACKWARD)
        gradients = engine.placed.gradients
        gradients.begin_backward(total, is_last=is_last)
        if is_last:
            engine.placed.updates.begin_last_backward(None if self._peers.is_mute else self._weight)
        # The user's own checkpoints run forwards in backward, whose saved weights are to be replaced too.
        with engine.placed.lanes.computing(Task.BACKWARD), engine.placed.residency.watching():
            total.backward()
            gradients.end_backward()
        return total.detach()

    def _share_of(self, total: Tensor, weight: Tensor | None, rows: int, rule: LossRule, *, alone: bool) -> Tensor:
        """A micro-batch's part of the loss. Parts add up to the batch's mean; over several weighted micro-batches or ranks to its
        sum: their weight is known when all are through, and the update divides by it."""
        engine, count = self._engine, self._engine.job.batch_size
        are_several = engine.ranks.are_several
        is_cut = not alone or are_several
        if is_cut and weight is None and rule.kind == "divided":
            total, weight = as_sum(total, rule, rows / count)
        if weight is not None and alone and not are_several:
            total = total / weight
        elif weight is not None:
            self._weight = weight if self._weight is None else self._weight + weight
        elif is_cut and rule.kind != "sum":
            total = total / (count // rows) if count % rows == 0 else total * (rows / count)
        return total

    # ------------------------------------------------------------------ in parts, for a loop of the user's own

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward whose loss is to come; the first of a step begins it."""
        if not torch.is_grad_enabled():
            with self._engine.placed.watching():
                yield
            return
        if not self.is_under_way:
            self._peers.begin(Kind.STEP, self._progress.steps + 1)
            self._engine.begin()
        first = _node_number()
        with self._peers.telling(), self._engine.placed.watching():
            yield
        self._forwards.append((first, _node_number()))

    def loss(self, batch: Batch) -> Tensor:
        engine = self._engine
        with self.forward():
            batch = self._peers.one_batch(batch, engine, self._progress, engine.plan.micro_batch)
            total, weight = engine.evaluate(batch)
        self._part = batch
        shown = total if weight is None else total / weight
        if torch.is_grad_enabled():
            rows = engine.job.rows(batch, engine.plan.micro_batch) or engine.plan.micro_batch
            self._open.append(Open(shown, total, weight, rows, engine.plan.loss or MEAN))
            self._tokens = self._tokens + real_tokens(batch)
        return shown

    def accept(self, loss: Tensor, samples: int, weight: Tensor | float | None) -> None:
        """Takes a loss of the user's own making as if `loss` had returned it: a mean over samples, or a sum and its weight."""
        plan = self._engine.plan
        total, weight = checked_loss(loss if weight is None else (loss, weight), "run.accept takes")
        if not total.requires_grad:
            raise ValueError("the loss needs no gradients: make it, and call run.accept, outside torch.no_grad()")
        if not isinstance(samples, int) or isinstance(samples, bool) or not 1 <= samples <= plan.share:
            raise ValueError(f"run.accept(samples={samples!r}): the samples that the loss is of, 1 to {plan.share}, make a step")
        if any(each.shown is loss for each in self._open):
            raise ValueError("this loss has been accepted; follow with run.backward(loss)")
        if plan.loss is not None and not plan.loss.may_be_cut and samples != plan.share:
            raise ValueError(
                f"run.accept(samples={samples}) of {plan.share}: the batch is not cut ({plan.loss.why}); {plan.loss.ways_out}"
            )
        self._refuse_of_another_forward(loss)
        self._open.append(Open(loss, total, weight, samples, MEAN))
        self._tokens = math.nan

    def _refuse_of_another_forward(self, loss: Tensor) -> None:
        """Raises unless the loss is made of the run's model, inside of `forward`, in this step."""
        used = _first_use(loss, {id(each) for each in self._engine.model.parameters()})
        if used is None:
            raise ValueError("run.accept takes a loss that is made of run.model, and none of its parameters is in this one")
        if not any(first < used < last for first, last in self._forwards):
            raise ValueError(
                "the loss was not made inside of run.forward(), in this step; with run.forward() as model: loss = ..., then "
                "run.accept(loss, samples=...)"
            )

    def backward(self, loss: Tensor) -> None:
        share = self._engine.plan.share
        index = next((index for index, each in enumerate(self._open) if each.shown is loss), None)
        if index is None:
            raise ValueError(
                "run.backward takes a loss that run.loss returned, or run.accept took, once; scale it inside Job(loss=), or "
                "before run.accept"
            )
        found = self._open.pop(index)
        if self.rows + found.rows > share:
            raise ValueError(f"{self.rows + found.rows} samples since the last run.update(), and {share} make a step")
        with self._peers.telling():
            is_last, alone = self.rows + found.rows == share, found.rows == share
            part = self._backward(found.total, found.weight, found.rows, found.rule, alone=alone, is_last=is_last)
        self._loss = part if self._loss is None else self._loss + part

    # ------------------------------------------------------------------ the update

    def update(self) -> Figures:
        engine, placed = self._engine, self._engine.placed
        if self.rows != engine.plan.share and engine.job.split is None:
            raise ValueError(
                f"run.update() after {self.rows} of {engine.plan.share} samples: run.backward every micro-batch first"
            )
        self._progress.enter(Phase.UPDATE)
        loss, tokens = self._loss, self._tokens
        if engine.ranks.are_several:
            with placed.lanes.computing(Task.NORM):
                loss, norm, tokens, scale = self._agreement.reach(self._loss, self._weight, tokens, self.rows)
        else:
            if self._loss is not None and self._weight is not None:
                loss = self._loss / self._weight
            norm, scale = self._norm()
        self._apply(norm, scale)
        placed.residency.end()
        self.abandon()
        self._progress.steps += 1
        if engine.timeline is not None:
            engine.timeline.end_step()
        now = time.perf_counter()
        self.last, self._clock = Figures(loss, norm, now - self._clock, tokens), now
        return self.last

    def _norm(self) -> tuple[Tensor, float]:
        """On a rank alone: the norm of the gradients, and what they still are to be scaled by."""
        placed = self._engine.placed
        with placed.lanes.computing(Task.NORM):
            norms = placed.gradients.finish()
            if not norms.parts:
                raise RuntimeError(NO_GRADIENT)
            total = norms.together(placed.device)
            shrinks = None if self._weight is None else 1.0 / self._weight  # sums to means, in the update itself
            if shrinks is not None:
                total = total * shrinks
            known = placed.lanes.reading(total if shrinks is None else torch.stack([total, shrinks]))
        placed.updates.begin(total, self._engine.job.clip_norm, shrinks)
        norm = known()  # what the host decides by: the one wait of a step
        return (norm, 1.0) if shrinks is None else (norm[0], float(norm[1]))

    def _apply(self, norm: Tensor, scale: float) -> None:
        updates, clip_norm = self._engine.placed.updates, self._engine.job.clip_norm
        size = float(norm)
        if not math.isfinite(size):
            updates.leave_out()
            part = self._part
            if part is not None:
                refuse_unwatched(self._engine.placed, lambda: self._engine.evaluate(part)[0])
            self._progress.skipped += 1
            return
        clipping = 1.0
        if clip_norm is not None and size > 0.999 * clip_norm:  # else clipping is by 1 exactly
            clipping = float(clip_factor(norm, clip_norm))
        factor = scale * clipping
        self._progress.updates += 1
        self._progress.clipped += clipping != 1.0
        with self._counting.updating():
            updates.apply(None if factor == 1.0 else factor)
        if self._scheduler is not None:
            self._scheduler.step()

    def abandon(self) -> None:
        placed = self._engine.placed
        placed.residency.forget()
        placed.updates.forget()
        placed.gradients.clear()
        self._open.clear()
        self._forwards.clear()
        self.rows, self._tokens, self._weight, self._part, self._loss = 0, 0.0, None, None, None


def _node_number() -> int:
    """Of the next node that autograd makes on this thread."""
    node: Any = torch.zeros((), requires_grad=True).clone().grad_fn
    number: int = node._sequence_nr()
    return number


def _first_use(loss: Tensor, parameters: set[int]) -> int | None:
    """The number of a node that reads one of these, by identity; None where the loss is made of none."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while nodes:
        node = nodes.pop()
        for reads, _ in node.next_functions:
            if id(getattr(reads, "variable", None)) in parameters:
                return int(node._sequence_nr())
            if reads is not None and reads not in seen:
                seen.add(reads)
                nodes.append(reads)
    return None


def refuse_unwatched(placed: Placed, loss: Callable[[], Tensor]) -> None:
    """Raises where the loss is NaN because code that torch does not report, such as a scripted function or a C++ extension, reads
    weights that are away: these hold NaN. So the forward is repeated with numbers in their place; the error names the weight."""
    names = [slot.name for each in placed.state.chunks if each.index in placed.residency.watched for slot in each.chunk.slots]
    if not names or placed.ranks.are_several:
        return
    before = Before(placed.model, loss, placed.device)
    before.note_all()

    def is_number(without: list[str]) -> bool:
        placed.residency.part_all()
        placed.state.absent.mark(without)
        before.restore()
        with placed.watching():
            return bool(loss().isfinite())

    try:
        if is_number(names) or not is_number([]):
            return
        while len(names) > 1:
            half = names[: len(names) // 2]
            names = names[len(half) :] if is_number(half) else half
    finally:
        placed.state.absent.mark(placed.state.parameters)
        before.restore()
    raise RuntimeError(
        f"{names[0]} is read by code that torch does not tell of (a scripted or traced function, torch.func, a C++ extension) "
        "while its weights are away, as this plan has them; call such code with a clone() of it, or use a plan with all state on "
        "the device"
    )
