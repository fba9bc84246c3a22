"""Ranks that train a divided, offloaded model as one process does: a small one here, and what was recorded of a large one."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import shared_gpu

RECORD = Path(__file__).parents[1] / "benchmarks/results/shared-gpu.json"


def test_two_ranks_train_as_one() -> None:
    found = shared_gpu.compared("tiny", 2, 3)
    assert found["tensors"] > 20
    assert found["losses_apart"] < 1e-5
    assert found["weights_apart"] < 1e-5
    assert found["together"]["held_bytes"]["host"] > 0 == found["alone"]["held_bytes"]["host"]


def test_two_ranks_of_a_gpu_trained_as_one() -> None:
    found = json.loads(RECORD.read_text())["figures"]
    assert found["model"] == "1b"
    assert found["losses_apart"] < 1e-5
    assert found["weights_apart"] < 1e-5
