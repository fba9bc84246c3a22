"""The progress of a run: a bar on a terminal, a plain line every few steps elsewhere."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from anyfit.values.doing import heard_by
from anyfit.values.plan import Forecast, Plan
from anyfit.values.units import show_bytes, show_count, show_seconds

FAR_OFF = 2  # times a forecast's own error


def against(measured: float, forecast: float) -> str:
    """How much more was measured than forecast.

    >>> against(3.0, 2.0), against(1.0, 2.0), against(0.9999, 1.0)
    ('+50%', '-50%', '+0%')
    """
    return f"{round(measured / forecast - 1, 2) + 0.0:+.0%}"


@dataclass(frozen=True)
class Beat:
    """One step as a watcher sees it."""

    step: int
    steps: int | None  # in all, where known
    loss: float
    seconds: float  # a step takes lately
    tokens_per_second: float
    compute_share: float
    peak_bytes: int
    clipped_share: float = 0.0  # of the steps so far
    saved: float | None = None  # share of the checkpoint that is being written

    def text(self, plan: Plan) -> str:
        drift = against(self.seconds, plan.forecast.seconds_with(self.clipped_share))
        to_go = 0 if self.steps is None else self.steps - self.step
        left = f", {show_seconds(to_go * self.seconds)} left" if to_go else ""
        limit = show_bytes(plan.limit_bytes["device"])
        saving = "" if self.saved is None else f", checkpoint {self.saved:.0%} written"
        return (
            f"loss {self.loss:.3f}, {show_count(self.tokens_per_second)} tokens/s, {self.compute_share:.0%} of peak compute, "
            f"memory {show_bytes(self.peak_bytes)} of {limit}{left}, {drift} against the forecast{saving}"
        )


def why_off(seconds: float, clipped_share: float, forecast: Forecast, check: str) -> str | None:
    """What steps on a CPU were to take, where that is far from what they do, and what may be the reason. `check`: the command
    that times the same job."""
    times = seconds / forecast.seconds_with(clipped_share)
    if times > 1 + FAR_OFF * forecast.step_error:
        return (
            f"a step takes {times:.1f}x its forecast: other work on this CPU slows it, or it is too short to forecast; "
            f"this times the job, and later plans account for it: {check}"
        )
    if times < 1 / (1 + FAR_OFF * forecast.step_error):
        return (
            f"a step takes {times:.2g}x its forecast: this CPU was measured while it did other work; this measures it anew: "
            "anyfit probe"
        )
    return None


class Watcher(Protocol):
    """What a run reports to."""

    def beat(self, beat: Beat, plan: Plan) -> None: ...
    def say(self, line: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None: ...


class Bar:
    """A live bar; lines said meanwhile scroll above it."""

    def __init__(self, console: Console) -> None:
        columns = TextColumn("step {task.completed}"), BarColumn(bar_width=24), TextColumn("{task.description}")
        self._progress = Progress(*columns, console=console)
        self._task: TaskID | None = None
        self._hearing = ExitStack()

    def beat(self, beat: Beat, plan: Plan) -> None:
        self._show(beat.text(plan), total=beat.steps, completed=beat.step)

    def _show(self, text: str, **fields: Any) -> None:
        if self._task is None:
            self._task = self._progress.add_task("", total=None)
        self._progress.update(self._task, description=text, **fields)

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False)

    def __enter__(self) -> Self:
        self._progress.start()
        self._hearing.enter_context(heard_by(lambda doing: None if doing is None else self._show(doing)))
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._hearing.close()
        self._progress.stop()


class Lines:
    """One line every `every` steps, for logs."""

    def __init__(self, console: Console, every: int) -> None:
        self._console, self._every = console, every

    def beat(self, beat: Beat, plan: Plan) -> None:
        if beat.step % self._every == 0 or beat.step == beat.steps:
            self.say(f"step {beat.step}" + (f" of {beat.steps}" if beat.steps else "") + f": {beat.text(plan)}")

    def say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        pass
