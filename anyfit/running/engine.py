"""The model at hand, placed as the plan at hand says. Both change when a run is placed anew.

Whoever works on it asks for `placed` when it is needed and keeps no part of it: while one is kept, the memory of the placing
before is not free for the next.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anyfit.placing import Placed, place
from anyfit.placing.chunks import Carried
from anyfit.placing.timeline import Timeline
from anyfit.values.job import Batch, Job
from anyfit.values.plan import Plan

from .rescue import let_go
from .shortage import is_about_memory


class Engine:
    def __init__(self, job: Job, plan: Plan, placed: Placed) -> None:
        self.job, self.plan, self.placed = job, plan, placed
        self.model: nn.Module = placed.model
        self.optimizer: Optimizer = placed.updates.optimizer
        self.device, self.ranks = placed.device, placed.ranks
        self.timeline: Timeline | None = None  # set by `record`
        self.is_lost = False  # nothing could be placed any more

    @property
    def micro_batches(self) -> list[int]:
        return self.plan.micro_batches

    def begin(self) -> None:
        if self.timeline is not None:
            self.timeline.begin_step()
        self.placed.begin()

    def evaluate(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss of a batch, moved to the device and cast: a mean, or a sum and its weight."""
        return self.job.evaluate(self.model, self.job.prepare(batch, self.device, self.placed.lanes.send))

    def record(self) -> Timeline:
        self.timeline = Timeline(self.placed.lanes)
        return self.timeline

    # ------------------------------------------------------------------ placing anew

    def move(self, plan: Plan) -> None:
        """Places the model anew, as this plan says; as it was, where that cannot be done."""
        carried, delay = self.placed.lift(), self.placed.delay
        self.unfreeze()
        del self.placed
        gc.collect()  # the engine's parts know each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        failed = self._place(plan, carried, delay)
        if failed is not None and self._place(self.plan, carried, delay) is not None:
            self._lose(carried)
            raise failed
        if self.timeline is not None:
            self.timeline.follow(self.placed.lanes)
        self.freeze()
        if failed is not None:
            raise failed

    def _place(self, plan: Plan, carried: Carried, delay: Callable[[], None] | None) -> BaseException | None:
        """The error, where it could not be done: one about memory is a MemoryError on a GPU too."""
        try:
            self.placed = place(self.job, plan, self.model, self.device, delay, carried)
            self.plan = plan
        except Exception as error:
            let_go(error)
            return MemoryError(str(error)) if is_about_memory(error) else error
        return None

    def _lose(self, carried: Carried) -> None:
        """The model has its weights, wherever they lie, and trains no more."""
        for name, parameter in self.model.named_parameters():
            parameter.data = carried.weights[name]
        self.is_lost = True

    def freeze(self) -> None:
        """What is there now stays: to look through all of it for garbage would stop every lane for a fifth of a second."""
        if self.device.type == "cuda":
            gc.collect()
            gc.freeze()

    def unfreeze(self) -> None:
        if self.device.type == "cuda":
            gc.unfreeze()
