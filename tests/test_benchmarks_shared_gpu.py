"""Ranks that train a divided, offloaded model as one process does: a small one here, and what was recorded of a large one."""

from __future__ import annotations

import pytest

from benchmarks import record, shared_gpu


@pytest.mark.full
def test_two_ranks_train_as_one() -> None:
    found = shared_gpu.compared("tiny", 2, 3)
    assert found["tensors"] > 20
    assert found["losses_apart"] < 1e-5
    assert found["weights_apart"] < 1e-5
    assert found["together"]["held_bytes"]["host"] > 0 == found["alone"]["held_bytes"]["host"]


@pytest.mark.parametrize("recorded", record.recordings("shared-gpu"), ids=lambda each: each.name)
def test_two_ranks_of_a_gpu_trained_as_one(recorded: record.Recording) -> None:
    found = recorded.figures
    assert found["model"] == "1b"
    assert found["losses_apart"] < 1e-5
    assert found["weights_apart"] < 1e-5
