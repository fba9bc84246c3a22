"""Run: a placed model at work. `step` is the whole of training; `loss`, `backward` and `update` are its parts.

With several ranks, steps, evaluations, saves and whatever else reads weights are acts (team.py): all ranks make them together.
"""

from __future__ import annotations

import atexit
import functools
import gc
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anyfit.placing import Placed, place
from anyfit.placing.chunks import Carried
from anyfit.placing.gradients import clip_factor, total_norm
from anyfit.placing.ranks import HANG_SECONDS
from anyfit.placing.reduction import Reduction
from anyfit.placing.tiers import LiveBytes, peak_bytes_of_gpu
from anyfit.placing.timeline import Timeline
from anyfit.values.batches import named_tensors, shape_of
from anyfit.values.job import Batch, Job
from anyfit.values.loss_rule import MEAN
from anyfit.values.plan import NoPlan, Plan
from anyfit.values.units import show_bytes

from . import alike, checkpoint, former, loading
from .acts import Act, Kind, Position
from .export import facts_of
from .extra_state import ExtraState
from .holding import hold
from .holding import let_go as let_go_of
from .launch import Launch, seed_of
from .loader import Loader, Sized, Stood
from .metrics import Metrics
from .rehearsal import Rehearsal
from .rescue import MOST_RESCUES, Before, Rescue, let_go, said_of_device, said_of_host
from .saving import Copies, Saving
from .settings import Settings
from .shortage import OverLimitError, Shortfall, is_about_memory, module_at, shortage, shortfall_of
from .team import Team
from .unwatched import refuse_unwatched
from .watch import HostWatch
from .weighing import as_sum

NO_GRADIENT = "no parameter has a gradient: was the model's requires_grad changed, or p.grad cleared?"
WATCHED_STEPS = 2  # on the CPU device the storages of the first steps are counted: one makes the optimizer's state, one uses it


class Run:
    """Trains a job as its plan says. Made by `anyfit.start`.

    for batch in run.loader(dataset):
        loss = run.step(batch)
    run.save("checkpoints/1000")
    """

    def __init__(
        self,
        job: Job,
        plan: Plan,
        placed: Placed,
        rescue: Rescue | None = None,
        watch: HostWatch | None = None,
        team: Team | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self.job = job
        self.plan = plan
        self.launch: Launch | None = None  # set by `anyfit fit`
        self.timeline: Timeline | None = None  # set by `record`
        self.model: nn.Module = placed.model
        self.optimizer: Optimizer = placed.updates.optimizer
        self.scheduler: LRScheduler | None = _scheduler(job, self.optimizer)
        self._settings = Settings(job, self.model, self.optimizer, self.scheduler)
        self._extra = ExtraState(self.model, self.optimizer, job.loss)
        self.steps = 0  # done, skipped ones included
        self.skipped = 0
        self.rescues = 0  # times that memory ended and the run was planned anew
        self.signal = 0  # that some rank was sent, as all know after the step
        self._placed, self.ranks = placed, placed.ranks
        if team is None and self.ranks.are_several:
            team = Team(HANG_SECONDS, ends_process=False)
        self.team = team
        self._rescue, self._watch, self._rehearsal = rescue, watch, rehearsal
        self._before = None if rescue is None else Before(self.model, job.loss, placed.device, self._extra)
        self._loader: Loader | None = None
        self._stood = Stood()  # in the data, to be taken up from a checkpoint
        self._open: list[tuple[Tensor, Tensor, Tensor | None, int]] = []  # losses handed out: shown, total, weight, rows
        self._rows = 0  # samples that went backward since the last update
        self._part: Batch | None = None  # the last micro-batch of the step under way
        self._weight: Tensor | None = None  # of those samples, where the loss gives weights
        self._last: dict[str, Any] = {}
        self._peak_bytes = 0
        self._watched: dict[Any, int] = {}  # steps counted, by the shapes of the batch
        self._tried: dict[Any, int] = {}  # and made, with the plan at hand
        self._is_updating = False  # what is changed in place is not to be broken off
        self._over: OverLimitError | None = None  # met meanwhile
        self.saving: Saving | None = None  # the checkpoint that is being written, or the last one
        self._copies: Copies | None = None  # of the state, that it is written from
        self._layout = checkpoint.Layout()  # of the files that it is written to
        self._facts: dict[str, Any] | None = None  # of the model, for whoever reads these
        self._save_failed = False  # on some rank, as all know after the step
        self._lacking: list[float] = []  # by rank, host bytes that are left, where they are too few
        self._clock = time.perf_counter()
        self._closed = False
        self._is_mute = False  # takes part in a step of the others, with nothing of its own
        self._doing = "before its first step"
        if team is not None:
            team.agree(alike.facts_of_schedule(self.scheduler))
            mine = weakref.ref(self)
            team.acts.look = lambda: _position(mine())
            # A rank that ends without run.close() may still be needed by the others, and so its run is kept until then.
            self._at_exit = functools.partial(_close, self)
            atexit.register(self._at_exit)
        self._hold = hold(self.model)
        if placed.device.type == "cuda":
            # What is there now stays: to look through all of it for garbage would stop every lane for a fifth of a second.
            gc.collect()
            gc.freeze()

    # ------------------------------------------------------------------ training

    def step(self, batch: Batch) -> Tensor:
        """One update from one batch of `batch_size` samples; the mean loss, detached. Waits for the device once, for the norm.

        An error on the way (in your model, your data) leaves the state of the last completed step. Where memory ends and the plan
        came from the planner, the run is planned anew and the step made again.
        """
        self._check_open()
        rows = self.job.rows(batch, self.plan.share)
        if rows is not None and rows != self.plan.share:
            among = f" over {self.ranks.count} ranks makes {self.plan.share} for each" if self.ranks.are_several else ""
            raise ValueError(
                f"the batch has {rows} samples, and Job(batch_size={self.job.batch_size}){among}; "
                "drop an incomplete last batch (run.loader does), or pad it and return (sum, weight) from the loss"
            )
        if self._rows:
            raise RuntimeError(f"{self._rows} samples wait for run.update(); call it before run.step")
        self._act(Act(Kind.STEP, str(self.steps + 1)))
        self._heed_saving()
        self._heed_host_memory()
        loss = self._attempt(batch) if self._rescue is None else self._attempt_until_it_fits(batch, self._rescue)
        self._last["loss"] = loss
        self._heed_update()
        self._doing = f"after step {self.steps}"
        if self.launch is not None:
            self.launch.after_step(self)
        return loss

    def _attempt(self, batch: Batch) -> Tensor:
        with self._counting(batch):
            try:
                with self._telling():
                    self._begin()
                    loss = self._forward_backward(self.job.cut(batch, self.micro_batches))
                    if self.ranks.are_several:
                        self._last["loss_so_far"] = loss
                    self.update()
            except BaseException as error:
                if isinstance(error, torch.OutOfMemoryError):
                    needed = torch.cuda.memory_allocated(self._placed.device)
                    error.add_note(shortage(self.plan, needed, module_at(self.model, error.__traceback__)))
                self._abandon()
                raise
        return self._last["loss"] if self.ranks.are_several else loss

    def _forward_backward(self, parts: Sequence[Batch]) -> Tensor:
        losses: list[Tensor] = []
        for part, rows in zip(parts, self.micro_batches, strict=True):
            self._doing = f"in the forward of step {self.steps + 1}"
            self._part = part
            with self._placed.watching():
                total, weight = self.job.evaluate(self.model, self._prepared(part))
            losses.append(self._backward(total, weight, rows, alone=len(parts) == 1))
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        return loss if self._weight is None or self.ranks.are_several else loss / self._weight

    def _backward(self, total: Tensor, weight: Tensor | None, rows: int, *, alone: bool) -> Tensor:
        """Backward of one micro-batch; its part of the loss. The parts add up to the batch's mean, or, over several weighted
        micro-batches, to its sum: their weight is known only when all are through, and the update divides by it. So it is with
        several ranks."""
        count, ranks = self.job.batch_size, self.ranks
        is_cut, rule = not alone or ranks.are_several, self.plan.loss or MEAN
        if is_cut and weight is None and rule.kind == "divided":
            total, weight = as_sum(total, rule, rows / count)
        if weight is not None and alone and not ranks.are_several:
            total = total / weight
        elif weight is not None:
            self._weight = weight if self._weight is None else self._weight + weight
        elif is_cut and rule.kind != "sum":
            total = total / (count // rows) if count % rows == 0 else total * (rows / count)
        self._rows += rows
        self._doing = f"in the backward of step {self.steps + 1}"
        gradients = self._placed.gradients
        if isinstance(gradients, Reduction):
            gradients.last, gradients.is_weighted = self._rows == self.plan.share, weight is not None
        # The user's own checkpoints run forwards in backward, whose saved weights are to be replaced too.
        with self._placed.lanes.computing("backward"), self._placed.residency.watching():
            total.backward()
            if isinstance(gradients, Reduction):
                gradients.end_backward()
        return total.detach()

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of one micro-batch, for a loop of your own: follow with `run.backward(loss)`."""
        self._check_open()
        if torch.is_grad_enabled() and not self._open and not self._rows:
            self._act(Act(Kind.STEP, str(self.steps + 1)))
            self._begin()
        with self._telling() if torch.is_grad_enabled() else nullcontext(), self._placed.watching():
            total, weight = self.job.evaluate(self.model, self._prepared(batch))
        self._part = batch
        shown = total if weight is None else total / weight
        rows = self.job.rows(batch, self.plan.micro_batch) or self.plan.micro_batch
        if torch.is_grad_enabled():
            self._open.append((shown, total, weight, rows))
        return shown

    def backward(self, loss: Tensor) -> None:
        """Backward of a loss that `run.loss` returned."""
        for index, (shown, total, weight, rows) in enumerate(self._open):
            if shown is loss:
                del self._open[index]
                if self._rows + rows > self.plan.share:
                    raise ValueError(
                        f"{self._rows + rows} samples since the last run.update(), and {self.plan.share} make a step"
                    )
                with self._telling():
                    part = self._backward(total, weight, rows, alone=rows == self.plan.share)
                before = self._last.get("loss_so_far")
                self._last["loss_so_far"] = part if before is None else before + part
                return
        raise ValueError("run.backward takes a loss that run.loss returned, once; scale it inside Job(loss=)")

    def update(self) -> None:
        """Clips, updates and steps the scheduler; leaves the step out where a gradient is not finite."""
        self._check_open()
        if self._rows != self.plan.share and self.job.split is None:
            raise ValueError(
                f"run.update() after {self._rows} of {self.plan.share} samples: run.backward every micro-batch first"
            )
        placed, scale = self._placed, 1.0
        self._doing = f"in the update of step {self.steps + 1}"
        updates, gradients = placed.updates, placed.gradients
        if isinstance(gradients, Reduction):
            with placed.lanes.computing("norm"):
                norm, scale = self._agree(gradients)
        else:
            with placed.lanes.computing("norm"):
                norms = gradients.finish()
                if not norms:
                    raise RuntimeError(NO_GRADIENT)
                total = total_norm(norms, placed.device)
                shrinks = None if self._weight is None else 1.0 / self._weight  # sums to means, in the update itself
                if shrinks is not None:
                    total = total * shrinks
                known = placed.lanes.reading(total if shrinks is None else torch.stack([total, shrinks]))
            updates.begin(total, self.job.clip_norm, shrinks)
            norm = known()  # what the host decides by: the one wait of a step
            if shrinks is not None:
                norm, scale = norm[0], float(norm[1])
        if bool(torch.isfinite(norm)):
            factor = scale if self.job.clip_norm is None else scale * float(clip_factor(norm, self.job.clip_norm))
            self._is_updating = True
            try:
                updates.apply(None if factor == 1.0 else factor)
            finally:
                self._is_updating = False
            if self.scheduler is not None:
                self.scheduler.step()
        else:
            updates.leave_out()
            self._refuse_unwatched()
            self.skipped += 1
        loss = self._last.pop("loss_so_far", None)
        if loss is not None:
            self._last["loss"] = loss if self._weight is None or self.ranks.are_several else loss / self._weight
        placed.residency.end()
        self._abandon()
        self.steps += 1
        if self.timeline is not None:
            self.timeline.end_step()
        now = time.perf_counter()
        self._last["norm"], self._last["seconds"], self._clock = norm, now - self._clock, now

    def _refuse_unwatched(self) -> None:
        """A step that is left out is the model's own doing, or an error."""
        part = self._part
        if part is not None:
            refuse_unwatched(self._placed, lambda: self.job.evaluate(self.model, self._prepared(part))[0])

    def _agree(self, gradients: Reduction) -> tuple[Tensor, float]:
        """With all ranks: the norm of the gradients, and what they still are to be scaled by. In one exchange, which also carries
        the loss, and tells ranks that went different ways."""
        device, ranks = self._placed.device, self.ranks
        nothing = torch.zeros((), device=device)
        loss = self._last.get("loss_so_far", nothing)
        weight = nothing if self._weight is None else self._weight
        if self._is_mute:
            gradients.count_out()
            loss = weight = nothing
        missing = gradients.missing()
        known = [float(ranks.asked()), len(missing), 0 if self._is_mute else self._rows, self._asked(), self._lacks_host_bytes()]
        known.append(self.saving is not None and self.saving.has_failed)
        data = alike.data_of(self._loader, self._weight is not None)
        known += [alike.number_of_settings(self.optimizer), alike.NOWHERE if self._is_mute else alike.number_of(data)]
        figures = [each.detach().to(device, torch.float64).reshape(1) for each in (gradients.finish(), weight, loss)]
        lanes = self._placed.lanes
        rows = lanes.reading(ranks.of_all(torch.cat([*figures, lanes.send(torch.tensor(known, dtype=torch.float64))])))()
        squares, weights, losses, asked, missed, samples, signals, lacks, unsaved, settings, places = rows.unbind(1)
        self.signal, self._lacking, self._save_failed = int(signals.max()), lacks.tolist(), bool(unsaved.any())
        if len(asked.unique()) > 1:
            different = [index for index, number in enumerate(asked.tolist()) if number != asked[0]]
            raise RuntimeError(
                f"rank {different[0]} used other weights in this step than rank 0, or in another order: with weights that are "
                "divided over ranks every rank has to call the same modules; use a plan with weight_shards 1"
            )
        if len(settings.unique()) > 1:
            self._refuse_different(alike.settings_of(self.optimizer), list(range(ranks.count)))
        if len(places[places != alike.NOWHERE].unique()) > 1:
            self._refuse_different(data, [rank for rank, place in enumerate(places.tolist()) if place != alike.NOWHERE])
        if bool(missed.any()):
            wanted = set().union(*({*self._placed.state.parameters} - set(each) for each in ranks.objects(missing)))
            gradients.count_in(sorted(wanted))
        scale = 1.0
        if self._weight is not None:
            whole = float(weights.sum())
            scale = 1.0 / whole if whole else math.nan  # a batch without weight is left out, as on a rank alone
        elif float(samples.sum()) != self.job.batch_size:
            scale = self.job.batch_size / float(samples.sum())
        self._last["loss_so_far"] = (losses.sum() * scale).to(torch.float32)
        return (squares.sum().sqrt() * scale).to(torch.float32), scale

    def _refuse_different(self, facts: Mapping[str, str], who: list[int]) -> None:
        """All ranks know that some of these may differ: a list and a tuple of the same do not."""
        everybody = self.ranks.objects(facts)
        if all(everybody[rank] == everybody[who[0]] for rank in who):
            return
        raise ValueError(
            f"{alike.difference([everybody[rank] for rank in who], who)}, in step {self.steps + 1}: their weights would part. Do "
            "the same to the optimizer, the schedule and the loader on every rank"
        )

    def _prepared(self, batch: Batch) -> Batch:
        return self.job.prepare(batch, self._placed.device, self._placed.lanes.send)

    def _begin(self) -> None:
        if self.timeline is not None:
            self.timeline.begin_step()
        self._placed.begin()

    def _abandon(self) -> None:
        """Forgets the gradients of the step under way."""
        self._placed.residency.forget()
        self._placed.updates.forget()
        self._placed.gradients.clear()
        self._open.clear()
        self._rows, self._weight, self._part = 0, None, None
        self._last.pop("loss_so_far", None)

    @property
    def micro_batches(self) -> list[int]:
        """Samples of each micro-batch of a step; only the last may be smaller."""
        whole, rest = divmod(self.plan.share, self.plan.micro_batch)
        return [self.plan.micro_batch] * whole + ([rest] if rest else [])

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss of a batch of any size in evaluation mode; nothing is learnt from it. Over several ranks, of all of their
        batches together."""
        self._check_open()
        self._act(Act(Kind.EVALUATE))
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with self._telling():
                total, weight = self.job.evaluate(self.model, self._prepared(batch))
        finally:
            for module, training in modes:
                module.training = training
        if not self.ranks.are_several:
            return total if weight is None else total / weight
        if weight is None:
            rows = self.job.rows(batch) or 1  # where only the user's `split` knows, batches count alike
            total, weight = total * rows, torch.as_tensor(float(rows))
        mine = torch.stack([total.double(), weight.to(total.device).double()])
        sums = self.ranks.of_all(mine if not self._is_mute else torch.zeros_like(mine)).sum(0)
        return (sums[0] / sums[1]).to(total.dtype)

    def loader(self, dataset: Sized, *, epochs: int = 1, shuffle: bool = True, **options: Any) -> Loader:
        """Batches of the dataset in an order that depends on the seed alone; resumes where a checkpoint stood.

        `options` are torch's DataLoader's: collate_fn, num_workers, …
        """
        if self._loader is not None:
            raise RuntimeError("this run has a loader; one data order a run can be resumed")
        self._loader = Loader(dataset, self.job.batch_size, self.job.seed, epochs, shuffle, self.ranks, **options)
        self._stood.refuse_other_order(self._loader)
        self._loader.position = self._stood.position
        return self._loader

    # ------------------------------------------------------------------ when memory ends

    def _attempt_until_it_fits(self, batch: Batch, rescue: Rescue) -> Tensor:
        before = self._before
        assert before is not None
        shape = _shapes_of(batch)
        for rescues in range(MOST_RESCUES + 1):
            note = before.note if self._tried.get(shape, 0) >= WATCHED_STEPS else before.note_all
            note()
            try:
                if self._rehearse(rescue):
                    note()  # with each plan something else stands in for a block's forward
                loss = self._attempt(batch)
                before.forget()
                self._tried[shape] = self._tried.get(shape, 0) + 1
                return loss
            except (MemoryError, RuntimeError) as error:
                if not is_about_memory(error):
                    raise
                failed = error
            short = shortfall_of(failed, self.plan, self.model, self._placed.device, rescue.context_bytes)
            let_go(failed)
            before.restore()
            try:
                lost = before.lost()
                if lost is not None:
                    failed.add_note(f"the step is not made again with another plan: {lost}")
                    raise failed
                self._make_room_on_device(short, rescue, rescues, failed)
            finally:
                del failed  # whose frames know this one
        raise AssertionError("the last attempt gives a loss or an error")

    def _make_room_on_device(self, short: Shortfall, rescue: Rescue, rescues: int, failed: BaseException) -> None:
        """Another plan, after so many for the same step, with the state where that wants it; or the error."""
        if rescues == MOST_RESCUES:
            failed.add_note(f"the step was planned anew {MOST_RESCUES} times, and more was needed each time")
            raise failed
        try:
            plan = rescue.with_less_device(self.plan, short, rescues)
        except NoPlan as verdict:
            failed.add_note(f"planned anew with room for that, nothing fits: {verdict}")
            raise failed from None
        before = self.plan
        try:
            self._move(plan)
        except MemoryError as error:
            failed.add_note(f"the plan that would have had room for it could not be placed: {error}")
            raise failed from None
        self._say(said_of_device(self.steps, short, before, plan))

    def _heed_update(self) -> None:
        """An update that held more than it may has been made: whether it counts is no question, but the next is to hold less."""
        over, self._over = self._over, None
        if over is None:
            return
        if self._rescue is None:
            raise over
        self._make_room_on_device(over.shortfall, self._rescue, 0, over)

    def _heed_host_memory(self) -> None:
        if self.ranks.are_several:
            return self._heed_host_memory_of_all()
        left = None if self._watch is None else self._watch.shortage()
        if self._watch is None or left is None:
            return None
        before = self.plan
        try:
            if self._rescue is None:
                raise NoPlan("the plan was given, and is not changed", 0)
            plan = self._rescue.with_less_host(before, int(2 * self._watch.floor_bytes - left))
            self._move(plan)
        except (NoPlan, MemoryError) as why:
            raise self._no_host_memory(left, why) from None
        return self._say(said_of_host(self.steps, left, before, plan))

    def _heed_host_memory_of_all(self) -> None:
        """Ranks hear of each other's want after a step, and end together."""
        lacking = [rank for rank, lack in enumerate(self._lacking) if lack]
        if lacking:
            raise self._no_host_memory(
                self._lacking[lacking[0]], f"on rank {lacking[0]}; a plan for several ranks is not changed"
            )

    def _lacks_host_bytes(self) -> float:
        """What is left of host memory, where that is too little; else 0."""
        left = None if self._watch is None else self._watch.shortage()
        return 0.0 if left is None else max(left, 1.0)

    def _no_host_memory(self, left: float, why: object) -> MemoryError:
        saved = "run.save keeps its state"
        if self.launch is not None:
            saved = f"saved in {self.launch.save(self)}"
        return MemoryError(
            f"{show_bytes(left)} of host memory are left after step {self.steps}, and the kernel ends a process that has none "
            f"({why}). The run stands as it was, {saved}. What helps: fewer workers of the data loader, other processes that "
            "end, or a plan with less on the host (host_memory=)"
        )

    def _rehearse(self, rescue: Rescue) -> bool:
        """Tries a plan that is new. One that changes the result gives way to another: then the model is placed anew."""
        if self._rehearsal is None or self.plan.rehearsed:
            return False
        moves = self.rescues
        findings = self._rehearsal.of(self.plan, self._placed)
        while findings.against(self.plan) is not None:
            self._move(rescue.restricted(self.plan, findings))
            findings = self._rehearsal.of(self.plan, self._placed)
        self.plan = replace(self.plan, loss=findings.loss if self.plan.cuts else self.plan.loss, rehearsed=True)
        if self.launch is not None:
            self.launch.replanned(self)
        return self.rescues > moves

    def _move(self, plan: Plan) -> None:
        """Places the model anew, as this plan says; as it was, where that cannot be done."""
        if self.saving is not None:
            self.saving.wait()
        if self._copies is not None:
            self._copies.close()
        self._copies = None
        if self._before is not None:
            self._before.let_go()
        carried, device, delay = self._placed.lift(), self._placed.device, self._placed.delay
        on_gpu = device.type == "cuda"
        if on_gpu:
            gc.unfreeze()
        del self._placed
        gc.collect()  # the engine's parts know each other
        if on_gpu:
            torch.cuda.empty_cache()
        failed = self._place(plan, carried, device, delay)
        if failed is not None and self._place(self.plan, carried, device, delay) is not None:
            self._let_go(carried)
            raise failed
        self._watched.clear()
        self._tried.clear()
        if self.timeline is not None:
            self.timeline.follow(self._placed.lanes)
        if on_gpu:
            gc.collect()
            gc.freeze()
        if failed is not None:
            raise failed
        self.rescues += 1
        if self.launch is not None:
            self.launch.replanned(self)

    def _place(
        self, plan: Plan, carried: Carried, device: torch.device, delay: Callable[[], None] | None
    ) -> BaseException | None:
        """The error, where it could not be done: one about memory is a MemoryError on a GPU too."""
        try:
            self._placed = place(self.job, plan, self.model, device, delay, carried)
            self.plan = plan
        except Exception as error:
            let_go(error)
            return MemoryError(str(error)) if is_about_memory(error) else error
        return None

    def _let_go(self, carried: Carried) -> None:
        """The run ends here, since nothing can be placed; the model has its weights, wherever they lie."""
        for name, parameter in self.model.named_parameters():
            parameter.data = carried.weights[name]
        self._closed = True
        self._unfollow()

    def _say(self, line: str) -> None:
        if self.ranks.index:
            return
        if self.launch is not None:
            self.launch.say(line)
        else:
            print(line, file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ weights and checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """Full weights by original name, tied ones under each name, on the host: the fp32 masters; and the buffers."""
        self._check_open()
        self._act(Act(Kind.READ_WEIGHTS))
        self._placed.settle()
        return checkpoint.full_state_dict(self._placed)

    @contextmanager
    def weights(self) -> Iterator[nn.Module]:
        """The model whole and readable; edits of its parameters become part of the run. All ranks do the same with it."""
        self._check_open()
        self._act(Act(Kind.OPEN_WEIGHTS))
        self.finish_saving()
        with self._placed.residency.editing():
            before = self._placed.state.snapshot()
            yield self.model
            self._placed.state.adopt_edits(before)

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Writes a checkpoint: all of it or nothing; one that stood there is replaced only once the new one is whole.

        With wait=False it is written beside the steps that follow, where the plan's host memory has room for a copy of what they
        change, else at once as well. `run.saving` tells how far it is; an error is raised by the next step, save or close.
        """
        self._save(folder, wait=wait)

    def _save(self, folder: str | Path, *, wait: bool, then: Callable[[], None] = lambda: None) -> None:
        """`then` is called where rank 0 has put the checkpoint in its place."""
        self._check_open()
        if self._rows:
            raise RuntimeError("a checkpoint holds whole steps: call run.update() before run.save")
        folder = Path(folder).absolute()
        self._act(Act(Kind.SAVE if wait else Kind.BEGIN_TO_SAVE, str(folder)))
        try:
            self.finish_saving()
        except OSError as error:
            self._say(str(error))  # and here comes another
        before, self._doing = self._doing, f"saving step {self.steps}"
        self.saving, content = checkpoint.prepared(
            folder, self._placed, self._progress(), self._extra, self.plan, self.team, self._layout
        )
        for line in self._extra.unsaid():
            self._say(line)
        self.saving.then = then
        copies = self._copies_for()
        has_room = not wait and copies.has_room(content)
        if not wait and self.ranks.are_several:
            has_room = all(self.ranks.objects(has_room))
        if has_room:
            chunks = self._placed.state.chunks
            copies.begin(content, self._placed.updates.turn_of, lambda chunk: chunks[chunk].finish())
            self._placed.updates.let_read(copies.wait_for)
            self.saving.begin(copies)
        else:
            try:
                self._placed.settle()
                self.saving.finish()
            finally:
                self.saving = None if wait or self.saving.has_failed else self.saving
        self._doing = before

    def make_room_to_save(self) -> None:
        """Memory for saves with wait=False is made ready beside the steps that follow, where the plan's host memory has room for
        it; else the first such save does that, and steps wait. Best called after a step: optimizers make state in the first."""
        self._check_open()
        self._copies_for().make_room(*checkpoint.room_to_save(self._placed, self._layout))

    def _copies_for(self) -> Copies:
        if self._copies is None:
            self._copies = Copies(self._placed.slabs, self._placed.device)
        return self._copies

    def finish_saving(self) -> None:
        """Waits for a checkpoint that is being written beside the steps, and raises what went wrong with it."""
        saving, self.saving, self._save_failed = self.saving, None, False
        if saving is not None:
            saving.result()

    def _heed_saving(self) -> None:
        """An error of a save beside the steps is raised, on all ranks by the same one."""
        if self.saving is not None and (self._save_failed if self.ranks.are_several else self.saving.has_failed):
            self.finish_saving()

    def resume(self, folder: str | Path) -> None:
        """Takes up weights, optimizer, scheduler, data position and random state from a checkpoint."""
        self.finish_saving()
        progress = loading.load(Path(folder), self._placed, self._settings, self._extra, self.team)
        if progress["ranks"] != self.ranks.count:
            torch.manual_seed(seed_of(self.job.seed, self.ranks.index, progress["steps"]))
            saved_by = "one rank" if progress["ranks"] == 1 else f"{progress['ranks']} ranks"
            self._say(
                f"{folder} was saved by {saved_by}, and {self.ranks.count} go on: the same weights and data, other random numbers"
            )
        self._placed.show_loaded()
        if progress["version"] == former.VERSION:
            self._say(f"{folder}: {former.SAYS}")
        for difference in self._settings.differences(progress):
            self._say(f"{folder}: {difference}")
        self.steps, self.skipped = progress["steps"], progress["skipped"]
        self._stood = Stood(self._settings.position(progress), progress["loader_order"])
        if self._loader is not None:
            self._loader.position = self._stood.position
        elif self._stood.order is None and not self._stood.position and self.steps:
            self._say(f"{folder}: its batches were not from run.loader; the next one to hand over is number {self.steps + 1}")
        self._settings.load(progress)

    def _progress(self) -> dict[str, Any]:
        self._facts = self._facts or facts_of(self.model, self.job)
        return {
            "steps": self.steps,
            "skipped": self.skipped,
            "loader_position": self._stood.position if self._loader is None else self._loader.position,
            "loader_order": self._stood.order if self._loader is None else self._loader.order,
            "model": self._facts,
            **self._settings.to_json(),
        }

    # ------------------------------------------------------------------ looking

    @property
    def metrics(self) -> Metrics:
        """Of the last step. Looking waits for the device."""
        if "norm" not in self._last:
            raise RuntimeError("no step has been made yet")
        last, forecast = self._last, self.plan.forecast
        speed = forecast.step_seconds / last["seconds"]
        return Metrics(
            step=self.steps,
            loss=float(last["loss"]),
            gradient_norm=float(last["norm"]),
            learning_rates=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            seconds=last["seconds"],
            samples_per_second=self.job.batch_size / last["seconds"],
            tokens_per_second=forecast.tokens_per_second * speed,
            compute_share=forecast.compute_share * speed,
            peak_bytes=self._peaks(),
            skipped=self.skipped,
            rescues=self.rescues,
        )

    def _peaks(self) -> Mapping[str, int]:
        if self._placed.device.type == "cuda":
            return {"device": peak_bytes_of_gpu(self._placed.device), "host": self._placed.host_bytes, "disk": 0}
        return {"device": self._peak_bytes, "host": self._placed.host_bytes, "disk": 0}

    @contextmanager
    def _counting(self, batch: Batch) -> Iterator[None]:
        """On the CPU device, counts what the first steps of every batch shape hold, and keeps them to the plan's limit."""
        shape = _shapes_of(batch)
        if self._placed.device.type != "cpu" or self._watched.get(shape, 0) >= WATCHED_STEPS:
            yield
            return
        held, limit = self._placed.device_bytes, self.plan.limit_bytes["device"]

        def exceeded(live_bytes: int) -> None:
            where = module_at(self.model, sys._getframe(1))
            error = OverLimitError(self.plan, Shortfall(where, held + live_bytes, limit))
            if not self._is_updating:
                raise error
            if self._over is None or self._over.shortfall.needed_bytes < held + live_bytes:
                self._over = error

        residency = self._placed.residency
        with LiveBytes(limit - held, exceeded) as live:
            residency.slots.on_growth, told = live.count, residency.slots.on_growth
            try:
                yield
            finally:
                residency.slots.on_growth = told
        self._watched[shape] = self._watched.get(shape, 0) + 1
        self._peak_bytes = max(self._peak_bytes, held + live.peak_bytes)

    def record(self) -> Timeline:
        """From here on a few steps, after some to warm up, are recorded: what each lane does when."""
        self._check_open()
        self.timeline = Timeline(self._placed.lanes)
        return self.timeline

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run's loader makes, where it has one."""
        return None if self._loader is None else self.steps + len(self._loader) - self._loader.position

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_within_step(self) -> bool:
        """Whether a loop of one's own has begun a step that run.update() has not ended."""
        return bool(self._rows or self._open)

    # ------------------------------------------------------------------ with other ranks

    def _act(self, act: Act) -> None:
        """All ranks do this now. One that takes part in what others do has not begun it."""
        if self.team is not None:
            self.team.acts.begin(act)

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """An error on this rank alone is told to the others, which wait for it in vain."""
        try:
            yield
        except BaseException as error:
            if self.team is not None:
                self.team.acts.end_with(error, self.ranks.asked())
            raise

    def _asked(self) -> int:
        return 0 if self.launch is None else self.launch.asked

    def _take_part(self, act: Act) -> None:
        """Does with the others what they have begun and this rank would not have, with nothing of its own."""
        before = Before(self.model, self.job.loss, self._placed.device, self._extra)
        before.note_all()
        share = self._share_of_sample()
        zeros = [parameter.register_hook(torch.zeros_like) for parameter in self.model.parameters() if parameter.requires_grad]
        self._is_mute = True
        try:
            match act.kind:
                case Kind.STEP:
                    self.step(share)
                case Kind.EVALUATE:
                    self.evaluate(share)
                case Kind.READ_WEIGHTS:
                    self.state_dict()
                case Kind.SAVE | Kind.BEGIN_TO_SAVE:
                    self.save(act.which, wait=act.kind is Kind.SAVE)
                case Kind.OPEN_WEIGHTS:
                    raise RuntimeError(f"another rank is about to {act}, and this one has left: all ranks do that together")
        finally:
            self._is_mute = False
            for hook in zeros:
                hook.remove()
            before.restore()

    def await_others(self) -> None:
        """Of several ranks, one whose data has ended takes part in the steps that others still make: with nothing of its own, so
        that they count the others' samples alone. Comes back when none has anything left to do."""
        if self.team is not None:
            self._doing = f"at its end, after step {self.steps}"
            self.team.acts.leave(self._take_part)

    def _share_of_sample(self) -> Batch:
        """A batch of Job(sample=) as large as a rank's."""
        sample, share = self.job.sample, self.plan.share
        if self.job.split is not None:
            return sample
        return self.job.with_rows(sample, share)

    def _part_from_others(self, error: BaseException) -> None:
        """This rank has failed: the others are told, and not waited for."""
        assert self.team is not None
        self.team.ending.claims(error)
        self._closed = True
        self._placed.lanes.close.detach()  # whose threads may wait for the others for long
        self._unfollow()

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Lets go of everything; the model keeps its weights. With several ranks, takes part in what others still do before."""
        if self._closed:
            return
        try:
            self.await_others()
        except BaseException as error:
            self._part_from_others(error)
            raise
        self._closed = True
        try:
            self.finish_saving()
        finally:
            if self._copies is not None:
                self._copies.close()
            if self._placed.device.type == "cuda":
                gc.unfreeze()
            self._placed.close()
            self._unfollow()

    def give_up(self) -> None:
        """Lets go of a run that could not be started: no rank waits for another."""
        self._closed = True
        if self.team is None:
            self._placed.close()
        else:
            self._placed.lanes.close.detach()
        self._unfollow()

    def _unfollow(self) -> None:
        let_go_of(self.model, self._hold)
        if self.team is not None:
            atexit.unregister(self._at_exit)
        if self._watch is not None:
            self._watch.close()
        if self.launch is not None:
            self.launch.unfollow(self)
            self.launch = None

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this run is closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if error is not None and self.team is not None and not self._closed:
            self._part_from_others(error)
        else:
            self.close()


def _shapes_of(batch: Batch) -> Any:
    return tuple((name, shape_of(tensor)) for name, tensor in named_tensors(batch))


def _close(run: Run) -> None:
    """At the end of a process of several ranks."""
    assert run.team is not None
    try:
        run.close()
    except Exception as error:  # Python would show it on every rank
        run.team.ending.end(run.team.ending.show(error, lambda _: (None, 1)))


def _position(run: Run | None) -> Position:
    """Where a run is; chunks that it waits for with the names of their parameters."""
    if run is None or run.is_closed:
        return Position("at its end", {})
    chunks = run._placed.state.chunks
    waits = {}
    for kind, label in dict(run.ranks.doing).items():
        words = label.split()
        index = int(words[-1]) if len(words) > 1 and words[-2] == "chunk" and words[-1].isdigit() else None
        if index is not None and index < len(chunks):
            names = [slot.name for slot in chunks[index].chunk.slots]
            label += f" ({names[0]}" + (f" to {names[-1]})" if len(names) > 1 else ")")
        waits[str(kind)] = label
    if not waits and run._placed.device.type == "cuda" and run._doing.startswith("in "):
        waits["device"] = "the GPU, which has been given collectives"  # they are not waited for where they are given
    return Position(run._doing, waits)


def _scheduler(job: Job, optimizer: Optimizer) -> LRScheduler | None:
    if job.scheduler is None:
        return None
    scheduler = job.scheduler(optimizer)
    if isinstance(scheduler, ReduceLROnPlateau):
        raise TypeError(
            "ReduceLROnPlateau needs a metric with each step; step it yourself with run.optimizer, without Job(scheduler=)"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"Job(scheduler=) made {type(scheduler).__name__}, not a torch learning-rate scheduler")
    return scheduler
