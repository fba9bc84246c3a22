"""All axes in one plan: two of data, tensor and pipeline each, with whatever else is done to the model, beside one loop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from anyfit.values.cuts import Cut
from anyfit.values.plan import BlockCut, Placement, Stage

from .covering import pairwise
from .pipeline_work import PipelineCase, Told, plainly, replaced, resumed, saved, trained
from .pool import pool_of
from .test_pipeline import AWAY, ON_HOST, SHARDED, SHARDED_AWAY, ZERO_1, assert_equal

RANKS = 8
FACTORS: dict[str, list[Any]] = {
    "family": ["gpt2, dropout", "llama", "bert", "vit"],
    "placement": [Placement(), SHARDED, ZERO_1, SHARDED_AWAY],
    "activations": ["keep", "recompute", "offload"],
    "accumulation": [2, 4],
    "border": [None, Cut(1)],
    "chunks": [1, 2],
}


def drawn() -> list[PipelineCase]:
    """Every two choices of different factors meet in at least one."""
    cases = []
    for row in pairwise(FACTORS):
        placement = row.pop("placement")
        cases.append(PipelineCase(placements=(placement,), tensor=2, steps=3, **row))
    return cases


def assert_is_one_loop(case: PipelineCase) -> None:
    found, wanted = pool_of(RANKS).run(trained, case), plainly(case, case.replicas(RANKS))
    assert_equal(found, wanted)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", drawn(), ids=str)
def test_eight_ranks_along_three_axes_train_as_one_loop(case: PipelineCase) -> None:
    assert_is_one_loop(case)


# A cut block is generated code, and is not compiled; without a tensor axis blocks of stages are.
COMPILED = [
    PipelineCase("gpt2", compiles=True, steps=3, accumulation=2, placements=(SHARDED,), activations="recompute"),
    PipelineCase("bert", compiles=True, steps=3, accumulation=2, placements=(SHARDED_AWAY,)),
]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_blocks_of_stages_train_over_a_data_axis_as_one_loop(case: PipelineCase) -> None:
    assert_equal(pool_of(4).run(trained, case), plainly(case, case.replicas(4)))


def test_a_plan_that_compiles_a_cut_block_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"block 'blocks\.0' is cut over the tensor axis, and cut blocks are neither compiled"):
        Stage(0, 0, {}, compiled=("blocks.0",), cut={"blocks.0": BlockCut({})})


# ---------------------------------------------------------------------- checkpoints

EIGHT = PipelineCase("gpt2", tensor=2, steps=4, accumulation=2, placements=(SHARDED,), border=Cut(1), activations="recompute")
OTHERS = {
    "1 rank": (replaced(EIGHT, tensor=1, pipeline=1, placements=(AWAY,), border=None, accumulation=4), 1),
    "3 ranks": (replaced(EIGHT, tensor=1, pipeline=3, placements=(ON_HOST,), border=None, accumulation=4), 3),
    "8 ranks": (replaced(EIGHT, chunks=2), RANKS),
}


@pytest.fixture(scope="module")
def checkpoint_of_eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Told]:
    folder = str(tmp_path_factory.mktemp("eight") / "2")
    pool_of(RANKS).run(saved, EIGHT, folder)
    return folder, plainly(EIGHT, 2)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_eight_ranks_along_three_axes_goes_on_with_others(
    name: str, checkpoint_of_eight: tuple[str, Told]
) -> None:
    case, ranks = OTHERS[name]
    folder, wanted = checkpoint_of_eight
    assert_equal(pool_of(ranks).run(resumed, case, folder), wanted, skipped=2)


@pytest.mark.full
@pytest.mark.parametrize("name", ["1 rank", "3 ranks"])
def test_a_checkpoint_of_fewer_ranks_goes_on_with_eight(name: str, tmp_path: Path) -> None:
    case, ranks = OTHERS[name]
    pool_of(ranks).run(saved, case, str(tmp_path / "2"))
    assert_equal(pool_of(RANKS).run(resumed, EIGHT, str(tmp_path / "2")), plainly(EIGHT, 2), skipped=2)


def test_every_two_choices_of_a_plan_with_all_axes_meet_in_a_run() -> None:
    rows = pairwise(FACTORS)
    for (name, choices), (other, others) in itertools.combinations(FACTORS.items(), 2):
        met = {(FACTORS[name].index(row[name]), FACTORS[other].index(row[other])) for row in rows}
        assert met == set(itertools.product(range(len(choices)), range(len(others))))
    assert len(drawn()) <= 20
