"""A run that has run out of memory is placed by another plan, and repeats the step that it was in (rescue.py)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from anyfit.values.job import Batch
from anyfit.values.no_plan import NoPlan
from anyfit.values.plan import Plan

from .engine import Engine, Progress
from .rehearsal import Rehearsal
from .rescue import MOST_RESCUES, Before, Rescue, let_go, said_of_device
from .saves import Saves
from .shortage import Shortfall, is_about_memory, shortfall_of
from .step import WATCHED_STEPS, Counting, Step, shapes_of


@dataclass(eq=False)
class Replacing:
    """`rescue` has other plans, and `before` the state that a repeated step starts from: None for a plan that was given."""

    _engine: Engine
    _progress: Progress
    _saves: Saves
    _counting: Counting
    _rescue: Rescue | None
    _rehearsal: Rehearsal | None
    _before: Before | None
    _tried: Counter[Any] = field(default_factory=Counter)  # steps made with the plan at hand, by the shapes of the batch

    def attempt(self, step: Step, batch: Batch) -> Tensor:
        """The step, with one plan after another until it fits."""
        if self._rescue is None or self._before is None:
            return step.attempt(batch)
        rescue, before, engine, shape = self._rescue, self._before, self._engine, shapes_of(batch)
        for rescues in range(MOST_RESCUES + 1):
            note = before.note if self._tried[shape] >= WATCHED_STEPS else before.note_all
            note()
            try:
                if self._rehearse(rescue):
                    note()  # with each plan something else stands in for a block's forward
                loss = step.attempt(batch)
                before.forget()
                self._tried[shape] += 1
                return loss
            except (MemoryError, RuntimeError) as error:
                if not is_about_memory(error):
                    raise
                failed = error
            short = shortfall_of(failed, engine.plan, engine.model, engine.device, rescue.context_bytes)
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

    def heed_update(self) -> None:
        """An update that held more than it may has been made: whether it counts is no question, but the next is to hold less."""
        over = self._counting.pop_over_limit()
        if over is None:
            return
        if self._rescue is None:
            raise over
        self._make_room_on_device(over.shortfall, self._rescue, 0, over)

    def make_room_on_host(self, fewer_bytes: int) -> None:
        """Moves to a plan with so much less on the host; NoPlan where there is none."""
        if self._rescue is None:
            raise NoPlan("the plan was given, and is not changed", 0)
        self._rescued(self._rescue.with_less_host(self._engine.plan, fewer_bytes))

    def _make_room_on_device(self, short: Shortfall, rescue: Rescue, rescues: int, failed: BaseException) -> None:
        """Moves to another plan, the one after `rescues` others for the same step; or raises the error."""
        if rescues == MOST_RESCUES:
            failed.add_note(f"the step was planned anew {MOST_RESCUES} times, and more was needed each time")
            raise failed
        before = self._engine.plan
        try:
            plan = rescue.with_less_device(before, short, rescues)
        except NoPlan as verdict:
            failed.add_note(f"planned anew with room for that, nothing fits: {verdict}")
            raise failed from None
        try:
            self._rescued(plan)
        except MemoryError as error:
            failed.add_note(f"the plan that would have had room for it could not be placed: {error}")
            raise failed from None
        self._progress.say(said_of_device(self._progress.steps, short, before, plan))

    def _rehearse(self, rescue: Rescue) -> bool:
        """Tries a plan that is new. One that changes the result gives way to another: then the model is placed anew."""
        engine = self._engine
        if self._rehearsal is None or engine.plan.rehearsed:
            return False
        is_moved, findings = False, self._rehearsal.of(engine.plan, engine.placed)
        while findings.against(engine.plan) is not None:
            self.move(rescue.restricted(engine.plan, findings))
            is_moved, findings = True, self._rehearsal.of(engine.plan, engine.placed)
        plan = engine.plan.without_compiled(findings.eager).without_replayed(findings.op_by_op)
        engine.plan = replace(plan, loss=findings.loss if plan.cuts else plan.loss, rehearsed=True)
        self._tell_launch()
        return is_moved

    def _rescued(self, plan: Plan) -> None:
        self.move(plan)
        self._progress.rescues += 1

    def move(self, plan: Plan) -> None:
        """Frees all that holds the placement, and has the engine place the model by this plan."""
        self._saves.let_go()
        if self._before is not None:
            self._before.let_go()
        self._counting.forget()
        self._tried.clear()
        self._engine.move(plan)
        self._tell_launch()

    def _tell_launch(self) -> None:
        if self._progress.launch is not None:
            self._progress.launch.replanned(self._engine.plan, self._saves)
