"""The benchmark of saving, on a tiny model: that it asks both questions, and says what it found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import checkpoint, record


def test_it_saves_beside_the_steps_with_room_and_waits_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    arguments = ["--model", "tiny", "--batch", "4", "--steps", "2", "--repeats", "2", "--folder", str(tmp_path), "--record"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/checkpoint.py", *arguments])
    checkpoint.main()
    (recorded,) = record.recordings("checkpoint")
    figures = recorded.figures
    assert {"commit", "command", "date", "gpu"} <= recorded.about.keys()
    assert [each["is_beside"] for each in figures["beside"]] == [True, True]
    assert [each["is_beside"] for each in figures["waiting"]] == [False, False]
    assert figures["copy_bytes"] == pytest.approx(12 * figures["parameters"], rel=0.1)
    assert figures["room"]["seconds"] > 0
    for each in figures["beside"]:
        whole = each["call_seconds"] + sum(each["step_seconds_meanwhile"])
        usual = each["steps_meanwhile"] * each["step_seconds"]
        assert each["delay_seconds"] == pytest.approx(whole - usual, abs=0.02)
        assert each["delay_steps"] == pytest.approx(each["delay_seconds"] / each["step_seconds"])
    assert all(each["bytes"] > 12 * figures["parameters"] for each in figures["waiting"])
    ways = set(figures["waiting"][0]["disk"])
    assert "through the page cache, 1" in ways
    assert figures["disk_bytes_per_second"] > min(figures["waiting"][0]["disk"].values())
    assert figures["share_of_disk"] == pytest.approx(figures["bytes_per_second"] / figures["disk_bytes_per_second"])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    assert capsys.readouterr().out.count("waiting: ") == 2
