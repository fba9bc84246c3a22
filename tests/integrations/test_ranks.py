"""Scripts on AnyfitTrainer and on Trainer, in two processes over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .trainers import assert_close

pytestmark = pytest.mark.full  # each of these starts two processes, which import transformers


def run(name: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """What each of two ranks has found."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launcher, "-m", "tests.integrations.script", name, str(folder), *options]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return run("plain", folder)[0]


def test_two_ranks_log_the_same_as_under_ddp_and_go_on_from_a_checkpoint(folder: Path, plain: dict[str, Any]) -> None:
    for found in run("anyfit", folder):
        assert_close(found["logged"], plain["logged"])
        assert found["weights"] == pytest.approx(plain["weights"], rel=1e-6)
    for found in run("anyfit", folder, "--resume", "checkpoint-2"):
        assert_close(found["logged"][:-1], plain["logged"][:-1])  # the last is a mean over the steps since
        assert found["weights"] == pytest.approx(plain["weights"], rel=1e-6)


def test_two_ranks_with_little_memory_cut_batches_shard_and_log_the_same(folder: Path, plain: dict[str, Any]) -> None:
    for found in run("anyfit", folder, "--device-memory", "420KiB"):
        assert found["micro_batch"] < 4
        assert found["weight_shards"] == 2
        assert found["evaluated"] == pytest.approx(plain["evaluated"], rel=1e-6)  # after training, placed once more
        assert_close(found["logged"], plain["logged"])
        assert found["weights"] == pytest.approx(plain["weights"], rel=1e-6)
