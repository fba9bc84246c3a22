"""Recomputed blocks on a GPU, where backward runs on a thread of its own: the bits of kept ones."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.models import byte_batches
from tests.oracle import assert_bit_equal
from tests.placing.test_recompute import KINDS, ROWS, Stack, drawn, job_for, recomputed, seeded
from tests.plans import AWAY, RESIDENT, started

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("choice", ["recompute", "selective"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_recomputed_block_gives_the_bits_of_a_kept_one(kind: str, choice: Any) -> None:
    job = job_for(lambda: Stack(KINDS[kind]))
    results = []
    for each, placement in (("keep", RESIDENT), (choice, RESIDENT), (choice, AWAY)):
        seeded()
        torch.manual_seed(0)
        with started(job, recomputed(job, each, placement), device="cuda") as run:
            losses = [float(run.step(batch)) for batch in byte_batches(6, ROWS)]
            assert run.skipped == 0
            results.append((losses, run.state_dict(), drawn(), torch.rand((), device="cuda").item()))
    (losses, weights, *random_numbers), *others = results
    for other_losses, _, *other_numbers in others:
        assert other_numbers == random_numbers
        assert other_losses == pytest.approx(losses, rel=1e-6)
    assert_bit_equal(others[0][1], weights)


def test_attention_with_dropout_draws_the_same_when_products_are_kept() -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.TransformerEncoderLayer(64, 2, 64, dropout=0.2, batch_first=True)

        def forward(self, x: Any) -> Any:
            return self.inner(torch.cat([x] * 4, -1))[..., : x.shape[-1]]

    job = job_for(lambda: Stack(Attention), precision="bf16")
    results = []
    for choice in ("keep", "selective"):
        with started(job, recomputed(job, choice, RESIDENT), device="cuda") as run:
            results.append(([float(run.step(batch)) for batch in byte_batches(6, ROWS)], run.state_dict()))
    assert results[0][0] == results[1][0]
    assert_bit_equal(results[1][1], results[0][1])
