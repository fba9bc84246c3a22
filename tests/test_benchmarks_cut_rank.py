"""The benchmark of one rank's computing, on a small model: its parts run by themselves, with finite numbers."""

from __future__ import annotations

from benchmarks.cut_rank import main


def test_one_rank_of_a_tensor_axis_runs_without_the_others() -> None:
    row = main(["demo", "--tensor", "2", "--batch", "2", "--seq", "16"])
    assert (row["layout"], row["blocks"]) == ("megatron", 4)
    assert row["measured_seconds"] > 0
    assert row["forecast_seconds"] > 0
