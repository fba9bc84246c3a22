"""What all parts of a run share: the model as the plan places it (Engine), and how far the run is (Progress).

Placement and plan change when a run is placed anew. Whoever works on the engine asks for `placed` when it is needed and keeps no
part of it: a part that is kept holds the memory of the placement before.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from anyfit.placing import Placed, place
from anyfit.placing.chunks import Carried
from anyfit.placing.timeline import Timeline
from anyfit.values.job import Batch, Job
from anyfit.values.plan import Plan

from .rescue import let_go
from .shortage import is_about_memory

if TYPE_CHECKING:
    from .launch import Launch


def free(device: torch.device) -> None:
    """Memory that nothing refers to any more. Parts of a placement refer to each other, so it takes a collection."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Phase(Enum):
    """What a run is doing, in words that name the step."""

    BEFORE = "before its first step"
    FORWARD = "in the forward of step {}"
    BACKWARD = "in the backward of step {}"
    UPDATE = "in the update of step {}"
    AFTER = "after step {}"
    SAVING = "saving step {}"
    END = "at its end, after step {}"

    @property
    def is_within_step(self) -> bool:
        return self in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)


@dataclass(frozen=True)
class Doing:
    phase: Phase = Phase.BEFORE
    step: int = 0

    def __str__(self) -> str:
        return self.phase.value.format(self.step)


@dataclass(eq=False)
class Progress:
    rank: int
    steps: int = 0  # done, skipped ones included
    skipped: int = 0
    rescues: int = 0  # times that memory ended and the run was planned anew
    updates: int = 0  # of this run, without steps that were left out
    clipped: int = 0  # of these, with gradients over the job's limit
    doing: Doing = Doing()
    is_closed: bool = False
    launch: Launch | None = None  # set by `anyfit fit`

    def enter(self, phase: Phase) -> None:
        self.doing = Doing(phase, self.steps + phase.is_within_step)

    def check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("this run is closed")

    def say(self, line: str) -> None:
        if self.rank:
            return
        if self.launch is not None:
            self.launch.say(line)
        else:
            print(line, file=sys.stderr, flush=True)


class Engine:
    def __init__(self, job: Job, plan: Plan, placed: Placed) -> None:
        self.job, self.plan, self.placed = job, plan, placed
        self.model: nn.Module = placed.model
        self.optimizer: Optimizer = placed.updates.optimizer
        self.device, self.ranks = placed.device, placed.ranks
        self.timeline: Timeline | None = None  # set by `record`
        self.is_lost = False  # nothing could be placed any more

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

    def move(self, plan: Plan) -> None:
        """Places the model by this plan, or by the one before where that fails."""
        carried, delay = self.placed.lift(), self.placed.delay
        self.unfreeze()
        del self.placed
        free(self.device)
        failed = self._place(plan, carried, delay)
        if failed is not None and self._place(self.plan, carried, delay) is not None:
            for name, parameter in self.model.named_parameters():
                parameter.data = carried.weights[name]  # the model keeps them, and trains no more
            self.is_lost = True
            raise failed
        if self.timeline is not None:
            self.timeline.follow(self.placed.lanes)
        self.freeze()
        if failed is not None:
            raise failed

    def _place(self, plan: Plan, carried: Carried, delay: Callable[[], None] | None) -> BaseException | None:
        """Returns the error where it fails; one about memory is a MemoryError on a GPU too."""
        try:
            self.placed = place(self.job, plan, self.model, self.device, delay, carried)
            self.plan = plan
        except Exception as error:
            let_go(error)
            return MemoryError(str(error)) if is_about_memory(error) else error
        return None

    def freeze(self) -> None:
        """Garbage collection skips what is there now: to look through it would stop every lane for a fifth of a second."""
        if self.device.type == "cuda":
            gc.collect()
            gc.freeze()

    def unfreeze(self) -> None:
        if self.device.type == "cuda":
            gc.unfreeze()


# ---------------------------------------------------------------------- no model in two runs

# By parameter, a token of its run. Parameters and not modules: a second run of a part of the model, or of a model that shares a
# weight with it, would train the same parameters. A run that is forgotten without `close` holds on.
_held = WeakIdKeyDictionary()


def refuse_held(model: nn.Module) -> None:
    """Raises where an unclosed run holds a parameter of the model."""
    for name, parameter in model.named_parameters():
        if parameter in _held:
            raise RuntimeError(
                f"another run that is not closed holds this {type(model).__name__} ({name}): close the first run, with "
                "run.close() or `with anyfit.start(job) as run`, or give each run a model of its own: Job(model=lambda: Model())"
            )


def hold(model: nn.Module) -> object:
    """Until `release` is given this token."""
    token = object()
    for parameter in model.parameters():
        _held[parameter] = token
    return token


def release(model: nn.Module, token: object) -> None:
    for parameter in model.parameters():
        if _held.get(parameter) is token:
            del _held[parameter]
