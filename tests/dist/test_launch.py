"""Several processes through anyfit.start and `anyfit fit`: one plan, each its share, the same weights as one process makes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import anyfit
from anyfit.running import checkpoint
from anyfit.running.launch import Rank, meeting_place
from anyfit.values.plan import Placement, Plan
from tests.machines import small_machine
from tests.oracle import assert_bit_equal, assert_close

from . import launched
from .pool import pool_of
from .script import ROWS, data, job_for

DIVIDED = {
    "optimizer divided": Placement(optimizer_shards=2),
    "all divided": Placement(weight_shards=2, gradient_shards=2, optimizer_shards=2),
    "all divided, on the host": Placement("host", "host", "host", "host", False, 2, 2, 2),
}
SMALL = ["--batch", "4", "--seq", "32", "--dtype", "fp32"]


def plainly(batches: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """Plain PyTorch on these batches, of any size each."""
    job = job_for(**options)
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer = job.optimizer(model)
    for batch in batches:
        loss: Any = job.loss(model, batch)
        loss.backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


# ---------------------------------------------------------------------- one plan for all


def test_rank_0_plans_for_all_and_the_weights_are_those_of_one_process() -> None:
    found = pool_of(2).run(launched.decisions)
    assert found[0]["plan"] == found[1]["plan"]
    plan = Plan.from_json(found[0]["plan"])
    assert (plan.ranks, plan.share, plan.batch_size) == (2, ROWS // 2, ROWS)
    assert plan.decision("ranks").choice.startswith("2: ")
    assert plan.decision("links").choice == "assumed"
    assert found[0]["losses"] == found[1]["losses"]
    alone = launched.decisions()
    assert found[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert_close(found[0]["weights"], alone["weights"], 1e-5)
    assert_bit_equal(found[0]["weights"], found[1]["weights"])


def test_where_one_device_has_no_room_state_is_divided() -> None:
    found = pool_of(2).run(launched.decisions, limit="60KiB")
    plan = Plan.from_json(found[0]["plan"])
    assert plan.forecast.needed_bytes <= 60 * 2**10
    assert {each.optimizer_shards for each in plan.chunks} == {2}
    assert " would need " in plan.decision("ranks").why
    assert_close(found[0]["weights"], launched.decisions()["weights"], 1e-5)


def test_ranks_draw_different_random_numbers_the_same_in_every_run() -> None:
    first, again = (pool_of(2).run(launched.decisions, dropout=0.5) for _ in range(2))
    assert first[0]["drawn"] != first[1]["drawn"]
    assert [each["drawn"] for each in first] == [each["drawn"] for each in again]
    assert first[0]["losses"] == again[0]["losses"]
    assert_bit_equal(first[0]["weights"], first[1]["weights"])


@pytest.mark.parametrize("what", ["seed", "plan"])
def test_ranks_that_do_not_have_the_same_say_on_all_which_one_differs(what: str) -> None:
    said = pool_of(2).run(launched.refusal, what, 1)
    assert said[0] == said[1]
    assert said[0].startswith(f"ValueError: rank 1 has another {what} than rank 0")


def test_a_model_that_differs_is_named_before_anything_is_exchanged() -> None:
    said = pool_of(2).run(launched.refusal, "model", 1)
    assert all("rank 1 has another model than rank 0" in each for each in said)


@pytest.mark.parametrize("what", launched.OTHERS)
def test_ranks_that_would_train_in_different_ways_are_refused_by_name(what: str) -> None:
    said = pool_of(2).run(launched.refusal, what, 1)
    assert said[0] == said[1]
    assert said[0].startswith(f"ValueError: rank 1 has another {what} than rank 0: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_learning_rate_that_one_rank_changes_is_refused_in_that_step_and_all_may_go_on(rank: int) -> None:
    found = pool_of(2).run(launched.trained_apart, "lr", rank)
    rates = ["0.003", "0.003"]
    rates[rank] = "0.1"
    assert found[0]["said"] == found[1]["said"]
    (said,) = found[0]["said"]
    assert said.startswith(f"rank 1 has lr {rates[1]} in group 0, rank 0 has {rates[0]}, in step 4: their weights would part")
    assert [each["steps"] for each in found] == [5, 5]
    batches: list[Tensor] = [torch.stack(batch) for batch in launched.drawn()]
    assert_close(found[0]["weights"], plainly([*batches[:3], *batches[4:6]]), 1e-5)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("batch", "rank 1 has batches drawn from run.loader 5, rank 0 has 4, in step 4"),
        ("epochs", "rank 1 has epochs of run.loader 2, rank 0 has 1, in step 1"),
    ],
)
def test_a_rank_at_another_place_of_the_data_is_refused_by_name(what: str, says: str) -> None:
    found = pool_of(2).run(launched.trained_apart, what, 1)
    assert found[0]["said"] == found[1]["said"]
    assert found[0]["said"][0].startswith(says)


def test_a_batch_without_weight_is_left_out_on_several_ranks_as_on_one() -> None:
    alone, *found = launched.without_weight(2, 1), *pool_of(2).run(launched.without_weight, 2, 2)
    for each in found:
        assert (each["skipped"], each["steps"]) == (alone["skipped"], alone["steps"]) == (1, 5)
        assert each["losses"] == pytest.approx(alone["losses"], rel=1e-5, nan_ok=True)
        assert_close(each["weights"], alone["weights"], 1e-5)


def test_a_verdict_of_rank_0_reaches_all() -> None:
    said = pool_of(2).run(launched.refusal, "memory", 0)
    assert said[0] == said[1]
    assert said[0].startswith("NoPlan: ")
    said = pool_of(2).run(launched.refusal, "batch", 0)
    assert (
        said
        == ["ValueError: mesh tensor=1: batch_size is 7; it must be a multiple of the 2 ranks of the data axis, such as 8"] * 2
    )


def test_the_same_script_says_the_same_again_after_a_refusal() -> None:
    pool_of(2).run(launched.refusal, "seed", 1)
    pool_of(2).run(launched.decisions)


# ---------------------------------------------------------------------- data that ends


@pytest.mark.parametrize("placement", DIVIDED.values(), ids=DIVIDED)
@pytest.mark.parametrize("batches", [[7, 10], [10, 7]], ids=str)
def test_a_rank_whose_data_ends_early_takes_part_with_nothing_of_its_own(placement: Placement, batches: list[int]) -> None:
    found = pool_of(2).run(launched.uneven, placement, batches, weighted=False, evaluates=False)
    longer = batches.index(10)
    whole = data(ROWS * 10).split(ROWS)
    rows = [each if step < 7 else each.chunk(2)[longer] for step, each in enumerate(whole)]
    assert_close(found[0][1], plainly(rows, clip_norm=1.0), 1e-5)
    assert [len(losses) for losses, _ in found] == batches


def test_so_it_does_with_weighted_losses_evaluations_and_reads() -> None:
    found = pool_of(2).run(launched.uneven, DIVIDED["all divided"], [3, 5], weighted=True, evaluates=True)
    assert_bit_equal(found[0][1], found[1][1])


@pytest.mark.parametrize("weighted", [False, True])
def test_an_evaluation_is_the_mean_over_the_samples_of_all_ranks(weighted: bool) -> None:
    found = pool_of(2).run(launched.evaluated, DIVIDED["all divided"], [3, 11], weighted)
    with launched.start(Placement(), 1) as run, torch.no_grad():
        job = job_for()
        value: Any = (launched.weighted_loss if weighted else job.loss)(run.model, data(14))
    expected = float(value[0] / value[1]) if weighted else float(value)
    assert found == pytest.approx([expected] * 2, rel=1e-6)


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("placement", DIVIDED.values(), ids=DIVIDED)
def test_a_checkpoint_of_two_ranks_goes_on_exactly_on_two(placement: Placement, tmp_path: Path) -> None:
    whole = pool_of(2).run(launched.saved, placement, 2, tmp_path / "whole", 0, 8, None)
    pool_of(2).run(launched.saved, placement, 2, tmp_path / "5", 0, 5, None)
    found = pool_of(2).run(launched.saved, placement, 2, tmp_path / "8", 5, 8, tmp_path / "5")
    assert_bit_equal(found[0]["weights"], whole[0]["weights"])
    assert [each["drawn"] for each in found] == [each["drawn"] for each in whole]
    assert whole[0]["drawn"] != whole[1]["drawn"]
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "5", "8"}


def test_a_checkpoint_goes_on_on_any_number_of_ranks_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pool_of(2).run(launched.saved, DIVIDED["all divided"], 2, tmp_path / "2", 0, 2, None)
    opened = checkpoint.open(tmp_path / "2")
    weights = {name: opened.read(name) for name in opened.weights}
    with launched.start(Placement(), 1, tmp_path / "2") as run:
        assert run.steps == 2
        assert_bit_equal(run.state_dict(), weights)
        said = capfd.readouterr().err
        assert "was saved by 2 ranks, and 1 go on: the same weights and data, other random numbers" in said
    alone = launched.saved(Placement(), 1, tmp_path / "4", 2, 4, tmp_path / "2")
    assert alone["weights"].keys() == weights.keys()
    four = Placement(weight_shards=4, gradient_shards=4, optimizer_shards=4)
    found = pool_of(4).run(launched.saved, four, 4, tmp_path / "6", 4, 6, tmp_path / "4")
    assert len({each["drawn"] for each in found}) == 4


def test_a_checkpoint_that_rank_0_cannot_write_is_an_error_on_all_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = pool_of(2).run(launched.saved_in_vain, DIVIDED["all divided"], tmp_path / "file" / "checkpoint")
    assert said[0] == said[1]
    assert "could not write a checkpoint" in said[0]


# ---------------------------------------------------------------------- real launchers


def run_all(*commands: list[str], **variables: str) -> list[str]:
    """Each command as a process, all at once; what they print."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])} | variables
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(said)
    return said


def found_in(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found{rank}.json").read_text()) for rank in range(ranks)]


def test_torchrun_and_srun_start_the_same_run(tmp_path: Path, free_port: int) -> None:
    module = ["-m", "tests.dist.script"]
    torchrun, srun = tmp_path / "torchrun", tmp_path / "srun"
    torchrun.mkdir()
    srun.mkdir()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_all([*launcher, *module, str(torchrun), "--dropout", "0.1"])
    step = {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    tasks = [["env", f"SLURM_PROCID={rank}", f"SLURM_LOCALID={rank}", sys.executable, *module, str(srun)] for rank in range(2)]
    run_all(*([*task, "--dropout", "0.1"] for task in tasks), **step, MASTER_PORT=str(free_port))
    assert found_in(torchrun, 2) == found_in(srun, 2)
    assert {each["steps"] for each in found_in(srun, 2)} == {10}
    assert len({each["weights"] for each in found_in(srun, 2)}) == 1
    assert len({each["drawn"] for each in found_in(srun, 2)}) == 2


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def test_fit_starts_ranks_that_write_one_folder_and_talk_with_one_voice(tmp_path: Path) -> None:
    fit = [sys.executable, "-m", "anyfit", "fit", "--steps", "12", *SMALL, "--save-every", "5"]
    said, _ = run_all([*fit, "--ranks", "2", "--folder", str(tmp_path / "two")], [*fit, "--folder", str(tmp_path / "one")])
    assert said.count("step 10 of 12") == 1
    assert said.count("what it writes now") == 1
    assert "ranks 2: " in " ".join(said.split())
    folder = tmp_path / "two"
    assert {path.name for path in folder.iterdir()} == {
        "run.json", "plan.json", "machine.json", "metrics.jsonl", "checkpoints", "weights",
    }  # fmt: skip
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["00000010", "00000012"]
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == list(range(1, 13))
    two, one = (load_file(tmp_path / name / "weights" / "model.safetensors") for name in ("two", "one"))
    for name in [name for name in one if "queries_keys_values.bias" in name]:  # the keys' has no gradient but its rounding
        del one[name], two[name]
    assert_close(two, one, 1e-4)  # biases begin at 0, and Adam's first steps are all but signs; test_engine.py is exact


def test_a_script_of_ranks_with_uneven_data_ends_and_is_saved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    script = Path(__file__).with_name("script.py")
    fit = [sys.executable, "-m", "anyfit", "fit", "--gpus", "2", "--folder", str(tmp_path / "run")]
    run_all([*fit, str(script), str(out), "--steps-of-rank", "4", "6"])
    assert [each["steps"] for each in found_in(out, 2)] == [6, 6]
    assert (tmp_path / "run" / "checkpoints" / "00000006").is_dir()


def test_the_slurm_example_sets_what_a_launch_reads(root: Path) -> None:
    text = (root / "examples" / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    nodes, tasks = int(options["nodes"]), int(options["ntasks-per-node"])
    assert int(options["gpus-per-node"]) == tasks
    assert len(re.findall(r"^    srun .*anyfit fit --(?:resume|folder) \"\$FOLDER\"", text, re.MULTILINE)) == 2
    # What Slurm says to the last task of such a step.
    step = {
        "SLURM_JOB_ID": "812", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_NTASKS": str(nodes * tasks),
        "SLURM_PROCID": str(nodes * tasks - 1), "SLURM_LOCALID": str(tasks - 1),
    }  # fmt: skip
    assert Rank.from_environment(step) == Rank(nodes * tasks - 1, nodes * tasks, tasks - 1)
    assert meeting_place(step)[0] == "gpu07"


def test_one_process_under_torchrun_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with anyfit.start(job_for(), machine=small_machine()) as run:
        assert not run.ranks.are_several
        assert run.team is None
