"""A run as its watcher sees it: a bar on a terminal, lines in a log."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from anyfit import Plan
from anyfit.planning import search
from anyfit.showing.progress import Bar, Beat, Lines, why_off
from anyfit.showing.terminal import show_forecast_beside_measured
from anyfit.values.plan import Clipping
from tests.planning.profiles import GIB, small_profile


@pytest.fixture
def plan() -> Plan:
    plan = search(small_profile())
    return replace(plan, forecast=replace(plan.forecast, step_seconds=0.5))


BEAT = Beat(step=30, steps=100, loss=2.3456, seconds=0.6, tokens_per_second=12_345, compute_share=0.4, peak_bytes=2 * GIB)


def test_a_beat_says_loss_speed_memory_time_left_and_drift(plan: Plan) -> None:
    assert BEAT.text(plan) == (
        "loss 2.346, 12.3 k tokens/s, 40% of peak compute, memory 2.00 GiB of 8.00 GiB, 42.0 s left, +20% against the forecast"
    )


def test_a_run_of_unknown_length_has_no_time_left(plan: Plan) -> None:
    assert "left" not in replace(BEAT, steps=None).text(plan)
    assert "-40% against the forecast" in replace(BEAT, seconds=0.3).text(plan)


def test_a_beat_and_the_table_at_the_end_compare_with_the_forecast_alike(plan: Plan) -> None:
    """With the same sign and base, for as many clipped steps as there were."""
    console = Console(file=StringIO(), width=100)
    plan = replace(plan, forecast=replace(plan.forecast, clipping=Clipping(1.0, 1.0, 0.5)))
    for seconds, share, said in ((14.1, 0.0, "+2720%"), (0.15, 0.0, "-70%"), (0.9, 0.5, "+20%")):
        assert f"{said} against the forecast" in replace(BEAT, seconds=seconds, clipped_share=share).text(plan)
        show_forecast_beside_measured(plan, seconds, share, 0, console)
        assert isinstance(console.file, StringIO)
        assert f"│ {said} " in console.file.getvalue()


def test_steps_on_a_cpu_that_are_far_from_their_forecast_say_why_that_may_be(plan: Plan) -> None:
    forecast = replace(plan.forecast, step_error=0.45)  # of half a second
    check = "anyfit check demo --batch 4"
    assert why_off(0.9, 0.0, forecast, check) is None
    assert why_off(0.3, 0.0, forecast, check) is None
    slow, fast = (str(why_off(seconds, 0.0, forecast, check)) for seconds in (5.0, 0.1))
    assert slow.startswith("a step takes 10.0x its forecast: other work on this CPU slows it")
    assert slow.endswith(f": {check}")
    assert fast.startswith("a step takes 0.2x its forecast: this CPU was measured while it did other work")


def lines_of(plan: Plan, steps: range, total: int | None, every: int) -> list[str]:
    console = Console(file=StringIO(), width=40)
    with Lines(console, every) as watcher:
        for step in steps:
            watcher.beat(replace(BEAT, step=step, steps=total), plan)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


def test_a_log_has_one_line_every_few_steps_and_the_last(plan: Plan) -> None:
    lines = lines_of(plan, range(1, 24), 23, every=10)
    assert [line.partition(":")[0] for line in lines] == ["step 10 of 23", "step 20 of 23", "step 23 of 23"]
    assert all(line.endswith("against the forecast") for line in lines)


def test_the_last_step_is_not_logged_twice(plan: Plan) -> None:
    assert len(lines_of(plan, range(1, 21), 20, every=10)) == 2
    assert len(lines_of(plan, range(1, 4), 3, every=1)) == 3


def test_a_log_of_unknown_length_counts_the_steps_alone(plan: Plan) -> None:
    lines = lines_of(plan, range(1, 13), None, every=5)
    assert [line.partition(":")[0] for line in lines] == ["step 5", "step 10"]


def test_what_is_said_is_one_line_as_it_is() -> None:
    console = Console(file=StringIO(), width=20, color_system=None)
    with Lines(console, 1) as watcher:
        watcher.say("alarm: [red] loss is nan after 120 good steps")
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == "alarm: [red] loss is nan after 120 good steps\n"


def test_a_bar_shows_the_last_beat_and_what_was_said(plan: Plan) -> None:
    console = Console(file=StringIO(), width=200, color_system=None, force_terminal=True)
    with Bar(console) as watcher:
        for step in (1, 2, 3):
            watcher.beat(replace(BEAT, step=step, steps=3, loss=float(step)), plan)
        watcher.say("alarm: [red] the loss rises")
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "step 3" in text
    assert "loss 3.000" in text
    assert "alarm: [red] the loss rises" in text


def test_a_bar_without_a_beat_ends_quietly() -> None:
    console = Console(file=StringIO(), width=80, color_system=None, force_terminal=True)
    with Bar(console):
        pass
    assert isinstance(console.file, StringIO)
    assert "step" not in console.file.getvalue()
