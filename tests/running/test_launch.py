"""`anyfit fit` as a process: killed, interrupted, resumed, repeated."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from anyfit.running.launch import SLURM_PORTS, Alarms, Rank, first_node, meeting_place
from tests.conftest import FULL

SMALL = ["--batch", "4", "--seq", "32", "--dtype", "fp32", "--save-every", "10"]
STEPS = 40


def fit(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "anyfit", "fit", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    file = folder / "metrics.jsonl"
    while process.poll() is None:
        if file.exists() and len(file.read_text().splitlines()) >= step:
            return
        time.sleep(0.005)
    raise AssertionError(f"ended before step {step}: {process.communicate()[0]}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    output = finish(fit("--folder", folder, "--steps", str(STEPS), *SMALL))
    assert f"step {STEPS} of {STEPS}" in output
    assert "against forecast" in output
    return folder


def assert_same_run(folder: Path, other: Path) -> None:
    mine, theirs = load_file(folder / "weights" / "model.safetensors"), load_file(other / "weights" / "model.safetensors")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    lines = [(each / "metrics.jsonl").read_text().splitlines() for each in (folder, other)]
    curves = [[json.loads(line)["loss"] for line in each] for each in lines]
    assert curves[0] == curves[1]
    assert len(curves[0]) == STEPS


def test_a_run_folder_holds_plan_machine_metrics_checkpoint_and_weights(uninterrupted: Path) -> None:
    names = {path.name for path in uninterrupted.iterdir()}
    assert names == {"run.json", "plan.json", "machine.json", "metrics.jsonl", "checkpoints", "weights"}
    assert sorted(path.name for path in (uninterrupted / "checkpoints").iterdir()) == ["00000030", "00000040"]


@pytest.mark.parametrize("moment", random.Random(7).sample(range(STEPS), 8 if FULL else 1))
def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bits(uninterrupted: Path, tmp_path: Path, moment: int) -> None:
    folder = tmp_path / "run"
    process = fit("--folder", folder, "--steps", str(STEPS), *SMALL)
    wait_for_step(folder, moment, process)
    time.sleep(random.Random(moment).random() * 0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output = finish(fit("--resume", folder))
    assert "going on from step" in output
    assert_same_run(folder, uninterrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.full)])
def test_told_to_stop_it_saves_says_where_and_ends_with_the_signals_status(
    uninterrupted: Path, tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    process = fit("--folder", folder, "--steps", str(STEPS), *SMALL)
    wait_for_step(folder, 13, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == -number, output
    assert f"anyfit fit --resume {folder}" in output
    saved = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert saved >= 13
    assert f"going on from step {saved}" in finish(fit("--resume", folder))
    assert_same_run(folder, uninterrupted)


@pytest.mark.full
def test_two_deterministic_runs_are_bit_equal_and_a_plan_file_serves(uninterrupted: Path, tmp_path: Path) -> None:
    options = ["--steps", str(STEPS), *SMALL, "--deterministic", "--plan", uninterrupted / "plan.json"]
    for name in ("a", "b"):
        finish(fit("--folder", tmp_path / name, *options))
    assert_same_run(tmp_path / "a", tmp_path / "b")


SCRIPT = """
import sys
import torch, anyfit
from anyfit import demo

job = demo.job(batch_size=4, length=32, precision="fp32")
run = anyfit.start(job)
print("arguments", sys.argv[1:], "rank", __name__)
for batch in run.loader(demo.SourceCode(32, limit_bytes=4000)):
    loss = run.step(batch)
    if run.steps == 20 and "--fail" in sys.argv:
        raise LookupError("my own mistake")
"""


def test_a_script_that_was_told_to_stop_says_the_whole_command_that_goes_on(tmp_path: Path) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT.replace("    if run.steps", "    __import__('time').sleep(0.02)\n    if run.steps"))
    process = fit("--folder", folder, script, "two words")
    wait_for_step(folder, 3, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    (again,) = re.findall(r"go on with: anyfit fit (.*)$", output, re.MULTILINE)
    assert shlex.split(again) == ["--resume", str(folder), str(script), "two words"]
    said = finish(fit(*shlex.split(again)))
    assert "arguments ['two words']" in said


def test_a_script_gets_a_folder_checkpoints_and_exact_resume(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    output = finish(fit("--folder", whole, "--save-every", "8", script, "--lr", "3"))
    assert "arguments ['--lr', '3'] rank __main__" in output
    process = fit("--folder", broken, "--save-every", "8", script, "--fail")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "LookupError: my own mistake" in output
    finish(fit("--resume", broken, script))
    mine, theirs = load_file(broken / "weights" / "model.safetensors"), load_file(whole / "weights" / "model.safetensors")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_script_runs_under_torchrun_and_slurm_variables(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for variables in (
        {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"},
    ):
        command = [sys.executable, "-m", "anyfit", "fit", "--folder", str(tmp_path / next(iter(variables))), str(script)]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr


def test_the_rank_comes_from_torchrun_or_slurm_or_is_alone() -> None:
    assert Rank.from_environment({}) == Rank(0, 1, 0)
    assert Rank.from_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == Rank(3, 4, 1)
    task = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}
    assert Rank.from_environment({**task, "SLURM_STEP_ID": "0"}) == Rank(5, 8, 2)
    assert Rank.from_environment(task) == Rank(0, 1, 0)  # a batch script without srun is one process
    assert Rank.from_environment({"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}) == Rank(0, 1, 0)
    with pytest.raises(ValueError, match="WORLD_SIZE is not"):
        Rank.from_environment({"RANK": "3", "LOCAL_RANK": "1"})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0: must be a whole number, from 1 up; unset it, or start with torchrun"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE=-2: must be a whole number, from 1 up"),
        ({"RANK": "2"}, "RANK=2: must be a whole number, from 0 to 1 of WORLD_SIZE=2"),
        ({"RANK": "-1"}, "RANK=-1: must be a whole number, from 0 to 1 of WORLD_SIZE=2"),
        ({"RANK": "x"}, "RANK=x: must be a whole number"),
        ({"RANK": ""}, "RANK=: must be a whole number"),
        ({"RANK": "1.0"}, "RANK=1.0: must be a whole number"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2: must be a whole number, from 0 to 1 of 2 on a node"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK=1: must be a whole number, 0 of 1 on a node"),
    ],
)
def test_a_rank_that_cannot_be_is_refused_by_its_variable(changed: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        Rank.from_environment({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **changed})


@pytest.mark.parametrize("given", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_one_variable_of_a_launcher_alone_is_refused_by_name(given: str) -> None:
    with pytest.raises(ValueError, match=f"^{given}=0 is set but .* set RANK, WORLD_SIZE, LOCAL_RANK, all of them or none"):
        Rank.from_environment({given: "0"})


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0: must be a whole number, from 1 to 65535"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000: must be"),
        ({"MASTER_PORT": "port"}, "MASTER_PORT=port: must be"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set, and ranks do not know where to meet; set it to a free port there"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set, and ranks do not know where to meet; set it to the name of rank 0's"),
    ],
)
def test_a_meeting_place_that_cannot_be_is_refused_by_its_variable(changed: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        meeting_place({"MASTER_ADDR": "here", "MASTER_PORT": "7", **changed})


def test_ranks_meet_where_torchrun_says_or_on_the_first_node_of_a_slurm_step() -> None:
    assert meeting_place({"MASTER_ADDR": "here", "MASTER_PORT": "7", "SLURM_JOB_NODELIST": "a1"}) == ("here", 7)
    job = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "gpu[03-05],x"}
    host, port = meeting_place(job)
    assert host == "gpu03"
    assert port in SLURM_PORTS
    assert meeting_place({**job, "SLURM_STEP_ID": "1"})[1] != port
    assert meeting_place({**job, "SLURM_STEP_NODELIST": "gpu05"}) == ("gpu05", port)
    assert [first_node(each) for each in ("n1,n2", "r[1-3]", "r2n[07,9]s[1-2],q", "a-b[3]")] == ["n1", "r1", "r2n07s1", "a-b3"]
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        meeting_place({})


def test_alarms_tell_of_spikes_nonsense_and_steps_left_out() -> None:
    alarms = Alarms()
    calm = [alarms.listen(step, 2.0 + 0.01 * (step % 3), skipped=0) for step in range(1, 30)]
    assert not any(calm)
    assert "jumped to 9.000" in alarms.listen(30, 9.0, skipped=0)[0]
    assert "the loss is nan" in alarms.listen(31, float("nan"), skipped=0)[0]
    assert "left out" in alarms.listen(32, 2.0, skipped=1)[0]
    assert alarms.listen(33, 2.0, skipped=1) == []
