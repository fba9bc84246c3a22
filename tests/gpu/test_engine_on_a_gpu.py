"""The engine on a GPU: streams, events and pinned memory give what the all-resident run gives."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from anyfit.placing import activations
from anyfit.placing.chunks import UpdatePhase
from anyfit.placing.updates import Updates
from anyfit.values.plan import Placement, Plan
from tests.oracle import assert_bit_equal, assert_close
from tests.placing.test_engine import MODELS, batches_for, job_for
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, STREAMED, chunk_count, hand_written, placed_of, random_delays, started

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


@pytest.mark.parametrize("route", ["resident", "streamed", "speculates"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_resident_updates_are_the_same_whether_or_not_the_host_knows_the_norm(
    route: str, clip_norm: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that is left out, too: one batch has a loss without end."""
    job = job_for("gpt", precision="bf16", clip_norm=clip_norm)
    others = ROUTES.get(route, Placement())
    plan = hand_written(job, *((Placement(), others)[index % 2] for index in range(chunk_count(job, 8192))), chunk_bytes=8192)
    asked: list[int] = []

    def loss(model: Any, batch: Any) -> Any:
        asked.append(1)
        value: Any = job.loss(model, batch)
        return value * (torch.inf if len(asked) == 4 else 1.0)

    def trained() -> tuple[list[float], dict[str, torch.Tensor], set[int]]:
        asked.clear()
        begun: set[int] = set()
        with started(replace(job, loss=loss), plan, device="cuda") as run:
            updates: Any = placed_of(run).updates
            apply = updates.apply

            def seen(factor: float | None) -> None:
                begun.update(chunk.state.index for chunk in updates.chunks if chunk.update.phase is UpdatePhase.BEGUN)
                apply(factor)

            updates.apply = seen
            losses = [float(run.step(batch)) for batch in batches_for("gpt", STEPS)]
            assert run.skipped == 1
            return losses, run.state_dict(), begun

    losses, weights, begun = trained()
    assert begun == {index for index, chunk in enumerate(plan.chunks) if chunk.route == "resident"}
    monkeypatch.setattr(Updates, "begin", lambda *_arguments: None)
    again, expected, none = trained()
    assert not none
    assert losses[:3] + losses[4:] == again[:3] + again[4:]
    assert_bit_equal(weights, expected)


def test_a_step_that_ends_before_the_norm_is_known_is_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for("gpt", precision="bf16")
    with started(job, hand_written(job, chunk_bytes=8192), device="cuda") as run:
        batch = batches_for("gpt", 1)[0]
        run.step(batch)

        def interrupted() -> torch.Tensor:
            raise KeyboardInterrupt

        monkeypatch.setattr(placed_of(run).lanes, "reading", lambda _tensor: interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.step(batch)
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="broken off half-way; go on from the last checkpoint"):
            run.step(batch)


def test_lanes_are_given_more_while_the_host_waits_for_the_norm() -> None:
    """A copy into pageable memory would keep all threads from the driver until the GPU comes to it."""
    job = job_for("gpt", precision="bf16")
    with started(job, hand_written(job, chunk_bytes=8192), device="cuda") as run:
        far, near = torch.ones(2**20, device="cuda"), torch.full((2**20,), 2.0, pin_memory=True)
        aside = torch.empty_like(far)
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second
        known = placed_of(run).lanes.reading(far.sum())
        waiting = threading.Thread(target=known)
        waiting.start()
        with torch.cuda.stream(torch.cuda.Stream()):
            aside.copy_(near, non_blocking=True)
            torch.cuda.current_stream().synchronize()
        assert not torch.cuda.current_stream().query()  # the computation is not over
        waiting.join()
    assert float(known()) == 2**20
    assert float(aside[-1]) == 2


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
