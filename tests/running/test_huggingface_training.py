"""Padded Hugging Face batches through the engine: losses, norms and weights are those of the model's own mean over the whole
batch, whatever the size of a micro-batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyfit
from tests.heads import HEADS, ROWS, Head, batch_of, model_of
from tests.oracle import assert_close
from tests.plans import hand_written, started

STEPS = 3


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def job_for(head: Head) -> anyfit.Job:
    return anyfit.Job.from_huggingface(
        model_of(head), batch_size=ROWS, sample=batch_of(head), optimizer=sgd, precision="fp32", clip_norm=1.0
    )


def plainly(head: Head) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms and weights of the loop that a user would write."""
    model, losses, norms = model_of(head), [], []
    optimizer = sgd(model)
    for step in range(STEPS):
        loss = model(**batch_of(head, step)).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def assert_alike(mine: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Within 1e-6; each tensor by itself within 3e-6, but for biases of attention that began as zero and hardly learn: the true
    gradient of a key's is zero."""
    noise = {name for name, each in plain.items() if name.endswith("bias") and float(each.norm()) < 1e-5}
    assert all(float(mine[name].norm()) < 1.1e-5 for name in noise)
    assert_close(*({name: weights[name] for name in plain if name not in noise} for weights in (mine, plain)), 3e-6)
    whole = [torch.cat([weights[name].flatten().double() for name in plain]) for weights in (mine, plain)]
    assert (whole[0] - whole[1]).norm() <= 1e-6 * whole[1].norm()


def counted_tokens(run: anyfit.Run) -> float:
    return run.metrics.tokens_per_second * run.metrics.seconds


@pytest.mark.parametrize("name", HEADS)
def test_padded_batches_train_alike_for_every_size_of_micro_batch(name: str) -> None:
    head = HEADS[name]
    losses, norms, weights = plainly(head)
    for size in (1, 4, ROWS):
        job = job_for(head)
        plan = replace(hand_written(job, chunk_bytes=2**14), micro_batch=size, accumulation=-(-ROWS // size))
        with started(job, plan) as run:
            for step in range(STEPS):
                batch = batch_of(head, step)
                assert float(run.step(batch)) == pytest.approx(losses[step], rel=1e-6)
                assert run.metrics.gradient_norm == pytest.approx(norms[step], rel=1e-6)
                if "attention_mask" in batch:
                    assert counted_tokens(run) == pytest.approx(float(batch["attention_mask"].sum()))
            assert_alike(run.state_dict(), weights)


@pytest.mark.parametrize("name", ["causal, sliced", "masked", "text"])
def test_a_batch_without_any_label_gives_zero_gradients_as_in_plain_pytorch(name: str) -> None:
    head = HEADS[name]
    model, batch = model_of(head), batch_of(head)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model(**batch).loss.backward()
    assert all(float(each.grad.abs().max()) == 0 for each in model.parameters() if each.grad is not None)
    job = job_for(head)
    with started(job, hand_written(job, chunk_bytes=2**14)) as run:
        before = run.state_dict()
        assert torch.isnan(run.step(batch))
        assert (run.skipped, run.metrics.gradient_norm) == (0, 0.0)
        assert_close(run.state_dict(), before, 0.0)
