"""A timeline as people see it: a table, and a picture that any browser opens."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from anyfit.showing import timeline

SVG = "{http://www.w3.org/2000/svg}"


def trace(*spans: tuple[str, str, float, float], title: str = "GPT on a machine") -> dict[str, Any]:
    """Of (lane, label, start, end) in milliseconds."""
    lanes = list(dict.fromkeys(["steps", *(lane for lane, *_ in spans)]))
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": lanes.index(lane), "name": "thread_name", "args": {"name": lane}} for lane in lanes
    ]
    for lane, label, start, end in [("steps", "step 4", 0.0, 10.0), *spans]:
        times = {"ts": start * 1e3, "dur": (end - start) * 1e3}
        events.append({"ph": "X", "pid": 0, "tid": lanes.index(lane), "name": label, "cat": label.split()[0], **times})
    metadata = {"anyfit": "timeline", "title": title, "steps": [4, 4], "step_seconds": 0.01, "still": 0.3}
    return {
        "traceEvents": events,
        "metadata": metadata | {"busy": dict.fromkeys(lanes[1:], 0.7), "waits": {"fetch": 0.2, "update": 0.001}},
    }


SPANS = (
    ("compute", "forward", 0.0, 3.0),
    ("compute", "wait for fetch chunk 12", 3.0, 5.0),
    ("compute", "backward", 5.0, 9.0),
    ("uploads", "fetch chunk 12", 1.0, 4.9),
    ("uploads", "juggle <things> & more", 6.0, 9.5),
)


def drawn(*spans: tuple[str, str, float, float], title: str = "GPT on a machine") -> ElementTree.Element:
    return ElementTree.fromstring(timeline.draw(timeline.parse(trace(*spans, title=title))))


def test_the_picture_is_well_formed_and_shows_lanes_spans_axis_and_legend() -> None:
    picture = drawn(*SPANS, title="a <b> & c")
    texts = [each.text for each in picture.iter(f"{SVG}text")]
    for text in ("a <b> & c", "compute", "uploads", "70% busy", "step 4", "forward", "10 ms", "fetch chunk 12", "other"):
        assert text in texts
    assert "compute stood still 30% of the time (20% waiting for fetch)" in texts
    titles = [each.text for each in picture.iter(f"{SVG}title")]
    assert "wait for fetch chunk 12: 2.00 ms" in titles
    assert "juggle <things> & more: 3.50 ms" in titles
    assert "prefers-color-scheme: dark" in "".join(each.text or "" for each in picture.iter(f"{SVG}style"))


def test_boxes_stand_where_their_times_are() -> None:
    boxes = {each[0].text: each for each in drawn(*SPANS).iter(f"{SVG}rect") if len(each)}
    forward, backward = boxes["forward: 3.00 ms"], boxes["backward: 4.00 ms"]
    scale = (timeline.WIDTH - timeline.LEFT - timeline.RIGHT) / 10
    assert float(forward.get("x", 0)) == pytest.approx(timeline.LEFT, abs=0.01)
    assert float(backward.get("x", 0)) == pytest.approx(timeline.LEFT + 5 * scale, abs=0.01)
    assert float(backward.get("width", 0)) == pytest.approx(4 * scale, abs=0.01)
    assert forward.get("y") == backward.get("y") != boxes["fetch chunk 12: 3.90 ms"].get("y")


def test_what_the_eye_cannot_tell_apart_is_one_box() -> None:
    many = [("uploads", f"fetch chunk {index}", index * 0.002, index * 0.002 + 0.001) for index in range(2000)]
    boxes = [each for each in drawn(("compute", "forward", 0.0, 10.0), *many).iter(f"{SVG}rect") if len(each)]
    assert len(boxes) == 2
    assert boxes[1][0].text == "fetch, 2000 times: 4.00 ms"


def test_a_chunk_number_is_written_where_there_is_no_room_for_more() -> None:
    texts = [each.text for each in drawn(("uploads", "fetch chunk 12", 1.0, 1.3)).iter(f"{SVG}text")]
    assert "12" in texts
    assert "fetch chunk 12" not in texts


def test_the_table_says_how_busy_lanes_were_and_why_the_computation_stood_still() -> None:
    console = Console(file=StringIO(), width=100)
    timeline.show(timeline.parse(trace(*SPANS)), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert rows == [["compute", "70%", "2"], ["uploads", "70%", "2"]]
    assert "compute stood still 30% of the time (20% waiting for fetch), in steps of 10.0 ms" in shown


def test_a_file_is_read_back_and_another_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with pytest.raises(FileNotFoundError, match="no timeline at"):
        timeline.read(file)
    file.write_text(json.dumps(trace(*SPANS)))
    assert timeline.read(file) == timeline.parse(trace(*SPANS))
    for content, says in (("{", "not JSON"), ("[]", "not a timeline"), ('{"metadata": {"anyfit": "plan"}}', "not a timeline")):
        file.write_text(content)
        with pytest.raises(ValueError, match=says):
            timeline.read(file)
