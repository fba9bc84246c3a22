"""A run that goes on long enough compiles its blocks between two steps, times them, and moves to the plan that is best by that.

Compiling takes seconds for each kind of block, and until it is done only an estimate says what it is worth: inductor fuses what
is neither a matrix product nor attention, which saves about half of the time that this takes. It is tried once

    estimated seconds saved a step * steps >= MARGIN * estimated seconds to compile and time

The steps are those that are left, where somebody has said how many there will be. Else they are those that were made: a run that
has lasted so long is taken to last as long again. What was found is kept for later plans.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from anyfit.values.compiled import BlockFigures
from anyfit.values.plan import Plan
from anyfit.values.profile import Profile
from anyfit.values.units import show_seconds

from .engine import Engine, Progress
from .rehearsal import figures_of_blocks
from .replacing import Replacing
from .shortage import is_about_memory

FIRST_STEPS = 4  # to warm up
MARGIN = 2.0  # for what the estimate does not know
FUSED = 0.5  # of the time of ops that can be fused, that compiled code saves
TIMES_FORWARD = 3  # forward, and backward with twice as much
KIND_SECONDS = 15.0  # to compile and time a kind of block


@dataclass(eq=False)
class Tuner:
    """What `start` gives a run whose plan the planner made eager, on a machine with a compiler."""

    profile: Profile  # that the plan was made from
    versions: str  # of the compiler
    keep: Callable[[Mapping[str, BlockFigures]], None]  # for later plans
    search: Callable[[Profile, int], Plan]  # for so many steps

    def names(self, plan: Plan) -> tuple[str, ...]:
        """Blocks that may be compiled, and of which nothing is known."""
        blocks = next((each.blocks for each in self.profile.passes if each.micro_batch == plan.micro_batch), ())
        return tuple(block.name for block in blocks if "recompute" in block.choices and block.figures is None)

    def gain_seconds(self, plan: Plan) -> float:
        """An estimate, of a step: of ops that are cheap to recompute, which are those that can be fused."""
        blocks = next(each.blocks for each in self.profile.passes if each.micro_batch == plan.micro_batch)
        fusible = 0.0
        for block in blocks:
            cheap = block.choices.get("selective")
            if cheap is not None:
                fusible += cheap.seconds if cheap.timing is None else cheap.timing.device_seconds
        return FUSED * TIMES_FORWARD * fusible * plan.accumulation


class Improving:
    """`planned_steps` are those of the run's loader, where it has one."""

    def __init__(
        self,
        engine: Engine,
        progress: Progress,
        replacing: Replacing,
        tuner: Tuner | None,
        planned_steps: Callable[[], int | None],
    ) -> None:
        self._engine, self._progress, self._replacing = engine, progress, replacing
        self._tuner, self._planned_steps = tuner, planned_steps
        self._made = 0  # steps, by this process
        self._least_steps = 0.0  # for which compiling may pay

    def after_step(self) -> None:
        tuner, self._made = self._tuner, self._made + 1
        if tuner is None or self._made < FIRST_STEPS:
            return
        plan = self._engine.plan
        if not self._least_steps:
            names, gain = tuner.names(plan), tuner.gain_seconds(plan)
            if not names or not gain or plan.compiled:
                self._tuner = None
                return
            kinds = len({type(self._engine.model.get_submodule(name)) for name in names})
            self._least_steps = MARGIN * kinds * KIND_SECONDS / gain
        steps = self._steps()
        if steps >= self._least_steps:
            self._tuner = None
            self._improve(tuner, plan, steps)

    def _steps(self) -> int:
        """That are left, or, where nobody knows, that were made."""
        launch = self._progress.launch
        last = self._planned_steps() if launch is None or launch.steps is None else launch.steps
        return self._made if last is None else last - self._progress.steps

    def _improve(self, tuner: Tuner, plan: Plan, steps: int) -> None:
        engine, progress, began = self._engine, self._progress, time.perf_counter()
        after = f"after step {progress.steps}"
        without = "Job(compile=False)" if progress.launch is None else "--no-compile"
        progress.say(f"{after}: compiling one block of each kind, to see what it is worth; {without} leaves it out")
        try:
            found = figures_of_blocks(engine.job, engine.placed, tuner.names(plan), plan.micro_batch, tuner.versions)
        except (MemoryError, RuntimeError) as error:
            if not is_about_memory(error):
                raise
            progress.say(f"{after}: there is no room to compile blocks, and the run goes on as it is")
            return
        tuner.keep(found)
        took = show_seconds(time.perf_counter() - began)
        done = {name: replace(each, compile_seconds=0.0) for name, each in found.items()}
        better = tuner.search(tuner.profile.with_figures(done), steps)
        if not better.compiled or better.micro_batch != plan.micro_batch:
            why = next((each.why for each in better.decisions if each.name == "compile"), "") or _reasons(found)
            progress.say(f"{after}: no block is compiled, as {took} of trying showed: {why}")
            return
        self._replacing.move(better)
        decided = better.decision("compile")
        progress.say(f"{after}: {decided.choice}, as {took} of trying showed: {decided.why}")


def _reasons(found: Mapping[str, BlockFigures]) -> str:
    return "; ".join(dict.fromkeys(each.why_not for each in found.values() if each.why_not)) or "compiled code is not faster"
