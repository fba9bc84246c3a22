"""Ranks that fail, die, stall, are told to stop, and are started again: real processes, and what a person sees of it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from anyfit import Plan
from anyfit.running import checkpoint
from tests.conftest import FULL
from tests.plans import hand_written

from .script import job_for

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("script.py")
DEMO = ["--batch", "4", "--seq", "16", "--dtype", "fp32", "--save-every", "4"]
STEPS = 16
END_SECONDS = 30.0
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start(*command: str | Path, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(
        [sys.executable, *map(str, command)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def fit(*arguments: str | Path) -> subprocess.Popen[str]:
    return start("-m", "anyfit", "fit", "--ranks", "2", *arguments)


def tasks(port: int, *arguments: str | Path, count: int = 2) -> list[subprocess.Popen[str]]:
    """Tasks as srun starts them: nobody looks after them but they themselves."""
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    step = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": str(count), **meet}
    return [start(SCRIPT, *arguments, **step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(count)]


def ended(process: subprocess.Popen[str], seconds: float = 240) -> str:
    return process.communicate(timeout=seconds)[0]


def rank_of(pid: int) -> int:
    return int(psutil.Process(pid).environ().get("RANK", -1))


def pid_of(launcher: subprocess.Popen[str], rank: int) -> int:
    return next(each.pid for each in psutil.Process(launcher.pid).children(recursive=True) if rank_of(each.pid) == rank)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    file = folder / "metrics.jsonl"
    while process.poll() is None:
        if file.exists() and len(file.read_text().splitlines()) >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"ended before step {step}: {ended(process)}")


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


# ---------------------------------------------------------------------- failing


@pytest.mark.parametrize(("rank", "way"), [(1, "fit"), (0, "srun"), pytest.param(1, "srun", marks=pytest.mark.full)])
def test_the_first_error_is_shown_once_and_all_ranks_end(rank: int, way: str, tmp_path: Path, free_port: int) -> None:
    arguments = [str(tmp_path), "--fail", str(rank), "4"]
    processes = [fit("--folder", tmp_path / "run", SCRIPT, *arguments)] if way == "fit" else tasks(free_port, *arguments)
    said = "".join(map(ended, processes))
    assert said.count("LookupError: a mistake of mine") == 1
    assert said.count("Traceback (most recent call last)") == 1
    assert all(process.returncode != 0 for process in processes)
    assert 1 in [process.returncode for process in processes]


@pytest.mark.parametrize("end", ["with", pytest.param("exit", marks=pytest.mark.full)])
def test_a_rank_that_fails_waits_for_no_other_nor_does_one_at_its_end_for_it(end: str, tmp_path: Path, free_port: int) -> None:
    processes = tasks(free_port, tmp_path, "--fail", "1", "5", "--steps-of-rank", "4", "6", "--end", end)
    said = "".join(map(ended, processes))
    assert said.count("Traceback (most recent call last)") == said.count("LookupError: a mistake of mine") == 1
    assert all(process.returncode != 0 for process in processes)


def test_what_rank_0_cannot_plan_is_one_line_and_its_status(tmp_path: Path) -> None:
    process = fit("--folder", tmp_path / "run", "--device-memory", "1MiB", *DEMO, "--steps", "4")
    said = ended(process)
    assert process.returncode == 3, said
    assert said.count("anyfit: ") == 1
    assert "Traceback" not in said


@pytest.mark.full
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_a_mesh_that_is_typed_holds_the_model_together(axis: str, tmp_path: Path) -> None:
    process = fit("--folder", tmp_path / "run", "--mesh", f"{axis}=2", *DEMO, "--steps", "3")
    said = ended(process)
    assert process.returncode == 0, said
    assert Plan.load(tmp_path / "run" / "plan.json").mesh[axis] == 2


def test_a_rank_that_was_killed_is_named_by_those_that_notice(tmp_path: Path, free_port: int) -> None:
    processes = tasks(free_port, tmp_path, "--kill", "1", "4")
    ended(processes[1])
    began = time.monotonic()
    said = ended(processes[0])
    assert time.monotonic() - began < END_SECONDS
    assert "anyfit: rank 1 is gone without a word" in said
    assert "of step 5" in said
    assert "Traceback" not in said
    assert (processes[0].returncode, processes[1].returncode) == (1, -signal.SIGKILL)


def test_a_rank_that_the_kernel_kills_is_named_by_the_launcher_with_its_signal(tmp_path: Path) -> None:
    process = fit("--folder", tmp_path / "run", SCRIPT, tmp_path, "--kill", "1", "3")
    said = ended(process)
    assert "anyfit: rank 1 was ended by SIGKILL: the kernel ends a process so when the host has no memory left" in said
    assert "Errno 22" not in said
    assert "Traceback" not in said
    assert process.returncode == 128 + signal.SIGKILL


def staged(folder: Path, stages: tuple[tuple[int, int], ...]) -> Path:
    """A plan of stages, each on a rank of its own."""
    ranks = len(stages)
    plan = hand_written(job_for(), ranks=ranks, pipeline=ranks, stages=stages, accumulation=4)
    file = folder / "plan.json"
    plan.save(file)
    return file


TWO, THREE = ((0, 0), (1, 2)), ((0, 0), (1, 1), (2, 2))


@pytest.mark.parametrize(
    ("rank", "stages"), [(0, TWO), *(pytest.param(rank, THREE, marks=pytest.mark.full) for rank in range(3))]
)
def test_a_stage_that_is_killed_is_named_ends_all_others_and_leaves_a_whole_checkpoint(
    rank: int, stages: tuple[tuple[int, int], ...], tmp_path: Path, free_port: int
) -> None:
    plan = staged(tmp_path, stages)
    processes = tasks(free_port, tmp_path, "--plan", plan, "--save", "--within", "kill", str(rank), "4", count=len(stages))
    killed = processes.pop(rank)
    ended(killed)
    began = time.monotonic()
    said = "".join(map(ended, processes))
    assert time.monotonic() - began < END_SECONDS
    assert killed.returncode == -signal.SIGKILL
    assert all(process.returncode != 0 for process in processes)
    assert f"rank {rank} is gone" in said
    assert "Traceback" not in said
    assert checkpoint.check(tmp_path / "4") == tmp_path / "4"
    assert not (tmp_path / "5").exists()


@pytest.mark.full
def test_a_mistake_in_one_stage_ends_all_and_is_shown_once(tmp_path: Path, free_port: int) -> None:
    processes = tasks(free_port, tmp_path, "--plan", staged(tmp_path, TWO), "--within", "fail", "1", "2")
    began = time.monotonic()
    said = "".join(map(ended, processes))
    assert time.monotonic() - began < 4 * END_SECONDS  # with the start
    assert said.count("LookupError: a mistake of mine") == 1
    assert "of the pipeline has failed" not in said
    assert all(process.returncode != 0 for process in processes)


@pytest.mark.full
def test_a_stage_that_hangs_is_named_with_what_the_others_wait_for(tmp_path: Path, free_port: int) -> None:
    processes = tasks(free_port, tmp_path, "--plan", staged(tmp_path, TWO), "--within", "stall", "1", "2", "--hang-seconds", "3")
    said = "".join(map(ended, processes))
    assert said.count("anyfit: ") == 1
    assert "rank 0 has waited" in said
    assert "the backward of micro-batch" in said
    assert "by stage 1 of the pipeline" in said
    assert all(process.returncode != 0 for process in processes)


def test_ranks_that_do_not_agree_how_many_they_are_do_not_wait_for_each_other(tmp_path: Path, free_port: int) -> None:
    meet = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port)}
    ranks = [start(SCRIPT, tmp_path, **meet, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(2 + rank)) for rank in range(2)]
    assert "rank 1 is one of 3 (WORLD_SIZE, or SLURM_NTASKS), and rank 0 of 2: set it alike" in ended(ranks[1])
    ranks[0].kill()
    ended(ranks[0])


@pytest.mark.full
def test_a_rank_without_the_one_that_holds_the_store_ends_too(tmp_path: Path, free_port: int) -> None:
    processes = tasks(free_port, tmp_path, "--kill", "0", "4")
    ended(processes[0])
    began = time.monotonic()
    said = ended(processes[1])
    assert time.monotonic() - began < END_SECONDS
    assert processes[1].returncode not in (0, None)
    assert said.count("anyfit: ") == 1
    assert "rank 0 is gone" in said or "rank 1 has lost the others" in said
    assert "Traceback" not in said


def test_a_hang_says_what_is_waited_for_and_who_is_elsewhere(tmp_path: Path, free_port: int) -> None:
    processes = tasks(free_port, tmp_path, "--stall", "1", "4", "--hang-seconds", "3")
    began = time.monotonic()
    said = "".join(map(ended, processes))
    assert time.monotonic() - began < 120
    assert said.count("anyfit: ") == 1
    assert "rank 0 has waited" in said
    assert "chunk 0 (blocks.0.0.weight to head.bias)" in said
    assert "of step 5" in said
    assert "rank 1 is after step 4" in said
    assert all(process.returncode != 0 for process in processes)


def test_a_rank_that_catches_its_own_error_and_goes_on_is_named(tmp_path: Path, free_port: int) -> None:
    processes = tasks(free_port, tmp_path, "--catch", "1", "4")
    said = "".join(map(ended, processes))
    assert said.count("anyfit: ") == 1
    assert "anyfit: rank 1 failed when about to make step 5, and went on: LookupError: a mistake of mine. Rank 0 waits" in said
    assert "Traceback" not in said
    assert all(process.returncode != 0 for process in processes)


def test_a_save_on_one_rank_alone_is_an_error_and_no_hang(tmp_path: Path, free_port: int) -> None:
    said = "".join(map(ended, tasks(free_port, tmp_path, "--save-alone")))
    assert "is about to make step 4, and another rank to save" in said or "is about to save" in said
    assert said.count("Traceback (most recent call last)") == 1


# ---------------------------------------------------------------------- told to stop, and started again


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    process = fit("--folder", folder, "--steps", str(STEPS), *DEMO)
    said = ended(process)
    assert process.returncode == 0, said
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    mine, theirs = load_file(folder / "weights" / "model.safetensors"), load_file(other / "weights" / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    lines = [(each / "metrics.jsonl").read_text().splitlines() for each in (folder, other)]
    curves = [[json.loads(line)["loss"] for line in each] for each in lines]
    assert curves[0] == curves[1]
    assert len(curves[0]) == STEPS


MOMENTS = random.Random(11).sample(range(1, STEPS), 8 if FULL else 3)


@pytest.mark.parametrize(("number", "moment"), list(enumerate(MOMENTS)))
def test_a_rank_killed_at_any_moment_is_started_again_and_the_weights_are_the_same(
    uninterrupted: Path, tmp_path: Path, number: int, moment: int
) -> None:
    folder = tmp_path / "run"
    options = ["--folder", str(folder), "--steps", str(STEPS), *DEMO]
    if number % 3 == 0:
        process = start(*TORCHRUN[1:], "--max-restarts", "3", "-m", "anyfit", "fit", *options)
    else:
        process = fit("--restarts", "3", *options)
    wait_for_step(folder, moment, process)
    time.sleep(random.Random(moment).random() * 0.02)
    os.kill(pid_of(process, number % 2), signal.SIGKILL)
    said = ended(process)
    assert process.returncode == 0, said
    assert "going on from step" in said
    assert "Traceback" not in said
    assert_same_run(folder, uninterrupted)


@pytest.mark.parametrize(
    ("number", "whom"),
    [
        (signal.SIGTERM, "rank 1"),
        pytest.param(signal.SIGINT, "launcher", marks=pytest.mark.full),
        pytest.param(signal.SIGTERM, "launcher", marks=pytest.mark.full),
    ],
)
def test_told_to_stop_all_save_after_the_same_step_and_end_with_the_signals_status(
    uninterrupted: Path, tmp_path: Path, number: int, whom: str
) -> None:
    folder = tmp_path / "run"
    process = fit("--folder", folder, "--steps", str(STEPS), *DEMO)
    wait_for_step(folder, 5, process)
    os.kill(process.pid if whom == "launcher" else pid_of(process, 1), number)
    said = ended(process)
    assert process.returncode == -number, said
    assert said.count(f"go on with: anyfit fit --ranks 2 --resume {folder}") == 1
    saved = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert saved >= 5
    again = fit("--resume", folder)
    said = ended(again)
    assert again.returncode == 0, said
    assert f"going on from step {saved}" in said
    assert_same_run(folder, uninterrupted)
