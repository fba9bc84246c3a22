"""The report as a file: it asks for nothing, holds what the plan says, and says how to get what it lacks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anyfit.showing import timeline
from anyfit.showing.report import Elsewhere, Recorded, Source, drawn, html, trace
from anyfit.values.plan import TIERS, Plan
from tests.showing.test_report_in_browser import PLANS, everywhere, metrics, plan


def data(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    document: dict[str, Any] = json.loads(found[1])
    return document


@pytest.mark.parametrize("name", ["demo", "tight", "cluster"])
def test_a_page_names_no_other_file_and_is_small(name: str) -> None:
    page = html(plan(name), Source("plan.json"))
    addresses = set(re.findall(r"https?://[^\s\"'<]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["data:,"]
    assert "@import" not in page
    own = len(page) - len(json.dumps(data(page), separators=(",", ":")))
    assert own < 40_000


@pytest.mark.parametrize("name", ["demo", "tight", "cluster"])
def test_it_holds_what_the_plan_says(name: str) -> None:
    made = plan(name)
    found = data(html(made, Source("plan.json")))
    assert [each["choice"] for each in found["decisions"]] == [each.choice for each in made.decisions]
    assert len(found["alternatives"]) == len(made.alternatives)
    assert next(each["bytes"] for each in found["tiers"]) == made.forecast.reserved_bytes
    assert len(found["tiers"]) == sum(made.forecast.peak_bytes[tier] > 0 for tier in TIERS)
    shown = {each["path"]: each["activations"] for each in found["blocks"]}
    assert {path: choice for path, choice in shown.items() if choice != "keep"} == made.activations
    assert sum(number for _, number in found["chunks"]) == len(made.chunks)


def test_the_names_of_a_model_cannot_end_the_script() -> None:
    sly = replace(plan("demo"), described='</script><script>alert("x")</script>')
    page = html(sly, Source("plan.json"))
    assert "<script>alert" not in page
    assert page.count("</script>") == 2


def test_a_plan_without_a_picture_says_how_to_get_one() -> None:
    found = data(html(replace(plan("tight"), picture=None), Source("my plan.json", "gpt2-4b", ("--machine rtx-4090",))))
    assert found["memory"] is None
    assert found["lanes"] is None
    assert "earlier version" in found["lacks"]["picture"]
    assert found["lacks"]["again"] == "anyfit plan gpt2-4b --machine rtx-4090 -o 'my plan.json'"
    assert {each["activations"] for each in found["blocks"]} == set(plan("tight").activations.values())


def test_a_run_is_shown_beside_its_forecast_with_what_went_wrong() -> None:
    made = plan("tight")
    run = drawn(made, Source("run"), Recorded("run", metrics(40)), None, Elsewhere())["run"]
    assert run["loss"][6] is None, "nan is no number of JSON"
    assert [each["step"] for each in run["events"]] == [7, 10]
    median = run["beside"][0]
    assert median["measured"] == "2.50 s"
    assert median["against"] == f"{2.5 / made.forecast.seconds_with(0.1) - 1:+.0%}"


def test_a_long_run_is_thinned_but_keeps_its_last_step_and_its_alarms() -> None:
    steps = [*metrics(8), *({**metrics(8)[-1], "step": step} for step in range(9, 6001))]
    run = drawn(plan("tight"), Source("run"), Recorded("run", steps), None, Elsewhere())["run"]
    assert len(run["steps"]) < 2100
    assert run["steps"][-1] == 6000
    assert 7 in run["steps"]


def test_what_was_planned_elsewhere_is_there_with_what_does_not_fit() -> None:
    made = plan("tight")
    found = drawn(made, Source("plan.json"), None, None, everywhere(made))
    assert [each["rate"] is None for each in found["speeds"]] == [True, False, False]
    by_name = {each["machine"]: each for each in found["machines"]}
    assert by_name["h100"]["cost"] == pytest.approx(3.5 * 1e10 / made.forecast.tokens_per_second / 3600)
    assert by_name["t4"]["said"] == "a Tesla T4 does not compute in bfloat16"


def test_the_trace_for_other_viewers_has_every_lane_and_stays_within_the_step() -> None:
    made = plan("tight")
    events = trace(made)["traceEvents"]
    assert made.picture is not None
    names = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert len(names) == len(made.picture.lanes)
    spans = [each for each in events if each["ph"] == "X"]
    assert len(spans) == sum(map(len, made.picture.lanes.values()))
    compute = [each for each in spans if each["tid"] == 0]
    assert max(each["ts"] + each["dur"] for each in compute) <= 1.001e6 * made.forecast.step_seconds


def test_the_trace_is_beside_a_recorded_one_and_that_is_still_read(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "pid": 0, "tid": 0, "name": "thread_name", "args": {"name": "steps"}},
        {"ph": "X", "pid": 0, "tid": 0, "name": "step 4", "cat": "step", "ts": 0.0, "dur": 5.0},
    ]
    about = {"anyfit": "timeline", "title": "x", "step_seconds": 5e-6, "busy": {}, "still": 0.0, "waits": {}}
    recorded = {"traceEvents": events, "metadata": about}
    both = trace(plan("tight"), recorded)["traceEvents"]
    assert both[:2] == events
    assert {each["pid"] for each in both[2:]} == {1}
    (tmp_path / "timeline.json").write_text(json.dumps(recorded))
    found = drawn(plan("demo"), Source("run"), None, timeline.read(tmp_path / "timeline.json"), Elsewhere())["recorded"]
    assert found["lanes"] == {}


def test_the_stored_plans_are_read_by_this_version() -> None:
    for file in sorted(PLANS.glob("*.json")):
        assert Plan.load(file).picture is not None
