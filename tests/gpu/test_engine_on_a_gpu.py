"""The engine on a GPU: streams, events and pinned memory give what the all-resident run gives."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from anyfit.placing import activations
from anyfit.values.plan import Placement, Plan
from tests.oracle import assert_bit_equal, assert_close
from tests.placing.test_engine import MODELS, batches_for, job_for
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, STREAMED, hand_written, random_delays, started

pytestmark = pytest.mark.gpu
STEPS = 10
SPECULATES = Placement(weights="host", gradients="host", optimizer="host", update="host", speculates=True)
ROUTES = {"streamed": STREAMED, "away, streamed": AWAY_STREAMED, "on host": ON_HOST, "away": AWAY, "speculates": SPECULATES}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    kernels = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # fused backward kernels add up in any order
    kernels.__enter__()
    before, activations.LEAST_BYTES = activations.LEAST_BYTES, 256
    yield
    activations.LEAST_BYTES = before
    kernels.__exit__(None, None, None)
    torch.use_deterministic_algorithms(False)


def train(model: str, plan: Plan, job: Any, seed: int | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
    with started(job, plan, None if seed is None else random_delays(seed), device="cuda") as run:
        losses = [float(run.step(batch)) for batch in batches_for(model, STEPS)]
        return losses, run.state_dict()


@pytest.mark.parametrize("route", sorted(ROUTES))
@pytest.mark.parametrize(
    ("model", "precision"),
    [("gpt", "bf16"), ("llama", "fp32"), ("encoder-decoder", "bf16"), ("experts", "bf16"), ("convolutional", "fp32")],
)
def test_every_route_trains_as_the_resident_one(route: str, model: str, precision: Any) -> None:
    job = job_for(model, precision=precision, clip_norm=0.5)
    expected_losses, expected = train(model, hand_written(job, chunk_bytes=8192), job)
    choices: Any = {block: ("recompute", "offload")[index % 2] for index, block in enumerate(MODELS[model][1])}
    for accumulation, seed in ((1, None), (1, 1), (2, 2)):
        kept = {} if accumulation > 1 else choices
        plan = hand_written(job, ROUTES[route], chunk_bytes=8192, slots=12, accumulation=accumulation, activations=kept)
        if accumulation > 1:
            expected_losses, expected = train(model, hand_written(job, chunk_bytes=8192, accumulation=accumulation), job)
        losses, weights = train(model, plan, job, seed)
        if route == "streamed":  # the same kernels in the same order
            assert losses == expected_losses
            assert_bit_equal(weights, expected)
        else:  # the host's AdamW rounds otherwise, and so do the norms of gradients that are gathered by chunk
            assert losses == pytest.approx(expected_losses, rel=2e-3 if precision == "bf16" else 1e-4)
            matrices = {name for name, tensor in expected.items() if tensor.dim() > 1}  # a key's bias has no gradient but noise
            mine, theirs = ({name: each[name] for name in matrices} for each in (weights, expected))
            assert_close(mine, theirs, 2e-2 if precision == "bf16" else 1e-3)


def test_memory_of_a_gpu_is_given_back() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    job = job_for("gpt", precision="bf16")
    with started(job, hand_written(job, AWAY, slots=8), device="cuda") as run:
        run.step(batches_for("gpt", 1)[0])
    model, run = run.model, None
    del model
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before < 2**20
