"""The benchmark of starting, on a small model: it names every stage, and writes folders that a start takes."""

from __future__ import annotations

from pathlib import Path

from benchmarks.start import BETWEEN, main


def test_stages_are_told_and_make_up_the_whole(tmp_path: Path) -> None:
    row = main(["demo", "--batch", "1", "--seq", "16", "--folder", str(tmp_path / "weights")])
    assert {"tracing the model", "looking for the fastest plan", "building the model", "placing the model", "first step"} <= set(
        row["stages"]
    )
    assert 0.95 * row["seconds"] <= sum(row["stages"].values()) <= 1.05 * row["seconds"]
    assert row["stages"][BETWEEN] < row["seconds"]
    assert "draws_seconds" in main(["demo", "--batch", "1", "--seq", "16"])
