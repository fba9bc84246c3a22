"""A plan with a pipeline axis trains what a plain loop trains, whatever else it does to the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from anyfit.values.cuts import Cut
from anyfit.values.plan import Placement
from tests.oracle import assert_close
from tests.plans import AWAY, AWAY_ON_DISK, DISK_STREAMED, ON_HOST, STREAMED

from .pipeline_work import (
    PipelineCase,
    Told,
    by_torch,
    ends_early,
    ends_early_plainly,
    opened,
    opened_plainly,
    plainly,
    recomputed,
    refused,
    replaced,
    resumed,
    saved,
    started_by_plan,
    trained,
    used,
    used_plainly,
)
from .pool import pool_of

SHARDED = Placement(weight_shards=2, gradient_shards=2, optimizer_shards=2)
ZERO_1 = Placement(optimizer_shards=2)
ZERO_2 = Placement(gradient_shards=2, optimizer_shards=2)
STREAMED_SHARDS = Placement(optimizer="host", weight_shards=2, gradient_shards=2, optimizer_shards=2)
SHARDED_AWAY = Placement("host", "host", "host", "host", weight_shards=2, gradient_shards=2, optimizer_shards=2)


def assert_equal(found: list[Told], wanted: Told, tolerance: float = 1e-6, skipped: int = 0) -> None:
    for each in found:
        assert each.losses == pytest.approx(wanted.losses[skipped:], rel=tolerance)
        assert each.norms == pytest.approx(wanted.norms[skipped:], rel=20 * tolerance)
        assert each.weights.keys() == wanted.weights.keys()
        for name, expected in wanted.weights.items():
            worst, largest = (float(x.double().abs().max()) for x in (each.weights[name] - expected, expected))
            assert worst <= tolerance * max(largest, 1e-2), f"{name}: {worst:.2e} of {largest:.2e}"


FAST = [
    (PipelineCase("tied by hand", placements=(AWAY,), activations="recompute", delays=1), 2),
    (PipelineCase("tied by hand", placements=(AWAY_ON_DISK,)), 2),
    (PipelineCase("unet", chunks=2), 2),
    (PipelineCase("tied by hand", placements=(SHARDED,), accumulation=2), 4),
    (PipelineCase("gpt2, dropout", activations="recompute", lengths=(12, 7, 12, 5, 7)), 2),
]


@pytest.mark.parametrize(("case", "ranks"), FAST, ids=str)
def test_stages_train_as_a_plain_loop(case: PipelineCase, ranks: int) -> None:
    assert_equal(pool_of(ranks).run(trained, case), plainly(case, case.replicas(ranks)))


# Families at two and three stages, and what else is done to the model, each at least twice.
COVERING: list[tuple[PipelineCase, int]] = [
    (PipelineCase("sequential", placements=(STREAMED,)), 2),
    (PipelineCase("sequential", pipeline=3, accumulation=8, placements=(ON_HOST,)), 3),
    (PipelineCase("unet", pipeline=3, activations="recompute"), 3),
    (PipelineCase("unused", placements=(ZERO_1,), accumulation=2), 4),
    (PipelineCase("unused", pipeline=3, accumulation=2), 3),
    (PipelineCase("tied by hand", pipeline=3, placements=(ON_HOST,)), 3),
    (PipelineCase("tied by hand", accumulation=1, placements=(STREAMED,)), 2),
    (PipelineCase("gpt2", placements=(SHARDED_AWAY,), accumulation=2), 4),
    (PipelineCase("gpt2", chunks=2, placements=(STREAMED,), activations="offload"), 2),
    (PipelineCase("gpt2", chunks=2, placements=(DISK_STREAMED,), activations="offload"), 2),
    (PipelineCase("gpt2", placements=(replace(AWAY_ON_DISK, optimizer_shards=2, gradient_shards=2, weight_shards=2),)), 4),
    (PipelineCase("gpt2, dropout", pipeline=3, activations="selective", delays=2), 3),
    (PipelineCase("gpt2, dropout", chunks=2, activations="offload", placements=(AWAY,)), 2),
    (PipelineCase("gpt2, weighted", accumulation=2, chunks=2, placements=(SHARDED,)), 4),
    (PipelineCase("gpt2, weighted", pipeline=3), 3),
    (PipelineCase("gpt2, all hidden states", pipeline=3), 3),
    (PipelineCase("llama", placements=(AWAY,), activations="recompute"), 2),
    (PipelineCase("llama, padded", pipeline=3), 3),
    (PipelineCase("llama, own checkpoints"), 2),
    (PipelineCase("llama, own checkpoints", pipeline=3, delays=3), 3),
    (PipelineCase("qwen3", pipeline=3, placements=(STREAMED,)), 3),
    (PipelineCase("gemma3", pipeline=3), 3),
    (PipelineCase("gemma3", accumulation=2, placements=(SHARDED,)), 4),
    (PipelineCase("mixtral", activations="recompute"), 2),
    (PipelineCase("mixtral", pipeline=3), 3),
    (PipelineCase("bert", pipeline=3), 3),
    (PipelineCase("bert", chunks=2), 2),
    (PipelineCase("albert", pipeline=3, activations="recompute"), 3),
    (PipelineCase("albert", placements=(AWAY,)), 2),
    (PipelineCase("vit"), 2),
    (PipelineCase("vit", pipeline=3, placements=(ON_HOST,)), 3),
    (PipelineCase("t5"), 2),
    (PipelineCase("t5", pipeline=3), 3),
    (PipelineCase("bart"), 2),
    (PipelineCase("bart", pipeline=3), 3),
    (PipelineCase("whisper"), 2),
    (PipelineCase("whisper", pipeline=3), 3),
    (PipelineCase("resnet"), 2),
    (PipelineCase("resnet", pipeline=3), 3),
    (PipelineCase("mamba", pipeline=3), 3),
    (PipelineCase("mamba", activations="recompute"), 2),
    (PipelineCase("gpt2, dropout", lengths=(12, 7, 9, 12, 5), pipeline=3), 3),
    (PipelineCase("gpt2", compiles=True, steps=3, activations="recompute"), 2),
    (PipelineCase("sequential", compiles=True, placements=(AWAY,), chunks=2), 2),
    (PipelineCase("gpt2", tensor=2, steps=3), 4),
    (PipelineCase("gpt2", tensor=2, steps=3, border=Cut(1), activations="recompute", placements=(AWAY,)), 4),
    *((PipelineCase(name, pipeline=3, activations="recompute"), 3) for name in ("falcon", "opt", "deberta", "pegasus")),
    *(
        (PipelineCase(name, placements=(AWAY,), chunks=2), 2)
        for name in ("gpt neox", "wav2vec 2", "clip", "an mlp in all blocks")
    ),
    *((PipelineCase(name, activations="recompute"), 2) for name in ("python's chance", "numpy's chance", "chance outside")),
    (PipelineCase("blocks that return dicts", pipeline=3, activations="recompute"), 3),
    (PipelineCase("woven", pipeline=3, activations="offload"), 3),
    (PipelineCase("batch norms", chunks=3), 2),
    (PipelineCase("a cache", placements=(SHARDED,), accumulation=2), 4),
    (PipelineCase("tied by hand", placements=(ZERO_2,), accumulation=2, activations="recompute"), 4),
    (PipelineCase("gpt2", placements=(STREAMED_SHARDS,), accumulation=2), 4),
]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "ranks"), COVERING, ids=str)
def test_any_family_trains_in_stages_as_in_a_plain_loop(case: PipelineCase, ranks: int) -> None:
    assert_equal(pool_of(ranks).run(trained, case), plainly(case, case.replicas(ranks)))


@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        (PipelineCase("tied by hand", activations="recompute", steps=2), 2),
        pytest.param(PipelineCase("gpt2, dropout", pipeline=3, activations="recompute", steps=2), 3, marks=pytest.mark.full),
        pytest.param(PipelineCase("gpt2, dropout", chunks=2, activations="recompute", steps=2), 2, marks=pytest.mark.full),
        pytest.param(PipelineCase("llama, own checkpoints", pipeline=3, steps=2), 3, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_what_a_recomputed_block_makes_is_to_the_bit_what_it_made_first(case: PipelineCase, ranks: int) -> None:
    """By the engine, or by a checkpoint of the user's own, with dropout. It runs as far as backward needs it."""
    for found in pool_of(ranks).run(recomputed, case):
        assert {micro_batch for _, micro_batch, _ in found} == set(range(case.accumulation))
        for key, (first, *again) in found.items():
            assert again in ([], [first]), key
        twice = {key for key, told in found.items() if len(told) == 2}
        assert len(twice) > len(found) / 2
        assert any("drop" in path or path.endswith(".2") for _, _, path in twice) or "own checkpoints" in case.family


@pytest.mark.full
def test_bf16_with_exact_masters_trains_in_stages_as_it_does_without() -> None:
    """Rounded to eight bits, and so not the same to the digit; and the masters of both move alike."""
    staged = PipelineCase("gpt2", precision="bf16", placements=(AWAY,), activations="recompute")
    found, other = pool_of(2).run(trained, staged), pool_of(1).run(trained, replaced(staged, pipeline=1))
    assert found[0].losses == pytest.approx(other[0].losses, rel=1e-2)
    assert found[0].norms == pytest.approx(other[0].norms, rel=2e-2)
    assert_close(found[0].weights, other[0].weights, 2e-2)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (PipelineCase("a counter"), "changes its attribute forwards in every forward"),
        pytest.param(PipelineCase("a memory"), "has made in one forward is read by", marks=pytest.mark.full),
        pytest.param(PipelineCase("clip", agrees=False), "not made of those of micro-batches", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_what_no_stages_can_train_is_refused_by_name_before_it_trains(case: PipelineCase, message: str) -> None:
    assert all(message in each for each in pool_of(2).run(refused, case))


def test_a_rank_holds_the_parameters_of_its_stages_alone() -> None:
    case = PipelineCase("sequential", steps=1)
    whole = sum(each.numel() for each in plainly(case).weights.values()) * 4
    held = [each.held for each in pool_of(2).run(trained, case)]
    assert max(held) < 0.6 * whole + 2 * 4 * 512  # padding of chunks apart


# ---------------------------------------------------------------------- checkpoints

TIED = PipelineCase("tied by hand", optimizer="adamw", steps=4)
MESHES = {
    "2 stages": (TIED, 2),
    "2 x 2": (replaced(TIED, placements=(SHARDED,), accumulation=2), 4),
    "3 stages": (replaced(TIED, pipeline=3, placements=(ON_HOST,)), 3),
    "2 x 2 stages": (replaced(TIED, chunks=2), 2),
}
WAYS = [
    ("2 stages", "2 x 2 stages"),
    pytest.param("2 x 2 stages", "3 stages", marks=pytest.mark.full),
    pytest.param("3 stages", "2 stages", marks=pytest.mark.full),
    pytest.param("2 x 2", "2 x 2", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_checkpoint_goes_on_in_other_stages(before: str, after: str, tmp_path: Path) -> None:
    """With the same random numbers, as they are drawn by key."""
    (case, ranks), (other, count) = MESHES[before], MESHES[after]
    pool_of(ranks).run(saved, case, str(tmp_path / "2"), wait=before != "2 stages")
    found = pool_of(count).run(resumed, other, str(tmp_path / "2"))
    assert_equal(found, plainly(case, ranks // case.pipeline), tolerance=1e-4, skipped=2)
    assert "by key" not in found[0].said


@pytest.mark.parametrize("before", ["2 stages", pytest.param("2 x 2", marks=pytest.mark.full)])
def test_a_checkpoint_of_stages_goes_on_without_a_pipeline_and_back(before: str, tmp_path: Path) -> None:
    (case, ranks), whole = MESHES[before], replaced(TIED, pipeline=1, family="unet")
    case, whole = replaced(case, family="unet"), replaced(whole, accumulation=case.accumulation)
    wanted = plainly(case)
    pool_of(ranks).run(saved, case, str(tmp_path / "2"))
    (found,) = pool_of(1).run(resumed, whole, str(tmp_path / "2"))
    assert_equal([found], wanted, tolerance=1e-4, skipped=2)
    assert "a plan with a pipeline axis draws random numbers by key, and one without from torch's stream" in found.said
    pool_of(1).run(saved, whole, str(tmp_path / "again"))
    assert_equal(pool_of(ranks).run(resumed, case, str(tmp_path / "again")), wanted, tolerance=1e-4, skipped=2)


def test_what_a_block_keeps_of_its_batches_is_saved_from_the_stage_that_has_it(tmp_path: Path) -> None:
    """Running statistics of batch norms."""
    case = PipelineCase("unused", steps=4)
    wanted = used_plainly(case)["state"]
    found = pool_of(2).run(used, case)
    for each in found:
        assert_close({name: each["state"][name] for name in wanted}, wanted, 1e-5)
    pool_of(2).run(saved, case, str(tmp_path / "2"))
    assert_equal(pool_of(2).run(resumed, replaced(case, chunks=2), str(tmp_path / "2")), plainly(case), 1e-5, skipped=2)


# ---------------------------------------------------------------------- use


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_start_trains_a_plan_with_stages_from_weights_of_a_folder(ranks: int, tmp_path: Path) -> None:
    case = PipelineCase("unet", activations="recompute", accumulation=2)
    job = case.job
    torch.manual_seed(job.seed)
    save_model(job.build(), str(tmp_path / "model.safetensors"))
    assert_equal(pool_of(ranks).run(started_by_plan, case, str(tmp_path)), plainly(case, ranks // 2))


@pytest.mark.parametrize("placement", [Placement(), AWAY])
def test_users_see_one_loss_and_whole_weights_and_are_told_what_a_rank_cannot_do(placement: Placement) -> None:
    case = PipelineCase("tied by hand", placements=(placement,))
    wanted, found = used_plainly(case), pool_of(2).run(used, case)
    for each in found:
        for name in ("first", "evaluated", "second", "third"):
            assert each[name] == pytest.approx(wanted[name], rel=1e-6), name
        assert_close({name: each["state"][name] for name in wanted["state"]}, wanted["state"], 1e-5)
        assert each["is random state kept"]
        assert each["metrics"] == (pytest.approx(each["second"]), True)
        says = ("run.loss(batch) runs", "run.forward() runs", "run.accept(loss) runs", "run.backward(loss) runs")
        for refusal, start in zip(each["refusals"], says, strict=False):
            assert refusal.startswith(start)
            assert "use run.step(batch)" in refusal
        assert "is called outside of run.step, run.evaluate and run.weights" in each["refusals"][4]
    assert found[0]["said"].count("were given different batches") == 1


OPENED = [
    (PipelineCase("tied by hand"), 2),
    (PipelineCase("unet", chunks=2, placements=(AWAY,)), 2),
    pytest.param(PipelineCase("gpt2", placements=(STREAMED_SHARDS,), accumulation=2), 4, marks=pytest.mark.full),
    pytest.param(PipelineCase("gpt2", tensor=2, accumulation=2), 4, marks=pytest.mark.full),
    pytest.param(PipelineCase("tied by hand", pipeline=3, placements=(ON_HOST,)), 3, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("case", "ranks"), OPENED, ids=str)
def test_a_model_that_is_opened_is_whole_on_every_rank_and_its_edits_are_trained_on(case: PipelineCase, ranks: int) -> None:
    case = replaced(case, accumulation=case.accumulation * case.replicas(ranks))
    wanted = opened_plainly(case)
    case = replaced(case, accumulation=case.accumulation // case.replicas(ranks))
    for each in pool_of(ranks).run(opened, case):
        assert each["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert each["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)
        assert each["state"].keys() == wanted["state"].keys()
        assert_close({name: each["state"][name] for name in wanted["state"]}, wanted["state"], 1e-5)
        assert_close({name: each["weights"][name] for name in wanted["weights"]}, wanted["weights"], 1e-5)
        assert each["is a part again"]


@pytest.mark.full
def test_a_replica_whose_data_ends_early_takes_part_with_all_its_stages() -> None:
    case = PipelineCase("unet", accumulation=2, steps=3)
    wanted = ends_early_plainly(case)
    for rank, each in enumerate(pool_of(4).run(ends_early, case)):
        assert each.losses == pytest.approx(wanted.losses[: 3 - rank % 2], rel=1e-5)


def test_stages_train_as_torchs_own_do() -> None:
    case = PipelineCase("sequential", clip_norm=None)
    (mine, _), torchs = pool_of(2).run(trained, case), pool_of(2).run(by_torch, case)
    assert mine.losses == pytest.approx(torchs[1].losses, rel=1e-6)
    assert_close(mine.weights, torchs[0].weights | torchs[1].weights, 1e-6)
