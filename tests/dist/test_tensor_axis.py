"""A plan with a tensor axis trains what one plain process trains, whatever else it does to the model."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model

from anyfit.values.cuts import Cut
from anyfit.values.plan import Placement
from tests.oracle import assert_close
from tests.plans import AWAY, AWAY_ON_DISK

from .axis_work import (
    AxisCase,
    Told,
    ends_early,
    ends_early_plainly,
    generated,
    generated_plainly,
    plainly,
    refused,
    resumed,
    saved,
    started_from,
    trained,
    used,
    used_plainly,
)
from .covering import pairwise
from .pool import pool_of
from .talking import TABLES

SHARDED = Placement(weight_shards=2, gradient_shards=2, optimizer_shards=2)
SHARDED_AWAY = Placement(
    weights="host",
    gradients="host",
    optimizer="host",
    update="host",
    speculates=True,
    weight_shards=2,
    gradient_shards=2,
    optimizer_shards=2,
)
SHARDED_ON_DISK = replace(SHARDED_AWAY, optimizer="disk")
STREAMED = Placement(optimizer="host")


def assert_equal(found: list[Told], wanted: Told, tolerance: float = 1e-5, skipped: int = 0) -> None:
    for each in found:
        assert each.losses == pytest.approx(wanted.losses[skipped:], rel=tolerance)
        assert each.norms == pytest.approx(wanted.norms[skipped:], rel=tolerance)
        assert each.weights.keys() == wanted.weights.keys()
        for name, expected in wanted.weights.items():
            worst, largest = (float(x.double().abs().max()) for x in (each.weights[name] - expected, expected))
            assert worst <= tolerance * max(largest, 1e-3), f"{name}: {worst:.2e} of {largest:.2e}"


FAST = [
    (AxisCase("penalised", border=Cut(0), placements=(AWAY,), activations="recompute", optimizer="adamw"), 2),
    (AxisCase("penalised", border=Cut(1), clip_norm=0.3), 2),
    (AxisCase("gpt2, dropout", border=Cut(1), activations="recompute", clip_norm=0.01), 2),
    (AxisCase("skipping", border=None, placements=(SHARDED,), accumulation=2, optimizer="adagrad"), 4),
]


@pytest.mark.parametrize(("case", "ranks"), FAST, ids=str)
def test_a_tensor_axis_trains_as_one_process(case: AxisCase, ranks: int) -> None:
    found = pool_of(ranks).run(trained, case)
    assert_equal(found, plainly(case))
    assert found[0].cuts > 0


# What a plan with a tensor axis is made of. Every two choices of different factors meet in at least one run.
FAMILIES: list[list[str]] = [
    ["gpt2"], ["llama, grouped heads"], ["qwen3"], ["gemma3"], ["bert"], ["t5, decoder", "t5, encoder"], ["vit"],
    ["swin", "convnext"], ["whisper, decoder", "whisper, encoder"], ["mixtral", "qwen3 moe"], ["mamba"], ["llama, adapted"],
    ["plain mlp", "plain convolution", "plain attention", "torch's encoder layer"],
]  # fmt: skip
FACTORS: dict[str, list[Any]] = {
    "family": FAMILIES,
    "price": [0.0, 1e-10, 1e-9, None],  # of memory, for the solver; None: a random objective, one of five
    "mesh": [(2, 2), (4, 4), (4, 2)],  # ranks, and how many of them along the tensor axis
    "activations": ["keep", "recompute", "offload"],
    "state": ["resident", "sharded", "away", "disk"],
    "accumulation": [1, 2],
    "clip_norm": [None, 0.1],
    "drops": [False, True],
    "ties": [False, True],
}


def drawn() -> list[tuple[AxisCase, int]]:
    cases = []
    for at, row in enumerate(pairwise(FACTORS)):
        names, price, (ranks, tensor), state = row.pop("family"), row.pop("price"), row.pop("mesh"), row.pop("state")
        objective = at % 5 if price is None else None
        case = AxisCase(names[at % len(names)], tensor, objective, price or 0.0, **row)
        cases.append((replace(case, placements=(placement_of(state, ranks // tensor),)), ranks))
    return cases


def placement_of(state: str, replicas: int) -> Placement:
    """What has no replicas to be sharded over has its optimizer's state on the host instead."""
    if state == "resident":
        return Placement()
    if replicas > 1:
        return {"sharded": SHARDED, "away": SHARDED_AWAY, "disk": SHARDED_ON_DISK}[state]
    return {"sharded": STREAMED, "away": AWAY, "disk": AWAY_ON_DISK}[state]


COVERING = drawn()


def test_every_two_choices_of_a_plan_meet_in_a_run_that_is_compared() -> None:
    rows = pairwise(FACTORS)
    assert len(rows) <= 60
    for (name, choices), (other, others) in itertools.combinations(FACTORS.items(), 2):
        met = {(FACTORS[name].index(row[name]), FACTORS[other].index(row[other])) for row in rows}
        assert met == set(itertools.product(range(len(choices)), range(len(others))))


# In fp32, which the engine holds; the same blocks hold to 1e-9 in fp64 in tests/layouts/test_running.py.
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "ranks"), COVERING, ids=str)
def test_any_family_and_mesh_trains_as_one_process(case: AxisCase, ranks: int) -> None:
    found = pool_of(ranks).run(trained, case)
    assert_equal(found, plainly(case, ranks))
    if case.price == FACTORS["price"][2]:
        assert found[0].cuts > 0


def test_other_lengths_than_the_first_train_as_one_process_whether_the_axis_divides_them_or_not() -> None:
    case = AxisCase("gpt2", border=Cut(1), lengths=(24, 18, 7, 24))
    assert_equal(pool_of(2).run(trained, case), plainly(case))


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [AxisCase("long", border=Cut(1)), AxisCase("long", objective=1, activations="recompute")], ids=str
)
def test_what_was_captured_at_512_tokens_trains_as_one_process_at_777_and_1024(case: AxisCase) -> None:
    case = replace(case, lengths=(512, 777, 1024))
    assert_equal(pool_of(2).run(trained, case), plainly(case))


@pytest.mark.full
def test_bf16_with_exact_masters_trains_as_it_does_without_the_axis() -> None:
    """Rounded to eight bits, and so not the same to the digit; and the masters of both move alike."""
    cut, whole = (AxisCase("gpt2", tensor=each, border=None, precision="bf16", placements=(AWAY,)) for each in (2, 1))
    found, other = pool_of(2).run(trained, cut), pool_of(1).run(trained, whole)
    assert found[0].losses == pytest.approx(other[0].losses, rel=2e-2)
    assert found[0].norms == pytest.approx(other[0].norms, rel=2e-2)
    assert_close(found[0].weights, other[0].weights, 5e-2)


# ---------------------------------------------------------------------- checkpoints

MESHES = {
    "2 x 2": (AxisCase("skipping", border=Cut(1), placements=(SHARDED,), optimizer="adamw"), 4),
    "1 x 4": (AxisCase("skipping", border=None, tensor=4, placements=(AWAY,), optimizer="adamw"), 4),
    "4": (AxisCase("skipping", tensor=1, placements=(SHARDED,), optimizer="adamw"), 4),
    "1": (AxisCase("skipping", tensor=1, optimizer="adamw"), 1),
    "2 x 2, inner factors": (AxisCase("gpt2", border=None, placements=(SHARDED,), optimizer="adamw"), 4),
    "2, inner factors": (AxisCase("gpt2", tensor=1, placements=(SHARDED,), optimizer="adamw"), 2),
    "2 x 2, inner factors on the disk": (AxisCase("gpt2", border=None, placements=(SHARDED_ON_DISK,), optimizer="adamw"), 4),
    "2 x 2, odd words": (
        AxisCase("gemma's odd words", border=None, tables=TABLES["gemma's odd words"], placements=(SHARDED,), optimizer="adamw"),
        4,
    ),
    "1 x 4, odd words": (
        AxisCase("gemma's odd words", 4, border=None, tables=TABLES["gemma's odd words"], placements=(AWAY,), optimizer="adamw"),
        4,
    ),
    "2, odd words": (AxisCase("gemma's odd words", tensor=1, placements=(SHARDED,), optimizer="adamw"), 2),
}
ALL_WAYS = [("4", "2 x 2"), ("2 x 2", "4"), ("1", "1 x 4"), ("1 x 4", "2 x 2"), ("2, inner factors", "2 x 2, inner factors")]
WAYS = [
    ("2 x 2", "1"),
    pytest.param("2 x 2, inner factors", "2, inner factors", marks=pytest.mark.full),
    pytest.param("2, inner factors", "2 x 2, inner factors on the disk", marks=pytest.mark.full),
    ("2 x 2, inner factors on the disk", "2, inner factors"),
    *(pytest.param(*each, marks=pytest.mark.full) for each in ALL_WAYS),
    ("2 x 2, odd words", "2, odd words"),
    pytest.param("2, odd words", "1 x 4, odd words", marks=pytest.mark.full),
    pytest.param("1 x 4, odd words", "2 x 2, odd words", marks=pytest.mark.full),
]


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_a_checkpoint_of_one_mesh_goes_on_with_another(before: str, after: str, tmp_path: Path) -> None:
    (case, ranks), (other, count) = MESHES[before], MESHES[after]
    pool_of(ranks).run(saved, case, str(tmp_path / "2"), wait=not before.startswith("2 x 2"))
    found = pool_of(count).run(resumed, other, str(tmp_path / "2"))
    assert_equal(found, plainly(case), skipped=2)


# ---------------------------------------------------------------------- use


@pytest.mark.parametrize(("accumulation", "tensor"), [(2, 2), pytest.param(1, 4, marks=pytest.mark.full)])
def test_weights_of_a_folder_are_read_in_part_and_the_plan_is_rehearsed(accumulation: int, tensor: int, tmp_path: Path) -> None:
    case = AxisCase("skipping", tensor, border=Cut(1), accumulation=accumulation, activations="recompute")
    torch.manual_seed(case.job.seed)
    model = case.model()
    save_model(model, str(tmp_path / "model.safetensors"))
    assert_equal(pool_of(tensor).run(started_from, case, str(tmp_path)), plainly(case))


@pytest.mark.parametrize("placement", [Placement(), AWAY])
def test_users_see_whole_weights_and_ranks_of_an_axis_one_batch(placement: Placement) -> None:
    case = AxisCase("skipping", border=Cut(1), placements=(placement,))
    wanted = used_plainly(case)
    found = pool_of(2).run(used, case)
    for each in found:
        assert each["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        for name in ("evaluated", "by hand", "by loop"):
            assert each[name] == pytest.approx(wanted[name], rel=1e-5)
        for name in ("opened", "weights"):
            assert_close({key: each[name][key] for key in wanted[name]}, wanted[name], 1e-5)
        assert each["drawn"] == found[0]["drawn"]
    assert found[0]["said"].count("were given different batches") == 1


def test_a_replica_whose_data_ends_early_takes_part_with_nothing_of_its_own() -> None:
    case = AxisCase("skipping", border=Cut(1))
    wanted, found = ends_early_plainly(case), pool_of(4).run(ends_early, case)
    for rank, each in enumerate(found):
        assert each.losses == pytest.approx(wanted.losses[: 3 - rank // 2], rel=1e-5)
    assert_close({"leave.bias": found[3].weights["leave.bias"]}, {"leave.bias": wanted.weights["leave.bias"]}, 1e-5)


@pytest.mark.full
def test_a_call_that_cannot_be_captured_runs_with_the_weights_put_together() -> None:
    case = AxisCase("tied", border=Cut(1), placements=(AWAY,))
    wanted = generated_plainly(case)
    found = pool_of(2).run(generated, case)
    for each in found:
        assert each["written"] == wanted["written"]
        assert each["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert "'transformer.h.0' runs with its weights put together over the tensor axis: argument" in found[0]["said"]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "nothing"),
        ("a block", "the plan cuts block 'blocks.9', and the model has none"),
        ("a parameter", "the plan cuts 'inner.1.weights' of block 'blocks.0', which has none; did you mean 'inner.1.weight'?"),
        ("an uneven one", "in 5 pieces, over 2 ranks, which do not divide it evenly"),
        ("a tied one", "the plan cuts enter.weight, which is also leave.weight; tied weights are held whole"),
        ("a hook inside", "block 'blocks.0' cannot be cut over the tensor axis: inner.1 (Linear) has a hook"),
        ("a hook on a gradient", "blocks.0.inner.1.weight has a hook on its gradient"),
        ("shared memory", "shares its memory with"),
        (
            "an optimizer",
            "Adafactor steps a part of a parameter otherwise than the whole, and this plan cuts blocks.0.inner.1.bias",
        ),
        ("other losses", "hold the model together, and have other losses in step 1"),
        ("slightly other losses", "hold the model together, and have other losses in step 1"),
        ("a gradient by hand", "torch.autograd.grad of a weight that lies in parts on several ranks"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(what: str, message: str) -> None:
    assert all(message in each for each in pool_of(2).run(refused, what)), pool_of(2).run(refused, what)
