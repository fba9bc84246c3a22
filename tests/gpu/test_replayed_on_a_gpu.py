"""Blocks replayed as CUDA graphs, beside the same blocks launched op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyfit.values.plan import Placement
from tests.models import byte_batches
from tests.oracle import assert_bit_equal
from tests.placing.test_replayed import Layer, Stack, job_for, plan_for
from tests.plans import AWAY, ON_HOST, RESIDENT, STREAMED, placed_of, started
from tests.stacks import BLOCKS, ROWS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", [RESIDENT, STREAMED, ON_HOST, AWAY], ids=["resident", "streamed", "host", "away"])
def test_replayed_blocks_train_as_recomputed_ones_to_the_bit(placement: Placement, precision: Any) -> None:
    job, batches = job_for(clip_norm=0.3, precision=precision), byte_batches(6, ROWS)
    plan = plan_for(job, placement)
    found = []
    for each in (plan, plan.without_replayed(BLOCKS)):
        with started(job, each, None, "cuda") as run:
            losses = [float(run.step(batch)) for batch in batches]
            assert placed_of(run).replayed.reasons == {}
            assert placed_of(run).replayed.recorded == (1 if each.replayed else 0)
            found.append((losses, run.state_dict()))
    assert found[0][0] == found[1][0]
    assert_bit_equal(found[0][1], found[1][1])


def test_a_block_that_waits_for_the_gpu_is_launched_op_by_op() -> None:
    class Asks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2.0 if float(x.sum()) > 0 else 1.0)

    job, batches = job_for(lambda: Stack(Asks)), byte_batches(3, ROWS)
    with started(job, plan_for(job, RESIDENT), None, "cuda") as run:
        losses = [float(run.step(batch)) for batch in batches]
        assert "cannot be recorded" in placed_of(run).replayed.reasons["blocks.0"]
    with started(job, plan_for(job, RESIDENT).without_replayed(BLOCKS), None, "cuda") as run:
        assert [float(run.step(batch)) for batch in batches] == losses
