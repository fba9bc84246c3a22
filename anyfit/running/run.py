"""Run: a placed model at work. `step` is the whole of training; `loss`, `backward` and `update` are its parts.

With several ranks, steps, evaluations, saves and whatever else reads weights are acts (team.py): all ranks make them together.
What a run does is done by objects with one job each, all at work on one engine:

    engine.py        the placed model, and how far it is     step.py          forward, backward and update
    parts.py         a step in parts, for one's own loop
    agreement.py     what ranks exchange at a step's end     team.py          what else ranks tell each other
    replacing.py     another plan when memory runs out       host_memory.py   the same, for host memory
    saves.py         checkpoints                             improving.py     another plan when blocks were compiled
    hooks.py         what others do after a step
"""

from __future__ import annotations

import atexit
import functools
import math
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from anyfit.placing import Placed
from anyfit.placing.timeline import Timeline
from anyfit.values.job import Batch, Job
from anyfit.values.plan import Plan

from . import checkpoint
from .acts import Kind
from .agreement import Agreement, facts_of_schedule
from .disk_health import DiskHealth
from .engine import Engine, Phase, Progress, hold, release
from .extra_state import ExtraState
from .hooks import Hooks
from .host_memory import HostMemory, HostWatch
from .improving import Improving, Tuner
from .launch import Launch
from .loader import Data, Loader, Sized
from .parts import Parts
from .rehearsal import Rehearsal
from .replacing import Replacing
from .rescue import Before, Rescue
from .saves import Saves
from .saving import Saving
from .settings import Settings
from .staged import StagedStep
from .step import Counting, Step
from .team import Peers, Team, close_at_exit, position_of


@dataclass(frozen=True)
class Metrics:
    """What the last step did. Numbers still on the device are fetched when somebody looks."""

    step: int  # steps done, skipped ones included
    loss: float
    gradient_norm: float  # before clipping
    learning_rates: tuple[float, ...]  # a parameter group each
    seconds: float  # from the end of the step before to the end of this one
    samples_per_second: float
    tokens_per_second: float  # without padding; by the shape of Job(sample=) where a loop makes its own loss
    compute_share: float  # of the device's best matmul rate, by the plan's count of FLOPs
    peak_bytes: Mapping[str, int]  # by tier, the largest so far
    skipped: int  # steps left out so far because a gradient was not finite
    rescues: int  # times so far that memory ended and the run was planned anew
    disk_written_bytes: int  # so far, of optimizer state, which wears the drive
    clipped_share: float  # of the steps of this run so far, those whose gradients were over Job(clip_norm=)


class Run(Parts, Hooks):
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
        keep_clipped: Callable[[int, int], None] | None = None,  # told at the end how many steps of how many were clipped
        tuner: Tuner | None = None,
    ) -> None:
        super().__init__()
        engine, progress = Engine(job, plan, placed), Progress(placed.ranks.index)
        self.job, self.model, self.ranks = job, engine.model, engine.ranks
        self.optimizer: Optimizer = engine.optimizer
        self.scheduler: LRScheduler | None = _scheduler(job, self.optimizer)
        self._engine, self._progress, self._counting = engine, progress, Counting(engine)
        self._keep_clipped = keep_clipped
        self._extra = ExtraState(self.model, self.optimizer, job.loss)
        settings = Settings(job, self.model, self.optimizer, self.scheduler)
        before = None if rescue is None else Before(self.model, job.loss, engine.device, self._extra)
        self._peers, self._data = Peers(team, self.ranks), Data(job, self.ranks)
        self.team = self._peers.team
        self.saves = Saves(engine, progress, self._peers, self._data, settings, self._extra)
        self._host = HostMemory(engine, progress, watch)
        self._disk = DiskHealth(engine, progress)
        self._agreement = Agreement(engine, progress, self._peers, self.saves, self._host, self._disk, self._data)
        kind = Step if plan.pipeline == 1 else StagedStep
        self._step = kind(engine, progress, self._peers, self._agreement, self._counting, self.scheduler)
        self._replacing = Replacing(engine, progress, self.saves, self._counting, rescue, rehearsal, before)
        loader = self._data  # not the run itself, which would be kept
        self._improving = Improving(engine, progress, self._replacing, tuner, lambda: _planned_steps(loader, progress))
        if self.team is not None:
            self.team.agree(facts_of_schedule(self.scheduler))
            mine = weakref.ref(engine)
            self.team.acts.look = lambda: position_of(mine(), progress)
            self._at_exit = functools.partial(close_at_exit, self)
            atexit.register(self._at_exit)
        self._hold = hold(self.model)
        engine.freeze()

    # ------------------------------------------------------------------ training

    def step(self, batch: Batch) -> Tensor:
        """One update from one batch of `batch_size` samples; the mean loss, detached. Waits for the device once, for the norm.

        An error on the way (in your model, your data) leaves the state of the last completed step. Where memory ends and the plan
        came from the planner, the run is planned anew and the step repeated.
        """
        self._progress.check_open()
        if self.ranks.together.n == 1:
            self._step.check_rows(batch)
        self._peers.begin(Kind.STEP, self.steps + 1)
        if self.ranks.together.n > 1:
            with self._peers.telling():
                batch = self._peers.one_batch(batch, self._engine, self._progress, self.plan.share)
                self._step.check_rows(batch)
        self.saves.heed()
        try:
            self._host.heed(self._replacing.make_room_on_host, self._kept_state)
            self._disk.heed(self._kept_state)
            loss = self._replacing.attempt(self._step, batch)
            self._replacing.heed_update()
        except BaseException:
            if self._engine.is_lost:
                self._end()
            raise
        self._progress.enter(Phase.AFTER)
        for line in self._engine.placed.news():
            self._progress.say(line)
        self._tell_of_step()
        if self.launch is not None:
            self.launch.after_step(self)
        self._improving.after_step()
        return loss

    def _kept_state(self) -> str:
        return "run.save keeps its state" if self.launch is None else f"saved in {self.launch.save(self)}"

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """The mean loss of a batch of any size in evaluation mode; over several ranks, of all their batches together."""
        self._progress.check_open()
        self._peers.begin(Kind.EVALUATE)
        return self._agreement.mean_loss(batch)

    def loader(self, dataset: Sized, *, epochs: int = 1, shuffle: bool = True, **options: Any) -> Loader:
        """Batches of the dataset in an order that depends on the seed alone; resumes where a checkpoint stood. `options` are for
        torch's DataLoader: collate_fn, num_workers, …"""
        return self._data.make_loader(dataset, epochs, shuffle, options)

    # ------------------------------------------------------------------ weights and checkpoints

    def state_dict(self) -> dict[str, Tensor]:
        """Full weights by original name, tied ones under each name, on the host: the fp32 masters; and the buffers."""
        self._progress.check_open()
        self._peers.begin(Kind.READ_WEIGHTS)
        self._engine.placed.settle()
        return checkpoint.full_state_dict(self._engine.placed)

    @contextmanager
    def weights(self) -> Iterator[nn.Module]:
        """The model whole and readable; edits of its parameters become part of the run. All ranks do the same with it."""
        self._progress.check_open()
        self._peers.begin(Kind.OPEN_WEIGHTS)
        self.finish_saving()
        with self._engine.placed.residency.editing():
            before = self._engine.placed.state.snapshot()
            with self._engine.placed.together():
                yield self.model
            self._engine.placed.state.adopt_edits(before)

    def save(self, folder: str | Path, *, wait: bool = True) -> None:
        """Writes a checkpoint: all of it or nothing; one that stood there is replaced only once the new one is whole.

        With wait=False it is written beside the steps that follow, where the plan's host memory has room for a copy of what they
        change, else at once as well. `run.saving` tells how far it is; an error is raised by the next step, save or close.
        """
        self._progress.check_open()
        if self._step.rows:
            raise RuntimeError("a checkpoint holds whole steps: call run.update() before run.save")
        self.saves.save(folder, wait=wait)

    def make_room_to_save(self) -> None:
        """Takes host memory for saves with wait=False now, where the plan leaves room; else the first such save does, and steps
        wait. Best called after a step: optimizers make state in the first."""
        self._progress.check_open()
        self.saves.make_room()

    def finish_saving(self) -> None:
        """Waits for a checkpoint that is being written beside the steps, and raises what went wrong with it."""
        self.saves.finish()

    def resume(self, folder: str | Path, *, finds_place: bool = False) -> None:
        """Takes up weights, optimizer, scheduler, data position and random state from a checkpoint. A loop that finds its place
        in its own data is not told which batch is next."""
        self.saves.resume(folder, finds_place=finds_place)

    # ------------------------------------------------------------------ looking

    @property
    def plan(self) -> Plan:
        return self._engine.plan

    @property
    def steps(self) -> int:
        return self._progress.steps

    @property
    def skipped(self) -> int:
        return self._progress.skipped

    @property
    def rescues(self) -> int:
        return self._progress.rescues

    @property
    def signal(self) -> int:
        """The signal that some rank was sent, as all know after the step."""
        return self._agreement.signal

    @property
    def saving(self) -> Saving | None:
        """The checkpoint that is being written, or the last one."""
        return self.saves.saving

    @property
    def timeline(self) -> Timeline | None:
        return self._engine.timeline

    @property
    def launch(self) -> Launch | None:
        return self._progress.launch

    @launch.setter
    def launch(self, launch: Launch | None) -> None:
        self._progress.launch = launch

    @property
    def micro_batches(self) -> list[int]:
        """Samples of each micro-batch of a step; only the last may be smaller."""
        return self.plan.micro_batches

    @property
    def planned_steps(self) -> int | None:
        """How many steps the run's loader makes, where it has one."""
        return _planned_steps(self._data, self._progress)

    @property
    def is_closed(self) -> bool:
        return self._progress.is_closed

    @property
    def is_within_step(self) -> bool:
        """Whether a loop of one's own has begun a step that run.update() has not ended."""
        return self._step.is_under_way

    @property
    def metrics(self) -> Metrics:
        """Of the last step. Looking waits for the device."""
        last, forecast = self._step.last, self.plan.forecast
        if last is None:
            raise RuntimeError("no step has been made yet")
        speed, tokens = forecast.step_seconds / last.seconds, float(last.tokens)
        return Metrics(
            step=self.steps,
            loss=math.nan if last.loss is None else float(last.loss),
            gradient_norm=float(last.norm),
            learning_rates=tuple(float(group["lr"]) for group in self.optimizer.param_groups),
            seconds=last.seconds,
            samples_per_second=self.job.batch_size / last.seconds,
            tokens_per_second=forecast.tokens_per_second * speed if math.isnan(tokens) else tokens / last.seconds,
            compute_share=forecast.compute_share * speed,
            peak_bytes=self._counting.peaks,
            skipped=self.skipped,
            rescues=self.rescues,
            disk_written_bytes=self._engine.placed.disk_written_bytes,
            clipped_share=self._progress.clipped / max(self._progress.updates, 1),
        )

    def record(self) -> Timeline:
        """From here on a few steps, after some to warm up, are recorded: what each lane does when."""
        self._progress.check_open()
        return self._engine.record()

    # ------------------------------------------------------------------ the end

    def await_others(self) -> None:
        """A rank whose data has ended takes part in the steps that others still make, with no samples of its own. Comes back when
        no rank has anything left to do."""
        if self.team is not None:
            self._progress.enter(Phase.END)
            self.team.acts.leave(lambda act: self._peers.take_part(act, self, self._engine, self._extra))

    def close(self) -> None:
        """Lets go of everything; the model keeps its weights. With several ranks, takes part in what others still do before."""
        if self.is_closed:
            return
        try:
            self.await_others()
        except BaseException as error:
            self._part_from_others(error)
            raise
        self._progress.is_closed = True
        try:
            self.finish_saving()
        finally:
            self.saves.close()
            self._engine.unfreeze()
            self._engine.placed.close()
            self._end()

    def give_up(self) -> None:
        """Lets go of a run that could not be started: no rank waits for another."""
        if self.team is None:
            self._engine.placed.close()
        else:
            self._engine.placed.lanes.close.detach()
        self._end()

    def _part_from_others(self, error: BaseException) -> None:
        """This rank has failed: it tells the others, and does not wait for them."""
        assert self.team is not None
        self.team.ending.claims(error)
        self._engine.placed.lanes.close.detach()  # its threads may wait long for the others
        self._end()

    def _end(self) -> None:
        self._progress.is_closed = True
        if self._keep_clipped is not None and self._progress.updates:
            self._keep_clipped(self._progress.clipped, self._progress.updates)
        release(self.model, self._hold)
        if self.team is not None:
            atexit.unregister(self._at_exit)
        self._host.close()
        if self.launch is not None:
            self.launch.unfollow(self)
            self.launch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if error is not None and self.team is not None and not self.is_closed:
            self._part_from_others(error)
        else:
            self.close()


def _planned_steps(data: Data, progress: Progress) -> int | None:
    loader = data.loader
    return None if loader is None else progress.steps + len(loader) - loader.position


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
