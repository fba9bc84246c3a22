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
from tests.stacks import BLOCKS, LAYERS, ROWS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("choice", ["keep", "recompute"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", [RESIDENT, STREAMED, ON_HOST, AWAY], ids=["resident", "streamed", "host", "away"])
def test_replayed_blocks_train_as_others_to_the_bit(placement: Placement, precision: Any, choice: str) -> None:
    job, batches = job_for(clip_norm=0.3, precision=precision), byte_batches(6, ROWS)
    plan = plan_for(job, placement, choice=choice)
    found = []
    for each in (plan, plan.without_replayed(BLOCKS)):
        with started(job, each, None, "cuda") as run:
            losses = [float(run.step(batch)) for batch in batches]
            assert placed_of(run).replayed.reasons == {}
            assert placed_of(run).replayed.recorded == (0 if not each.replayed else LAYERS if choice == "keep" else 1)
            found.append((losses, run.state_dict()))
    assert found[0][0] == found[1][0]
    assert_bit_equal(found[0][1], found[1][1])


class Waits(torch.autograd.Function):
    """Whose backward cannot be recorded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: torch.Tensor) -> torch.Tensor:
        return slope * (1.0 if float(slope.sum()) > -1e9 else 2.0)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_a_block_that_waits_for_the_gpu_is_launched_op_by_op(choice: str, which: int) -> None:
    class Asks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found = super().forward(x)
            return Waits.apply(found) if self.index == which else found

    job, batches = job_for(lambda: Stack(Asks)), byte_batches(6, ROWS)
    plan = plan_for(job, RESIDENT, choice=choice)
    with started(job, plan, None, "cuda") as run:
        losses = [float(run.step(batch)) for batch in batches]
        reasons = placed_of(run).replayed.reasons
        assert "cannot be recorded" in reasons[f"blocks.{which}"]
        assert len(reasons) == 1  # the others draw random numbers, also after a recording that failed
    with started(job, plan.without_replayed(BLOCKS), None, "cuda") as run:
        assert [float(run.step(batch)) for batch in batches] == losses
