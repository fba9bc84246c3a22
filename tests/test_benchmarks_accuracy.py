"""The pictures in the documents are what the benchmarks draw from the recorded rows."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks import accuracy, offload, record
from benchmarks.accuracy import Axis, Point

SVG = "{http://www.w3.org/2000/svg}"


def marks(picture: str) -> list[ElementTree.Element]:
    """Those that stand for a step, and not for a family in the legend."""
    found = [each for each in ElementTree.fromstring(picture).iter() if "mark" in each.get("class", "").split()]
    return [each for each in found if each.find(f"{SVG}title") is not None]


def test_the_picture_of_forecasts_is_that_of_the_recorded_rows() -> None:
    assert accuracy.PICTURE.read_text() == accuracy.draw(accuracy.points()), "python -m benchmarks.accuracy draws it anew"


def test_the_picture_beside_other_systems_is_that_of_a_recording() -> None:
    drawn = [offload.draw(each.figures, each.about) for each in record.recordings("offload")]
    assert offload.PICTURE.read_text() in drawn, "python -m benchmarks.offload --picture FILE draws it anew"


def test_every_recorded_step_is_a_point() -> None:
    found = accuracy.points()
    rows = [row for each in record.recordings("planned", "regret", "profiler") for row in each.rows]
    drawn = marks(accuracy.draw(found))
    assert len(found) == len(rows) == len(drawn)
    assert sum("excluded" in row for row in rows) == sum("excluded" in each.attrib["class"].split() for each in drawn)
    assert {point.kind for point in found} <= accuracy.FAMILIES.keys()


def test_steps_that_clip_have_a_ring() -> None:
    found = accuracy.points()
    picture = ElementTree.fromstring(accuracy.draw(found))
    rings = [each for each in picture.iter() if each.get("class") == "ring"]
    clipping = [point for point in found if point.clips]
    assert len(rings) == len(clipping) + 1  # and that of the legend
    assert any(accuracy.clipped_line(found) == each.text for each in picture.iter())
    assert clipping


def test_a_point_lies_where_its_seconds_say() -> None:
    found = [
        Point("gpt2", "as forecast", 0.1, 0.1, is_excluded=False),
        Point("gpt2", "forecast too long", 1.0, 2.0, is_excluded=False),
        Point("llama", "forecast too short", 10.0, 0.1, is_excluded=True),
    ]
    axis = Axis.over([0.1, 10.0])
    assert axis.ticks == [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
    left, top, side = accuracy.LEFT, accuracy.TOP, accuracy.SIDE
    at = {}
    for each in marks(accuracy.draw(found)):
        said = each.findtext(f"{SVG}title")
        assert said is not None
        at[said] = float(each.attrib["cx"]), float(each.attrib["cy"])
    assert at["as forecast: 100 ms, forecast 100 ms (+0.0%)"] == pytest.approx((left, top + side), abs=0.1)
    assert at["forecast too long: 1.00 s, forecast 2.00 s (+100.0%)"] == pytest.approx((left + side / 2, axis.y(2.0)), abs=0.1)
    assert at["forecast too short: 10.0 s, forecast 100 ms (-99.0%)"] == pytest.approx((left + side, top + side), abs=0.1)
    assert accuracy.line_of("gpt2", found) == "GPT-2: 2 steps, median 50 %, worst 100 %"
    assert accuracy.line_of("llama", found) == "Llama: excluded"
