"""The stages of a pipeline beside a plain loop, in double precision: five steps with clipping, of lengths that change.

The engine holds weights in fp32 or bf16, where test_pipeline.py has the same families at 1e-6: what rounding alone makes of sums
in another order. Here nothing hides behind that.
"""

from __future__ import annotations

import pytest
import torch

from tests.stages.families import FAMILIES
from tests.stages.others import EQUAL

from .double_work import plainly_in_double, trained_in_double, weights_of
from .pool import pool_of

IN_FP32 = ("llama", "qwen3", "gemma3", "mixtral", "t5", "mamba")  # compute norms or scans in fp32, whatever the weights are


def assert_trains_as_plainly(name: str, ranks: int, chunks: int = 1, delays: int | None = None) -> None:
    found, (losses, norms, weights) = pool_of(ranks).run(trained_in_double, name, chunks, delays), plainly_in_double(name)
    tolerance = 1e-6 if name.startswith(IN_FP32) else 1e-9
    assert found[-1][0] == pytest.approx(losses, rel=tolerance)
    for _, mine, _ in found:
        assert mine == pytest.approx(norms, rel=tolerance)
    joined = weights_of(found)
    assert joined.keys() == weights.keys()
    for key, expected in weights.items():
        assert torch.isfinite(joined[key]).all(), key
        worst, largest = float((joined[key] - expected).abs().max()), float(expected.abs().max())
        assert worst <= tolerance * max(largest, 1e-2), f"{key}: {worst:.2e} of {largest:.2e}"


@pytest.mark.parametrize(
    ("name", "ranks"), [("tied by hand", 2), pytest.param("an mlp in all blocks", 3, marks=pytest.mark.full)]
)
def test_five_steps_are_those_of_a_plain_loop_to_nine_digits(name: str, ranks: int) -> None:
    """With weights that two places hold, and some that all three do."""
    assert_trains_as_plainly(name, ranks, delays=ranks)


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", [*FAMILIES, *EQUAL])
def test_five_steps_of_any_family_are_those_of_a_plain_loop(name: str, ranks: int) -> None:
    assert_trains_as_plainly(name, ranks, delays=1 if name in ("unet", "gpt2, dropout", "albert") else None)


@pytest.mark.full
@pytest.mark.parametrize("name", ["unet", "gpt2, dropout", "llama, own checkpoints", "albert"])
def test_two_stages_a_rank_train_as_a_plain_loop(name: str) -> None:
    assert_trains_as_plainly(name, 2, chunks=2, delays=4)
